"""Ray: asynchronous workers, or processes in lock step, here or on a cluster."""

import dataclasses
import importlib.util
import math
from collections.abc import Collection
from typing import Any

import lsgd_jax as lj
from train.config_checks import check


LOCK_STEP = (
    "processes",
    "devices_per_process",
    "min_processes",
    "max_failures",
    "progress_timeout",
)
ASYNCHRONOUS = ("timeout", "stall_timeout", "object_store")


@dataclasses.dataclass(frozen=True)
class RayConfig:
    """Ray: asynchronous workers, or processes in lock step (`--ray.processes`)."""

    # Processes of a run in lock step, which Ray Train starts, and starts again after a
    # failure; by default there is this process only.
    processes: int | None = None
    # Emulated CPU devices of each of these processes; by default its share of the workers.
    devices_per_process: int | None = None
    # With fewer processes than `processes`, but so many, the run goes on with fewer nodes.
    min_processes: int | None = None
    # How many times the processes are started again.
    max_failures: int = 3
    # Seconds without new metrics after which the processes are started again.
    progress_timeout: float = 1800.0

    # The cluster to join: HOST:PORT, or `auto` for the one that this host is in; by default
    # Ray is started on this machine and ended with the run.
    address: str | None = None
    # CPUs of each worker or process, as Ray counts them to place the workers.
    cpus_per_worker: float = 1.0
    # GPUs of each worker or process; a fraction: several workers share one. 0: they use
    # the CPU.
    gpus_per_worker: float = 0.0
    # Seconds that a worker waits for another one before it goes on without it.
    timeout: float = 10.0
    # Seconds within which all must have been started.
    start_timeout: float = 300.0
    # Seconds after which a worker that takes no step is started again; more than it takes
    # to compile the first one.
    stall_timeout: float = 300.0
    # GiB of shared memory for what travels, where Ray is started by the run; by default a
    # share of the memory that Ray chooses.
    object_store: float | None = None

    def __post_init__(self):
        for name in ("cpus_per_worker", "gpus_per_worker"):
            value = getattr(self, name)
            whole = value < 1 or value % 1 == 0
            holds = 0 <= value < math.inf and whole
            check(holds, f"ray.{name}", "a fraction of one, or a whole number", self)
        for name in ("processes", "devices_per_process", "min_processes"):
            if getattr(self, name) is not None:
                lj.checks.check_positive_int(f"ray.{name}", getattr(self, name))
        check(self.max_failures >= 0, "ray.max_failures", "at least 0", self)
        for name in ("timeout", "start_timeout", "stall_timeout", "progress_timeout"):
            holds = 0 < getattr(self, name) < math.inf
            check(holds, f"ray.{name}", "positive and finite", self)
        if self.object_store is not None:
            rule = "at least 0.08, in GiB"  # Ray refuses less than 75 MiB
            holds = 0.08 <= self.object_store < math.inf
            check(holds, "ray.object_store", rule, self)
            rule = "left out with ray.address: the cluster has its own"
            check(self.address is None, "ray.object_store", rule, self)
        if self.address is not None:
            host, _, port = self.address.rpartition(":")
            holds = host != "" and port.isdecimal() and 0 < int(port) < 2**16
            holds |= self.address == "auto"
            check(holds, "ray.address", "HOST:PORT or auto", self)


def check_installed() -> None:
    """Raises ValueError if Ray cannot start processes here."""
    needed = ("ray", "pyarrow", "pandas")  # Ray Train needs the others
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            "asynchronous workers and `ray.processes` are processes of Ray, and "
            f'{missing[0]} is not installed: pip install "lsgd_jax[async]"'
        )


def check_pace(config: Any) -> None:
    """Raises ValueError for settings that workers at their own pace do not have.

    And the other way round: for those of `RayConfig` with workers in lock step.

    Args:
      config: a `Config`.
    """
    rule = f"left out with method.name={config.method.name}"
    if not config.method.is_asynchronous:
        _check_lock_step(config, rule)
        return
    _check_default(config.ray, "ray", rule, LOCK_STEP)
    _check_default(config.distributed, "distributed", rule)
    check(not config.workers.inside, "workers.inside", rule, config.workers)
    policy = f"keep or reestimate with method.name={config.method.name}"
    holds = config.batch_statistics != "average"
    check(holds, "batch_statistics", policy, config)


def _check_lock_step(config: Any, rule: str) -> None:
    """Raises ValueError for what processes in lock step do not have, or have too few of."""
    ray, nodes = config.ray, config.workers.nodes
    _check_default(ray, "ray", rule, ASYNCHRONOUS)
    if ray.processes is None:
        _check_default(ray, "ray", "left out without ray.processes")
        return
    if ray.min_processes is not None:
        rule = f"at most ray.processes={ray.processes}"
        check(ray.min_processes <= ray.processes, "ray.min_processes", rule, ray)
        rule = f"a multiple of ray.processes={ray.processes} with ray.min_processes"
        check(nodes % ray.processes == 0, "workers.nodes", rule, config.workers)


def _check_default(
    options: Any, prefix: str, rule: str, names: Collection[str] = ()
) -> None:
    """Raises ValueError unless options, those of the names if given, are the defaults."""
    for field in dataclasses.fields(options):
        if names and field.name not in names:
            continue
        holds = getattr(options, field.name) == field.default
        check(holds, f"{prefix}.{field.name}", rule, options)
