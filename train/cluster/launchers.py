"""Launchers that tell a process its rank in environment variables."""

import json
from collections.abc import Mapping
from typing import NamedTuple

from train.cluster.started import Started, integer, port_of


PORT = 8476  # of process 0 where a launcher names hosts only


class Variables(NamedTuple):
    """The variables of a launcher.

    Attributes:
      by: the launcher, by name.
      size, rank: the number of processes, and the number of this one.
      local_rank, local_sizes: the same among the processes of a host; the first variable
        that is set counts.
      host, port: the address of process 0. Without `port`, `host` holds both.
    """

    by: str
    size: str
    rank: str
    local_rank: str = ""
    local_sizes: tuple[str, ...] = ()
    host: str = ""
    port: str = ""


# A launcher inside of another one comes first: torchrun may be a task of srun.
INNER = (
    Variables(
        "torchrun or a launcher like it",  # accelerate, deepspeed, PyTorchJob, AzureML
        "WORLD_SIZE",
        "RANK",
        local_rank="LOCAL_RANK",
        local_sizes=("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
        host="MASTER_ADDR",
        port="MASTER_PORT",
    ),
    Variables(
        "a TrainJob",
        "JAX_NUM_PROCESSES",
        "JAX_PROCESS_ID",
        host="JAX_COORDINATOR_ADDRESS",
    ),
    Variables(
        "a JAXJob",
        "NUM_PROCESSES",
        "PROCESS_ID",
        host="COORDINATOR_ADDRESS",
        port="COORDINATOR_PORT",
    ),
)
OUTER = (
    Variables(
        "jsrun",
        "JSM_NAMESPACE_SIZE",
        "JSM_NAMESPACE_RANK",
        local_rank="JSM_NAMESPACE_LOCAL_RANK",
        local_sizes=("JSM_NAMESPACE_LOCAL_SIZE",),
    ),
    Variables(
        "MVAPICH2",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_RANK",
        local_rank="MV2_COMM_WORLD_LOCAL_RANK",
        local_sizes=("MV2_COMM_WORLD_LOCAL_SIZE",),
    ),
    Variables("Flux", "FLUX_JOB_SIZE", "FLUX_TASK_RANK", local_rank="FLUX_TASK_LOCAL_ID"),
    Variables(
        "a TrainJob",
        "PET_NNODES",
        "PET_NODE_RANK",
        host="PET_MASTER_ADDR",
        port="PET_MASTER_PORT",
    ),
)


def inner(environ: Mapping[str, str]) -> Started | None:
    """Detects a launcher whose processes may run inside of those of another launcher."""
    return _first(INNER, environ)


def outer(environ: Mapping[str, str]) -> Started | None:
    """Detects a launcher that starts the outermost processes."""
    return (
        _first(OUTER, environ)
        or _tasks("CLUSTER_SPEC", environ)
        or _tasks("TF_CONFIG", environ)
        or _sagemaker(environ)
        or _pmix(environ)
    )


def _first(rows: tuple[Variables, ...], environ: Mapping[str, str]) -> Started | None:
    for row in rows:
        size = integer(environ, row.size)
        rank = integer(environ, row.rank)
        if row.size not in environ or rank is None or (size is not None and size <= 1):
            continue
        arguments = {
            "coordinator_address": _address(row, environ),
            "num_processes": size,  # None for a range of sizes, such as torchrun's 1:4
            "process_id": rank,
        }
        local_rank = integer(environ, row.local_rank)
        return Started(row.by, arguments, local_rank, integer(environ, *row.local_sizes))
    return None


def _address(row: Variables, environ: Mapping[str, str]) -> str | None:
    """The address of process 0, or None if the launcher does not say it."""
    host = environ.get(row.host)
    if not row.port:
        return host
    port = integer(environ, row.port)
    if not host or port is None:
        return None
    if "TORCHELASTIC_RUN_ID" in environ:
        port = port_of(f"{host}:{port}")  # torchrun listens at its port itself
    return f"{host}:{port}"


def _tasks(name: str, environ: Mapping[str, str]) -> Started | None:
    """A task of a cluster that a variable describes in JSON: Vertex AI's, or TensorFlow's.

    Raises:
      ValueError: the variable cannot be read.
    """
    if name not in environ:
        return None
    try:
        described = json.loads(environ[name])
        task = described["task"]["type"], int(described["task"]["index"])
        # Process 0 is the chief, or Vertex AI's first task of workerpool0.
        kinds = sorted(
            described["cluster"], key=lambda x: (x not in ("chief", "master"), x)
        )
        tasks = [
            (kind, i) for kind in kinds for i in range(len(described["cluster"][kind]))
        ]
        rank = tasks.index(task)
        address = described["cluster"][kinds[0]][0]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{name} must describe a cluster and this process's task in it as JSON, got "
            f"{environ[name]!r}"
        ) from error
    if len(tasks) == 1:
        return None
    arguments = {
        "coordinator_address": address,
        "num_processes": len(tasks),
        "process_id": rank,
    }
    return Started(name, arguments)


def _sagemaker(environ: Mapping[str, str]) -> Started | None:
    """A host of a SageMaker training job.

    Raises:
      ValueError: SM_HOSTS cannot be read.
    """
    if not {"SM_HOSTS", "SM_CURRENT_HOST"} <= environ.keys():
        return None
    try:
        hosts = sorted(json.loads(environ["SM_HOSTS"]))
        rank = hosts.index(environ["SM_CURRENT_HOST"])
    except (TypeError, ValueError) as error:
        raise ValueError(
            "SM_HOSTS must list the hosts as JSON, and SM_CURRENT_HOST among them, got "
            f"{environ['SM_HOSTS']!r} and {environ['SM_CURRENT_HOST']!r}"
        ) from error
    if len(hosts) == 1:
        return None
    arguments = {
        "coordinator_address": f"{hosts[0]}:{PORT}",
        "num_processes": len(hosts),
        "process_id": rank,
    }
    return Started("SageMaker", arguments)


# Variables of launchers that use PMIx and say how many processes there are.
SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS", *(row.size for row in OUTER))


def _pmix(environ: Mapping[str, str]) -> Started | None:
    """A process of PMIx, which does not say in a variable how many there are."""
    rank = integer(environ, "PMIX_RANK")
    if rank is None or any(name in environ for name in SIZES):
        return None
    return Started("PMIx", {"process_id": rank})
