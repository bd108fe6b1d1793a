"""Settings of XLA for CPUs: emulated devices, their threads, fast kernels."""

import os
import re

import jax

from lsgd_jax._src.checks import check_positive_int


# XLA uses its library of CPU kernels for matrix products only.
KERNELS = "--xla_cpu_experimental_ynn_fusion_type"
PRODUCTS = "LIBRARY_FUSION_TYPE_DOT"


def emulate_devices(count: int) -> None:
    """Emulates this machine's CPU as several devices; call it before jax uses a device.

    It does the same as ``jax.config.update("jax_num_cpu_devices", count)``, and also
    reserves XLA threads for all devices (the environment variable PJRT_NPROC, unless it is
    set).

    Args:
      count: the number of devices; GPUs and TPUs are not affected.

    Raises:
      ValueError: a count below 1; RuntimeError: jax has another number of devices already.

    >>> import lsgd_jax as lj
    >>> lj.emulate_devices(0)
    Traceback (most recent call last):
    ValueError: `count` must be a positive int, got count=0
    """
    check_positive_int("count", count)
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError as error:
        raise RuntimeError(
            f"call `lj.emulate_devices({count})` before jax uses a device; in a notebook "
            "restart the kernel first"
        ) from error
    reserve_threads()


def tune_cpu() -> None:
    """Sets the environment variables that make XLA fast and safe on CPUs.

    Call it before jax uses a device; afterwards, and on GPUs, it has no effect. It reserves
    threads for emulated devices, as `emulate_devices` does. It also adds a flag to
    XLA_FLAGS, unless that names the same flag: XLA then compiles convolutions itself. The
    kernel library that XLA uses by default takes up to 1.5 times as long to train a network
    of large convolutions. Versions of jax from 0.13 on may not know the flag, and XLA
    aborts on unknown flags, so they run without it.

    >>> import lsgd_jax as lj
    >>> lj.tune_cpu()
    """
    reserve_threads()
    flags = os.environ.get("XLA_FLAGS", "")
    if jax.__version_info__ < (0, 13) and KERNELS not in flags:
        os.environ["XLA_FLAGS"] = f"{KERNELS}={PRODUCTS} {flags}".strip()


def reserve_threads() -> None:
    """Reserves enough XLA threads for the CPU devices that are emulated.

    XLA has one thread per emulated device. A device that waits in a collective keeps its
    thread. The convolutions of the other devices can then run out of threads, and the
    process ends after 40 s. Sets the environment variable PJRT_NPROC, unless it is set;
    has no effect once jax has its devices.
    """
    flag = r"xla_force_host_platform_device_count=(\d+)"
    asked = re.findall(flag, os.environ.get("XLA_FLAGS", ""))
    count = max([jax.config.values["jax_num_cpu_devices"], *map(int, asked)])
    if count > 1:
        # Each device may wait in one collective of the step and in one of a diagnosis.
        os.environ.setdefault("PJRT_NPROC", str(2 * count + (os.cpu_count() or 1)))
