"""The devices of a process: its GPUs, or emulated devices on a CPU."""

import contextlib
import os
from collections.abc import Mapping

import jax

import lsgd_jax as lj
from train.cluster.session import is_of_xla
from train.cluster.started import Started
from train.config.schema import Config


def provide(count: int, processes: int = 1, beside: int = 0) -> None:
    """Emulates devices on a CPU. Must be called before jax uses a device.

    GPUs and TPUs are used as they are, with several workers per device if necessary.
    JAX_NUM_CPU_DEVICES and XLA_FLAGS take precedence.

    Args:
      count: devices of the run: one per worker, or per shard of a worker.
      processes: processes of the run. Each one provides its share.
      beside: the number of CPU devices beside each one, on which exchanges of several
        processes travel.

    Raises:
      ValueError: JAX_PLATFORMS names devices that do not exist here.
    """
    lj.tune_cpu()
    flags = os.environ.get("XLA_FLAGS", "")
    asked = "xla_force_host_platform_device_count" in flags
    if not asked and "JAX_NUM_CPU_DEVICES" not in os.environ:
        # If jax has its devices already, each of them holds several workers.
        with contextlib.suppress(RuntimeError):
            own = max(1, count // processes)
            lj.emulate_devices(own * (1 + beside) if processes > 1 else own)
    check_platforms()


def one_each(config: Config) -> list[jax.Device] | None:
    """The device of each process, if its workers should share one; otherwise None.

    XLA starts no step on several CPU devices of a process while a message of others waits,
    so messages could not travel beside such steps.
    """
    processes = jax.process_count()
    grid = config.workers
    if processes == 1 or jax.default_backend() != "cpu" or not config.may_send_beside:
        return None
    if grid.devices_each > 1 or not grid.fits(processes):
        return None
    devices = jax.devices()
    return [
        next(device for device in devices if device.process_index == process)
        for process in range(processes)
    ]


def leave_to_workers() -> None:
    """Uses the CPU in this process, unless JAX_PLATFORMS says otherwise.

    For the driver of asynchronous workers, which have processes and GPUs of their own.

    Raises:
      ValueError: JAX_PLATFORMS names devices that do not exist here.
    """
    if not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")
    lj.tune_cpu()
    check_platforms()


def check_platforms() -> None:
    """Raises ValueError if JAX_PLATFORMS names devices that do not exist here."""
    asked = os.environ.get("JAX_PLATFORMS")
    if not asked:
        return  # jax falls back to a CPU
    try:
        jax.devices()
    except (AssertionError, RuntimeError) as error:  # AssertionError: no CUDA plugin
        if is_of_xla(error) and jax.distributed.is_initialized():
            raise
        raise ValueError(
            "`JAX_PLATFORMS` must name devices that jax finds here, got "
            f"JAX_PLATFORMS={asked}; unset it to use the devices that there are"
        ) from error


def local_device_ids(
    gpus: str, started: Started, environ: Mapping[str, str]
) -> list[int] | None:
    """Returns the GPUs of this process: [] for all of them, None to let jax choose.

    Args:
      gpus: 'one', 'all' or 'auto', see `DistributedConfig`.
      started: how this process was started.
      environ: the environment variables.

    Raises:
      ValueError: the process must use one GPU, but nothing says which.
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
            "`distributed.gpus` must be all if a process does not know its rank on its "
            f"host (started by {started.by}), got distributed.gpus=one; set "
            "CUDA_VISIBLE_DEVICES"
        )
    return []
