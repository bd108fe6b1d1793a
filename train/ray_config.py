"""Where asynchronous workers run: this machine, or a cluster of Ray."""

import dataclasses
import importlib.util
import math
from typing import Any

from train.config_checks import check


@dataclasses.dataclass(frozen=True)
class RayConfig:
    """The processes of workers that step at their own pace (async-* and overlapped-*)."""

    # The cluster to join: HOST:PORT, or `auto` for the one that this host is in; by default
    # Ray is started on this machine and ended with the run.
    address: str | None = None
    # CPUs of each worker, as Ray counts them to place the workers.
    cpus_per_worker: float = 1.0
    # GPUs of each worker; a fraction: several workers share one. 0: they use the CPU.
    gpus_per_worker: float = 0.0
    # Seconds that a worker waits for another one before it goes on without it.
    timeout: float = 10.0
    # Seconds within which all workers must have been started.
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
            whole = value < 1 or value == int(value)
            holds = 0 <= value < math.inf and whole
            check(holds, f"ray.{name}", "a fraction of one, or a whole number", self)
        for name in ("timeout", "start_timeout", "stall_timeout"):
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
    """Raises ValueError if workers at their own pace cannot be started here."""
    if importlib.util.find_spec("ray") is None:
        raise ValueError(
            "workers at their own pace are processes of Ray, which is not installed: "
            'pip install "lsgd_jax[async]"'
        )


def check_pace(config: Any) -> None:
    """Raises ValueError for settings that workers at their own pace do not have.

    And the other way round: for those of `RayConfig` with workers in lock step.

    Args:
      config: a `Config`.
    """
    rule = f"left out with method.name={config.method.name}"
    if not config.method.is_asynchronous:
        _check_default(config.ray, "ray", rule)
        return
    _check_default(config.distributed, "distributed", rule)
    check(not config.workers.inside, "workers.inside", rule, config.workers)
    policy = f"keep or reestimate with method.name={config.method.name}"
    holds = config.batch_statistics != "average"
    check(holds, "batch_statistics", policy, config)


def _check_default(options: Any, prefix: str, rule: str) -> None:
    for field in dataclasses.fields(options):
        holds = getattr(options, field.name) == field.default
        check(holds, f"{prefix}.{field.name}", rule, options)
