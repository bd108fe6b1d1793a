"""What is told of workers that step at their own pace."""

from collections.abc import Iterator, Sequence
from typing import Any

import lsgd_jax as lj


def event(status: lj.asynchronous.Status, counts: Sequence[int]) -> dict[str, Any]:
    """Its values in metrics.jsonl.

    Args:
      status: how all workers are doing.
      counts: steps that each has taken.
    """
    reports = [status.reports[i] for i in range(len(counts))]
    column = lambda name: [getattr(report, name) for report in reports]
    return {
        "steps": list(counts),
        "present": status.present,
        "leader": status.leader(range(len(counts))),
        "scores": column("score"),
        "staleness": column("staleness"),
        "largest_staleness": max(column("staleness")),
        "waited": column("waited"),
        "longest_wait": max(column("longest")),
        "sent": column("bytes_sent"),
    }


def leaders(
    status: lj.asynchronous.Status, nodes: int, locals: int
) -> Iterator[dict[str, Any]]:
    """Who leads in each node, and of all: the values of events `leaders`."""
    workers = range(nodes * locals)
    scores = [status.reports[i].score for i in workers]
    of_nodes = [
        status.leader(workers[first : first + locals])
        for first in range(0, len(workers), locals)
    ]
    first = status.leader(workers)
    if nodes > 1 and locals > 1 and None not in of_nodes:
        yield {"level": "node", "leaders": of_nodes, "scores": scores}
    if first is not None:
        yield {"level": "all", "leaders": [first], "scores": scores}


def text(status: lj.asynchronous.Status, counts: Sequence[int]) -> str:
    """Who is how far, who leads and who is down, in a few words.

    >>> of = lambda steps, score: lj.asynchronous.Report(steps, 1.0, score, staleness=2.0)
    >>> reports = {0: of(7, 0.5), 1: of(9, 0.4), 2: of(4, 0.9)}
    >>> text(lj.asynchronous.Status([0, 1], [], 20, 0, reports), [7, 9, 4])
    'workers at 4 to 9, worker 1 leads, staleness 2.0, down: 2'
    """
    workers = range(len(counts))
    parts = [f"workers at {min(counts)} to {max(counts)}"]
    if (leader := status.leader(workers)) is not None:
        parts.append(f"worker {leader} leads")
    if staleness := max(status.reports[i].staleness for i in workers):
        parts.append(f"staleness {staleness:.1f}")
    if down := [str(i) for i in workers if i not in status.present]:
        parts.append(f"down: {' '.join(down)}")
    return ", ".join(parts)
