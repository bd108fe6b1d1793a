"""The devices of a process: its GPUs, or emulated ones on a CPU that is to have more."""

import os
from collections.abc import Mapping

import jax

import lsgd_jax as lj
from train.cluster.detection import Started
from train.cluster.session import is_of_xla


def provide(count: int, processes: int = 1) -> None:
    """Emulates so many devices on a CPU; call it before jax uses a device.

    GPUs and TPUs are used as they are (several workers per device if need be), and so is
    what JAX_NUM_CPU_DEVICES or XLA_FLAGS asks for.

    Args:
      count: of the run: one for each worker, or for each part of a sharded one.
      processes: of the run; each provides its share.

    Raises:
      ValueError: JAX_PLATFORMS asks for devices that there are not.
    """
    lj.tune_cpu()
    _emulate(count, processes)
    check_platforms()


def leave_to_workers() -> None:
    """Uses the CPU here, unless JAX_PLATFORMS says otherwise.

    For a process whose workers, at their own pace, have processes and GPUs of their own.

    Raises:
      ValueError: JAX_PLATFORMS asks for devices that there are not.
    """
    if not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")
    lj.tune_cpu()
    check_platforms()


def check_platforms() -> None:
    """Raises ValueError if JAX_PLATFORMS asks for devices that there are not."""
    asked = os.environ.get("JAX_PLATFORMS")
    if not asked:
        return  # jax takes a CPU if there is nothing else
    try:
        jax.devices()
    except (AssertionError, RuntimeError) as error:  # the former: no plugin for CUDA
        if is_of_xla(error) and jax.distributed.is_initialized():
            raise
        raise ValueError(
            "`JAX_PLATFORMS` must name devices that jax finds here, got "
            f"JAX_PLATFORMS={asked}; if it is not set, jax takes what there is"
        ) from error


def _emulate(count: int, processes: int) -> None:
    flags = os.environ.get("XLA_FLAGS", "")
    asked = "xla_force_host_platform_device_count" in flags
    if asked or "JAX_NUM_CPU_DEVICES" in os.environ:
        return
    try:
        lj.emulate_devices(max(1, count // processes))
    except RuntimeError:
        pass  # jax has its devices already: they hold several workers each if need be


def local_device_ids(
    gpus: str, started: Started, environ: Mapping[str, str]
) -> list[int] | None:
    """The GPUs of this process; [] for all, None to leave it to jax.

    Raises:
      ValueError: one is asked for, and it is not known which.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES", environ.get("ROCR_VISIBLE_DEVICES"))
    shared = started.local_size != 1 and (visible is None or "," in visible)
    if gpus == "one" or (gpus == "auto" and shared):
        if started.local_rank is not None:
            return [started.local_rank]
        if started.arguments.get("cluster_detection_method") == "mpi4py":
            return None
    if gpus == "one":
        raise ValueError(
            "`distributed.gpus` must be all if a process is not told its rank on the host "
            f"(by {started.by}), got distributed.gpus=one; set CUDA_VISIBLE_DEVICES"
        )
    return []
