"""Detection of the cluster that started this process.

jax detects Slurm, Open MPI before version 5, Kubernetes and Cloud TPU itself. This module
decides whether several processes were started at all, so that N processes never become N
separate runs by accident.
"""

import glob
import re
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from train.config.schema import DistributedConfig
from train.process.messages import is_installed


BY_ITSELF = "`--distributed.cluster none` trains in this process by itself"


class Started(NamedTuple):
    """How a cluster started this process.

    Attributes:
      by: the cluster, by name.
      arguments: for `jax.distributed.initialize`, which detects the missing ones.
      local_rank, local_size: rank of this process on its host, and their number; None if
        the process has the devices of its host to itself.
    """

    by: str
    arguments: dict[str, Any]
    local_rank: int | None = None
    local_size: int | None = None


def detect(config: DistributedConfig, environ: Mapping[str, str]) -> Started | None:
    """Returns how this process was started as one of several, or None if it is alone.

    Args:
      config: the options `--distributed.*`.
      environ: the environment variables.

    Raises:
      ValueError: it is one of several, but nothing says how to reach the others.
    """
    if config.cluster == "none":
        return None
    if config.cluster == "mpi4py":
        return Started("MPI", {"cluster_detection_method": "mpi4py"})
    detectors = (_mpi, _slurm, _tpu, _kubernetes)
    found = next(filter(None, (detector(environ) for detector in detectors)), None)
    given = {
        "coordinator_address": config.coordinator or environ.get("JAX_COORDINATOR_ADDRESS"),
        "num_processes": config.num_processes,
        "process_id": config.process_id,
    }
    if found is None:
        if config.coordinator is config.num_processes is config.process_id is None:
            return None
        found = Started("hand", {})
    arguments = found.arguments | {k: v for k, v in given.items() if v is not None}
    missing = [name for name in given if arguments.get(name) is None]
    if not missing:
        arguments["cluster_detection_method"] = "deactivate"
    elif found.by not in JAX_FINDS:
        options = {"coordinator_address": "coordinator"}
        names = [f"--distributed.{options.get(x, x).replace('_', '-')}" for x in missing]
        raise ValueError(
            f"this process was started by {found.by} as one of several, but nothing says "
            f"how to reach the others: add {' and '.join(names)}"
            f"{HINTS.get(found.by, '')}; {BY_ITSELF}"
        )
    return found._replace(arguments=arguments)


# Clusters whose details jax can detect, and advice for the others.
JAX_FINDS = ("Open MPI 4", "Slurm", "Cloud TPU", "Kubernetes")
HINTS = {
    "MPI": ", or install mpi4py and add --distributed.cluster mpi4py",
    "a Kubernetes Job": ", or install the package kubernetes, so that jax can find out",
}


def _mpi(environ: Mapping[str, str]) -> Started | None:
    """mpirun of Open MPI, or mpiexec of MPICH and its derivatives."""
    if _int(environ, "OMPI_COMM_WORLD_SIZE") > 1:
        name, local = "OMPI_COMM_WORLD_", ("LOCAL_RANK", "LOCAL_SIZE")
    elif _int(environ, "PMI_SIZE") > 1 and "SLURM_STEP_NODELIST" not in environ:
        name, local = "PMI_", ("LOCAL_RANK", "LOCAL_SIZE")
    else:
        return None
    size, rank = _int(environ, f"{name}SIZE"), _int(environ, f"{name}RANK")
    local_rank, local_size = (environ.get(name + x) for x in local)
    arguments: dict[str, Any] = {"num_processes": size, "process_id": rank}
    by = "Open MPI 4" if "OMPI_MCA_orte_hnp_uri" in environ else "MPI"
    job = environ.get("PMIX_NAMESPACE")
    if by == "MPI" and job and local_size == str(size):
        port = 61440 + zlib.crc32(job.encode()) % 4096
        arguments["coordinator_address"] = f"127.0.0.1:{port}"
    known = local_rank is not None and local_size is not None
    return Started(by, arguments, *map(int, (local_rank, local_size)) if known else ())


def _slurm(environ: Mapping[str, str]) -> Started | None:
    """A step of srun. The batch script itself is not a step but a single process."""
    names = "JOB_ID STEP_NODELIST NTASKS PROCID LOCALID"
    if any(f"SLURM_{name}" not in environ for name in names.split()):
        return None
    size = _int(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if size <= 1:
        return None
    each = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    node = _int(environ, "SLURM_NODEID")
    counts = tasks_per_node(each)
    local_size = counts[node] if node < len(counts) else None
    local_rank = _int(environ, "SLURM_LOCALID")
    return Started("Slurm", {"num_processes": size}, local_rank, local_size)


def tasks_per_node(text: str) -> list[int]:
    """Parses Slurm's notation for the number of tasks on each node.

    >>> tasks_per_node("4(x2),3")
    [4, 4, 3]
    """
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in found for _ in range(int(times or 1))]


def _tpu(environ: Mapping[str, str]) -> Started | None:
    """A Cloud TPU slice of several hosts, or several slices."""
    hosts = environ.get("TPU_PROCESS_ADDRESSES", environ.get("TPU_WORKER_HOSTNAMES", ""))
    several = "," in hosts or _int(environ, "MEGASCALE_NUM_SLICES") > 1
    # If the environment says nothing, jax asks the metadata server. A single host then
    # joins itself, which is harmless.
    unsaid = not hosts and "TPU_SKIP_MDS_QUERY" not in environ and _has_tpu()
    return Started("Cloud TPU", {}) if several or unsaid else None


def _has_tpu() -> bool:
    chips = glob.glob("/dev/accel[0-9]*") + glob.glob("/dev/vfio/[0-9]*")
    return bool(chips) and is_installed("libtpu")


def _kubernetes(environ: Mapping[str, str]) -> Started | None:
    """A pod of an indexed Job. Only the cluster's API knows how many there are."""
    if not {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environ.keys():
        return None
    index = {"process_id": _int(environ, "JOB_COMPLETION_INDEX")}
    by = "Kubernetes" if is_installed("kubernetes") else "a Kubernetes Job"
    return Started(by, index)


def _int(environ: Mapping[str, str], *names: str) -> int:
    """The value of the first variable that is a number, or 0."""
    values = (environ.get(name, "") for name in names)
    return next((int(value) for value in values if value.isdecimal()), 0)
