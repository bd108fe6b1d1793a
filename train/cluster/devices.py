"""The devices of a process: its GPUs, or emulated ones on a CPU that is to have more."""

import os
from collections.abc import Mapping

import lsgd_jax as lj
from train.cluster.detection import Started


def provide(count: int, processes: int = 1) -> None:
    """Emulates so many devices on a CPU; call it before jax uses a device.

    GPUs and TPUs are used as they are (several workers per device if need be), and so is
    what JAX_NUM_CPU_DEVICES or XLA_FLAGS asks for.

    Args:
      count: of the run: one for each worker, or for each part of a sharded one.
      processes: of the run; each provides its share.
    """
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
