"""Options of XLA with which a message with a delay travels beside the gradient."""

import collections
from typing import Any

from lsgd_jax._src.aot.chips import GPUS
from lsgd_jax._src.aot.collectives import exposed


# The collectives that XLA for GPUs keeps in flight at a time: one unless it is set.
IN_FLIGHT = "xla_gpu_experimental_parallel_collective_overlap_limit"
OF_THE_STEP = 3  # what the loops of a sharded step have in flight themselves, and one


def overlap_options(messages: int = 1) -> dict[str, int]:
    """Returns `compiler_options` for GPUs with which messages travel beside the gradient.

    Without them a message with a delay waits for the end of a gradient whose layers gather
    their weights. A custom transport of NCCL has raced with more than one collective in
    flight: compare a short run with and without the option on your cluster first.

    Args:
      messages: that a step of the method has in flight. XLA combines small leaves.

    >>> from lsgd_jax import aot
    >>> aot.overlap_options(messages=5)
    {'xla_gpu_experimental_parallel_collective_overlap_limit': 8}
    """
    return {IN_FLIGHT: messages + OF_THE_STEP}


def proposal(*reports: Any) -> list[str]:
    """The lines about this option under reports for one pod, of GPUs, if messages wait."""
    chip = reports[0].pod.chip
    programs = [program for report in reports for program in report.programs]
    waiting = [n for n in map(_messages, programs) if n]
    if chip is None or chip.name not in GPUS or not waiting:
        return []
    ((name, limit),) = overlap_options(max(waiting)).items()
    return [
        "With a delay, a message that waits for the gradient here travels beside it with",
        f"XLA's option {name}={limit}; see docs/pods.md for its risk.",
    ]


def _messages(program: Any) -> int:
    """How many messages to other hosts are in flight together if one is not hidden."""
    if not exposed(program.collectives, overlap=0.5):
        return 0
    # Scales count, too: no message is too small to keep another one waiting.
    kinds = collections.Counter(x.kind for x in program.collectives if x.crosses)
    return max(kinds.values())
