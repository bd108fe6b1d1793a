"""Detection of the cluster that started this process.

jax detects Open MPI before version 5, Kubernetes and Cloud TPU itself. This module decides
whether several processes were started at all, so that N processes never become N separate
runs by accident.
"""

import glob
from collections.abc import Mapping
from typing import Any

from train.cluster import launchers, slurm
from train.cluster.started import Started, integer, port_of
from train.config.schema import DistributedConfig
from train.process.messages import is_installed


BY_ITSELF = "`--distributed.cluster none` trains in this process by itself"
ADDRESS = "JAX_COORDINATOR_ADDRESS"  # a variable of jax


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
    found = _started(environ)
    coordinator = config.coordinator
    if coordinator is None and integer(environ, "JAX_NUM_PROCESSES") != 1:
        coordinator = environ.get(ADDRESS)
    given = {
        "coordinator_address": coordinator,
        "num_processes": config.num_processes,
        "process_id": config.process_id,
    }
    if found is None:
        if all(value is None for value in given.values()):
            return None
        is_set = f" ({ADDRESS} is set)" if ADDRESS in environ else ""
        found = Started(f"hand{is_set}", {})
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
JAX_FINDS = ("Open MPI 4", "Cloud TPU", "Kubernetes")
HINTS = {
    "MPI": ", or install mpi4py and add --distributed.cluster mpi4py",
    "a Kubernetes Job": ", or install the package kubernetes, so that jax can find out",
}


def _started(environ: Mapping[str, str]) -> Started | None:
    """How the innermost launcher of several processes started this one, or None."""
    for detector in (
        launchers.inner,
        _mpi,
        slurm.detect,
        launchers.outer,
        _tpu,
        _kubernetes,
    ):
        found = detector(environ)
        if found is not None:
            return found
    return None


def _mpi(environ: Mapping[str, str]) -> Started | None:
    """mpirun of Open MPI, or mpiexec of MPICH and its derivatives."""
    if (integer(environ, "OMPI_COMM_WORLD_SIZE") or 0) > 1:
        name = "OMPI_COMM_WORLD_"
    elif (integer(environ, "PMI_SIZE") or 0) > 1 and "SLURM_STEP_NODELIST" not in environ:
        name = "PMI_"
    else:
        return None
    size = integer(environ, f"{name}SIZE")
    local_rank = integer(environ, f"{name}LOCAL_RANK")
    local_size = integer(environ, f"{name}LOCAL_SIZE")
    arguments: dict[str, Any] = {
        "num_processes": size,
        "process_id": integer(environ, f"{name}RANK"),
    }
    by = "Open MPI 4" if "OMPI_MCA_orte_hnp_uri" in environ else "MPI"
    job = environ.get("PMIX_NAMESPACE")
    if by == "MPI" and job and local_size == size:
        arguments["coordinator_address"] = f"127.0.0.1:{port_of(job)}"
    if local_rank is None or local_size is None:
        return Started(by, arguments)
    return Started(by, arguments, local_rank, local_size)


def _tpu(environ: Mapping[str, str]) -> Started | None:
    """A Cloud TPU slice of several hosts, or several slices."""
    hosts = environ.get("TPU_PROCESS_ADDRESSES", environ.get("TPU_WORKER_HOSTNAMES", ""))
    several = "," in hosts or (integer(environ, "MEGASCALE_NUM_SLICES") or 0) > 1
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
    index = {"process_id": integer(environ, "JOB_COMPLETION_INDEX")}
    by = "Kubernetes" if is_installed("kubernetes") else "a Kubernetes Job"
    return Started(by, index)
