"""Going on with another grid of workers: which worker comes from which, and what is kept.

`python -m train NAME --resume --workers.nodes N --workers.locals L` goes on from a
checkpoint of another grid, W workers before and W' now. The best min(W, W') go on, each in
its node while there is room and otherwise where there is room; what is free then is taken
by copies of the best worker in that node, in new nodes by copies of the best of all (see
`sources`). A worker, and a copy of it, takes along its parameters, batch statistics and
optimizer state; its random key and its order of the data belong to its new number. What is
equal on all workers (`Shared`) stays to the bit. Of each method that is:

    method                what stays                     what is new
    lsgd                  losses and scores              the leaders, at the next pull
    easgd                 center                         α = β / W'; a single worker is the
                                                         center at the next exchange
    downpour              center                         a copy's updates since the last
                                                         exchange count like any other's
    local-sgd             –                              the mean is over the new workers
    post-local-sgd        the step of the switch         likewise
    slowmo, diloco        anchor, (outer) momentum       likewise
    diloco-leader         anchor, outer momentum         the leader, at the next exchange
    lsgd-diloco           refused: each place in a node has an anchor of its own
    parle                 center, anchors, averages      the center, at the next exchange
    dpsgd, adpsgd         –                              the graph; the workers' mean moves
    sgp, osgp             (de-biased) parameters         the graph; weights are 1: Σ w = W'
    osgp, staleness > 1   refused: messages are in flight to the workers of before
    pairwise              clocks                         the graph
    gosgd                 parameters                     the graph; weights are 1: Σ w = W'
    wagma                 –                              the groups; W' is a power of two
    allreduce             all workers are equal          W' / W times the batch
    coordinate-median,
      licm, cge           likewise                       likewise; for cge W' > `faulty`
    independent           –                              –

What a graph or a method asks of the number of workers is checked when the experiment is
built. The rows of a step depend on (seed, number of the worker, step): every worker goes on
at this step of the order that belongs to its new number. With --data.shard the images are
split anew, into W' parts, and the place in a part follows from the step.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

import lsgd_jax as lj
from train.config import WorkersConfig
from train.metrics.recent import RecentLosses
from train.run.checkpoints import Checkpoints
from train.task.state import TrainState


class Resizing(NamedTuple):
    """From which grid to which, and for each new worker the old one that it comes from."""

    old: WorkersConfig
    new: WorkersConfig
    sources: list[int]

    def __str__(self) -> str:
        pairs = ", ".join(f"{i} from {worker}" for i, worker in enumerate(self.sources))
        return f"{shape(self.new)} workers go on from {shape(self.old)}: {pairs}"

    def event(self) -> dict[str, Any]:
        """Its values in metrics.jsonl."""
        grids = {"old": self.old, "new": self.new}
        return {
            **{name: [grid.nodes, grid.locals] for name, grid in grids.items()},
            "sources": self.sources,
        }


class Restored(NamedTuple):
    """What a run goes on with.

    Attributes:
      step: steps taken.
      state: placed for the new workers.
      notes: what was noted beside the checkpoint.
      recent: how the new workers have done lately.
      losses: [W] each, of the interval in progress, which has not been reported.
      resizing: how the workers changed, or None.
    """

    step: int
    state: TrainState
    notes: Mapping[str, Any]
    recent: RecentLosses
    losses: list[list[float]]
    resizing: Resizing | None


def restore(
    checkpoints: Checkpoints, fresh: TrainState, workers: lj.Workers
) -> Restored | None:
    """The latest checkpoint that can be read, for these workers.

    Of the same grid it is the state to the bit, placed as it was. Of another one every
    process reads it to its memory and keeps what its workers go on from.

    Args:
      checkpoints: where to look.
      fresh: a state of these workers, as it is before the first step.
      workers: the grid.

    Raises:
      ValueError: a method that cannot go on with other workers.
    """
    new, old = WorkersConfig(workers.nodes, workers.locals), _grid
    read = checkpoints.restore_latest(
        lambda notes: fresh if old(notes) == new else like(fresh, old(notes))
    )
    if read is None:
        return None
    step, state, notes = read
    recent = np.array([np.inf if x is None else x for x in notes["recent_losses"]])
    if old(notes) == new:
        bad = notes.get("nonfinite_steps", 0)
        losses = [
            [np.nan if x is None else x for x in row] for row in notes.get("losses", [])
        ]
        return Restored(step, state, notes, RecentLosses(recent, bad), losses, None)
    chosen = sources(old(notes), new, scores(state, recent))
    resizing = Resizing(old(notes), new, chosen.tolist())
    try:
        state = resized(state, fresh, workers, chosen)
    except ValueError as error:
        raise ValueError(
            f"{shape(new)} workers cannot go on from {shape(old(notes))}: {error}"
        ) from error
    return Restored(step, state, notes, RecentLosses(recent[chosen]), [], resizing)


def grid(notes: Mapping[str, Any]) -> WorkersConfig | None:
    """The grid that was noted beside a checkpoint; None if the notes cannot be read."""
    return _grid(notes) if notes else None


def _grid(notes: Mapping[str, Any]) -> WorkersConfig:
    """The devices inside a worker make no difference: a checkpoint holds whole arrays.

    Raises:
      KeyError: notes that a run cannot go on from.
    """
    for name in ("recent_losses", "seconds"):
        notes[name]
    noted = notes["workers"]
    return WorkersConfig(noted["nodes"], noted["locals"])


def shape(grid: WorkersConfig) -> str:
    """nodes x locals.

    >>> shape(WorkersConfig(2, 4))
    '2 x 4'
    """
    return f"{grid.nodes} x {grid.locals}"


def sources(old: WorkersConfig, new: WorkersConfig, scores: ArrayLike) -> np.ndarray:
    """For each new worker the old one that it comes from.

    Args:
      old, new: the grids, of W and W' workers.
      scores: [W], the lower the better; inf for a worker that is to be copied only if all
        are. Ties go to the lower number.

    Returns:
      int [W']; workers that stay in a node stand first in it, in their old order.

    >>> sources(WorkersConfig(2, 2), WorkersConfig(1, 2), [0.3, 0.9, 0.2, 0.4]).tolist()
    [0, 2]
    >>> sources(WorkersConfig(1, 2), WorkersConfig(2, 3), [0.9, 0.3]).tolist()
    [0, 1, 1, 1, 1, 1]
    """
    finite = np.isfinite(scores)
    best_first = np.argsort(scores, kind="stable").tolist()
    leader = best_first[0]
    nodes: list[list[int]] = [[] for _ in range(new.nodes)]
    moving = []
    for worker in best_first[: new.nodes * new.locals]:
        node = worker // old.locals
        stays = node < new.nodes and len(nodes[node]) < new.locals
        (nodes[node] if stays else moving).append(worker)
    for members in nodes:
        members.sort()
    for worker in sorted(moving):
        next(members for members in nodes if len(members) < new.locals).append(worker)
    for node, members in enumerate(nodes):
        near = members if node < old.nodes else []
        first = min(near, key=best_first.index, default=leader)
        copied = first if finite[first] else leader
        members += [copied] * (new.locals - len(members))
    return np.concatenate(nodes)


def scores(state: TrainState, recent: np.ndarray) -> np.ndarray:
    """What workers are chosen by: the method's own scores, or else their recent losses.

    inf for a worker that waits to be restored, or has a score or parameter not finite.
    """
    own = [pull.score for pull in lj.diagnostics(state.opt_state)]
    known = [score for score in own if score is not None]
    score = np.asarray(known[-1] if known else recent)
    healthy = np.isfinite(score) & ~np.asarray(lj.waiting(state.opt_state))
    for leaf in jax.tree.leaves(state.params):
        healthy &= np.isfinite(leaf).reshape(len(leaf), -1).all(axis=1)
    return np.where(healthy, score, np.inf)


def like(state: TrainState, old: WorkersConfig) -> TrainState:
    """What a state of other workers is restored as: like `state`, in the host's memory."""
    everywhere = state.step.value.sharding

    def leaf(x: Any, rows: tuple[int, ...]) -> Any:
        shape = rows + x.shape[len(rows) :]
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):  # cannot be a host array
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=everywhere)
        return np.broadcast_to(np.zeros([], x.dtype), shape)  # takes no memory

    def node(x: Any) -> Any:
        rows = () if of_all(x) else (old.nodes * old.locals,)
        return jax.tree.map(lambda x: leaf(x, rows), x)

    of_all = lambda x: isinstance(x, lj.Shared) and x.axes is None
    return jax.tree.map(node, state, is_leaf=of_all)


def resized(
    state: TrainState, fresh: TrainState, workers: lj.Workers, sources: np.ndarray
) -> TrainState:
    """A state of the old workers (on the host), for the new ones.

    Args:
      state: of the old workers.
      fresh: of the new workers, which brings their random keys.
      workers: the new workers.
      sources: int [W'], for each new worker the old one.

    Raises:
      ValueError: a method that cannot go on with other workers.
    """
    mine = sources[list(workers.owned)]
    no_key: Any = None
    rows = lj.resize(state._replace(key=no_key), mine)
    return workers.put_owned(rows, lj.following(fresh))._replace(key=fresh.key)
