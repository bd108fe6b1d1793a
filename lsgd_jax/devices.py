"""Many devices out of one CPU, for trying out and for tests."""

import os

import jax

from lsgd_jax.checks import check_positive_int


def emulate_devices(count: int) -> None:
    """Lets this machine's CPU pass for several devices; call it before jax uses a device.

    Sets `jax_num_cpu_devices`, and gives XLA threads enough (the environment variable
    PJRT_NPROC, unless it is set): a device that waits in a collective keeps a thread, and
    with one thread per device those that the others still need for their convolutions
    can run out, which ends the process after 40 s.

    Args:
      count: how many devices; GPUs and TPUs are not affected.

    Raises:
      ValueError: a count below 1; RuntimeError: jax has its devices already.

    >>> emulate_devices(0)
    Traceback (most recent call last):
    ValueError: `count` must be a positive int, got count=0
    """
    check_positive_int("count", count)
    jax.config.update("jax_num_cpu_devices", count)
    # Each device may wait in one collective of the step and in one of a diagnosis.
    os.environ.setdefault("PJRT_NPROC", str(2 * count + (os.cpu_count() or 1)))
