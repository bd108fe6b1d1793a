"""The rendezvous of a run's processes."""

import dataclasses
from typing import Literal

import lsgd_jax as lj
from train.config_checks import check


@dataclasses.dataclass(frozen=True)
class DistributedConfig:
    """The rendezvous of several processes, on one host or many. Not part of a run."""

    # Who has started the processes: `auto` finds out whether Open MPI, Slurm, a Kubernetes
    # Job or a Cloud TPU has; `mpi4py` asks any MPI; `none` trains in this process only.
    cluster: Literal["auto", "mpi4py", "none"] = "auto"
    # HOST:PORT where process 0 waits for the others, if the cluster does not say so.
    coordinator: str | None = None
    # Number of processes, if the cluster does not say so.
    num_processes: int | None = None
    # Which of them this one is, from 0, if the cluster does not say so.
    process_id: int | None = None
    # GPUs of a process: all that it sees, or one by its rank on the host; `auto` takes one
    # if it sees several and the cluster has started several processes on the host.
    gpus: Literal["auto", "one", "all"] = "auto"
    # Seconds to wait until all processes are there.
    start_timeout: int = 300
    # Seconds without a heartbeat after which a process counts as lost.
    heartbeat_timeout: int = 30

    def __post_init__(self):
        prefix = "distributed."
        for name in ("start_timeout", "heartbeat_timeout"):
            lj.checks.check_positive_int(prefix + name, getattr(self, name))
        if self.num_processes is not None:
            lj.checks.check_positive_int(prefix + "num_processes", self.num_processes)
        if self.coordinator is not None:
            host, _, port = self.coordinator.rpartition(":")
            holds = host != "" and port.isdecimal() and 0 < int(port) < 2**16
            check(holds, prefix + "coordinator", "HOST:PORT", self)
        if self.process_id is not None:
            holds = 0 <= self.process_id < (self.num_processes or 2**31)
            check(holds, prefix + "process_id", "in [0, num_processes)", self)
