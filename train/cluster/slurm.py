"""A step of Slurm's srun.

jax finds the processes of a step, too, but gives all steps of an allocation the same port.
"""

import re
from collections.abc import Mapping

from train.cluster.started import Started, integer, port_of


NEEDED = (
    "SLURM_JOB_ID",
    "SLURM_STEP_NODELIST",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "SLURM_LOCALID",
)


def detect(environ: Mapping[str, str]) -> Started | None:
    """Detects a step of several tasks. The batch script itself is a single process."""
    if any(name not in environ for name in NEEDED):
        return None
    size = integer(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") or 0
    if size <= 1:
        return None
    step = environ.get("SLURM_STEP_ID", "0")
    port = port_of(f"{environ['SLURM_JOB_ID']}.{step}")
    arguments = {
        "coordinator_address": f"{first_host(environ['SLURM_STEP_NODELIST'])}:{port}",
        "num_processes": size,
        "process_id": integer(environ, "SLURM_PROCID"),
    }
    counts = tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    node = integer(environ, "SLURM_NODEID") or 0
    local_size = counts[node] if node < len(counts) else None
    return Started("Slurm", arguments, integer(environ, "SLURM_LOCALID"), local_size)


def tasks_per_node(text: str) -> list[int]:
    """Parses Slurm's notation for the number of tasks on each node.

    >>> tasks_per_node("4(x2),3")
    [4, 4, 3]
    """
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in found for _ in range(int(times or 1))]


def first_host(nodes: str) -> str:
    """The first host of a list of nodes in Slurm's notation.

    >>> [first_host(nodes) for nodes in ("gpu[007,9-12],login", "n1,n2", "r[1-2]n[3-4]-ib")]
    ['gpu007', 'n1', 'r1n3-ib']
    """
    first_of_groups = re.sub(r"\[(\w+)[^]]*\]", r"\1", nodes)
    return first_of_groups.partition(",")[0]
