"""One CPU emulated as several devices, for trying out and for tests."""

import os
import re

import jax

from lsgd_jax._src.checks import check_positive_int


# What XLA leaves to a library of kernels for CPUs: nothing but products of matrices.
KERNELS = "--xla_cpu_experimental_ynn_fusion_type"
PRODUCTS = "LIBRARY_FUSION_TYPE_DOT"


def emulate_devices(count: int) -> None:
    """Emulates this machine's CPU as several devices; call it before jax uses a device.

    The same as ``jax.config.update("jax_num_cpu_devices", count)``, and XLA gets
    enough threads for them (see `reserve_threads`).

    Args:
      count: how many devices; GPUs and TPUs are not affected.

    Raises:
      ValueError: a count below 1; RuntimeError: jax has its devices already.

    >>> import lsgd_jax as lj
    >>> lj.emulate_devices(0)
    Traceback (most recent call last):
    ValueError: `count` must be a positive int, got count=0
    """
    check_positive_int("count", count)
    jax.config.update("jax_num_cpu_devices", count)
    reserve_threads()


def reserve_threads() -> None:
    """Asks XLA for enough threads for the CPU devices that are to be emulated.

    XLA takes one thread per emulated device. One that waits in a collective keeps its
    thread, and those that the others still need for their convolutions can run out: the
    process then ends after 40 s. Sets the environment variable PJRT_NPROC, unless it is
    set; without effect once jax has its devices. Importing `lsgd_jax` calls this, too.
    """
    flag = r"xla_force_host_platform_device_count=(\d+)"
    asked = re.findall(flag, os.environ.get("XLA_FLAGS", ""))
    count = max([jax.config.values["jax_num_cpu_devices"], *map(int, asked)])
    if count > 1:
        # Each device may wait in one collective of the step and in one of a diagnosis.
        os.environ.setdefault("PJRT_NPROC", str(2 * count + (os.cpu_count() or 1)))


def choose_kernels() -> None:
    """Has XLA compile convolutions for CPUs by its own means.

    The library of kernels that it leaves them to by default takes up to 1.5 times as long
    to train a network of large ones. Adds to the environment variable XLA_FLAGS, unless
    these kernels are named there; without effect on GPUs, once jax has its devices, and for
    versions of jax from 0.13 on, which may not know the flag. Importing `lsgd_jax` calls
    this, too.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if jax.__version_info__ < (0, 13) and KERNELS not in flags:
        os.environ["XLA_FLAGS"] = f"{KERNELS}={PRODUCTS} {flags}".strip()
