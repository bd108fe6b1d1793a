"""Resuming with another grid of workers: the origin of each worker, and the state it keeps.

`python -m train NAME --resume --workers.nodes N --workers.locals L` resumes a checkpoint of
W workers with W' workers. The best min(W, W') workers continue, each in its node while
there is room, otherwise in another node. Free places in a node are filled with copies of
the best worker of that node, in new nodes with copies of the best of all (see `sources`). A
worker and its copies keep its parameters, batch statistics and optimizer state. Its random
key and its order of the data belong to its new number. Values that are equal on all workers
(`Shared`) stay bit-identical. For each method:

    method                kept                           new
    lsgd                  losses and scores              the leaders, at the next pull
    easgd                 center                         α = β / W'; a single worker is the
                                                         center at the next exchange
    downpour              center                         a copy's updates since the last
                                                         exchange count like any other's
    local-sgd             –                              the mean is over the new workers
    post-local-sgd        the step of the switch         likewise
    slowmo, diloco,
      palsgd              anchor, (outer) momentum       likewise
    sparse-diloco         anchor                         likewise; quantization errors are 0
    edit                  anchor, outer momentum,        likewise
                          mean and variance of norms
    grawa                 running means of norms         likewise
    desloc                moments of the optimizer       likewise
    parle                 center, anchors, averages      the center, at the next exchange
    noloco                slow weights, their momentum   the pairs
    sparta                –                              the mean is over the new workers
    dpsgd, adpsgd         –                              the graph; the workers' mean moves
    sgp, osgp             (de-biased) parameters         the graph; weights are 1: Σ w = W'
    osgp, staleness > 1   refused: messages to the old workers are in flight
    pairwise              clocks                         the graph
    gosgd                 parameters                     the graph; weights are 1: Σ w = W'
    wagma                 –                              the groups; W' is a power of two
    allreduce             all workers are equal          W' / W times the batch
    coordinate-median,
      licm, cge, krum,
      geometric-median,
      trimmed-mean        likewise                       likewise; for cge W' > `faulty`
    independent           –                              –
    asynchronous methods  the method's state             the coordinator's rounds

Constraints of a graph or a method on the number of workers are checked when the experiment
is built. The rows of a step depend on (seed, number of the worker, step), so each worker
continues at this step of the order that belongs to its new number. With --data.shard the
images are split anew into W' parts, and the position in a part follows from the step.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

import lsgd_jax as lj
from train.config.schema import WorkersConfig
from train.metrics.recent import RecentLosses
from train.run.checkpoints import Checkpoint
from train.task.state import TrainState


class Resizing(NamedTuple):
    """The old grid, the new grid, and the old worker from which each new one comes."""

    old: WorkersConfig
    new: WorkersConfig
    sources: list[int]

    def __str__(self) -> str:
        pairs = ", ".join(f"{i} from {worker}" for i, worker in enumerate(self.sources))
        return f"{shape(self.new)} workers resume from {shape(self.old)}: {pairs}"

    def event(self) -> dict[str, Any]:
        """The values of the event in metrics.jsonl."""
        grids = {"old": self.old, "new": self.new}
        return {
            **{name: [grid.nodes, grid.locals] for name, grid in grids.items()},
            "sources": self.sources,
        }


class Restored(NamedTuple):
    """The starting point of a run.

    Attributes:
      step: steps taken.
      state: the training state, placed for the new workers.
      seconds, compile_seconds: seconds of training and of compilation so far.
      recent: recent losses of the new workers.
      losses: [W] each, losses of the current interval, which has not been reported; None
        for a step without a gradient.
      resizing: how the grid changed, or None.
      test_is_due: whether the run stopped before the end of the test of this step.
    """

    step: int
    state: TrainState
    seconds: float
    compile_seconds: float
    recent: RecentLosses
    losses: list[list[float] | None]
    resizing: Resizing | None
    test_is_due: bool = False


Like = Callable[[dict[str, Any]], Any]  # notes of a checkpoint -> a state of its shapes


def restore(
    read: Callable[[Like], Checkpoint | None], fresh: TrainState, workers: lj.Workers
) -> Restored | None:
    """Restores a checkpoint for these workers; None if there is none.

    If its grid is the same, the state is bit-identical and placed as before. Otherwise
    every process reads it into host memory and keeps the rows that its workers need.

    Args:
      read: reads the checkpoint, such as `Checkpoints.restore_latest`.
      fresh: a state of these workers before the first step.
      workers: the grid.

    Raises:
      ValueError: the method cannot continue with other workers.
    """
    new = WorkersConfig(workers.nodes, workers.locals)

    def like_saved(notes: dict[str, Any]) -> TrainState:
        old = _grid(notes)
        return fresh if old == new else like(fresh, old)

    found = read(like_saved)
    if found is None:
        return None
    step, state, notes = found
    old = _grid(notes)
    recent = np.array([np.inf if x is None else x for x in notes["recent_losses"]])
    starts = functools.partial(
        Restored,
        step,
        seconds=notes["seconds"],
        compile_seconds=notes.get("compile_seconds", 0.0),
        test_is_due=notes.get("test_is_due", False) and notes.get("tested") is None,
    )
    if old == new:
        if isinstance(state.step.value, np.ndarray):
            state = placed(state, fresh, workers)
        return starts(
            state=state,
            recent=RecentLosses(recent, notes.get("nonfinite_steps", 0)),
            losses=[_noted(row) for row in notes.get("losses", [])],
            resizing=None,
        )
    chosen = sources(old, new, scores(state, recent))
    resizing = Resizing(old, new, chosen.tolist())
    try:
        state = resized(state, fresh, workers, chosen)
    except ValueError as error:
        raise ValueError(
            f"{shape(new)} workers cannot resume from {shape(old)}: {error}"
        ) from error
    return starts(
        state=state, recent=RecentLosses(recent[chosen]), losses=[], resizing=resizing
    )


def _noted(row: list[float | None] | None) -> list[float] | None:
    """The losses [W] in the notes, where None stands for nonfinite ones."""
    if row is None:
        return None
    return [np.nan if x is None else x for x in row]


def grid(notes: Mapping[str, Any]) -> WorkersConfig | None:
    """The grid in the notes of a checkpoint, or None if they could not be read."""
    return _grid(notes) if notes else None


def _grid(notes: Mapping[str, Any]) -> WorkersConfig:
    """The grid in the notes, without the devices inside a worker.

    These make no difference, because a checkpoint holds whole arrays.

    Raises:
      KeyError: the notes are incomplete.
    """
    for name in ("recent_losses", "seconds"):
        notes[name]
    noted = notes["workers"]
    return WorkersConfig(noted["nodes"], noted["locals"])


def shape(grid: WorkersConfig) -> str:
    """The grid as 'nodes x locals'.

    >>> shape(WorkersConfig(2, 4))
    '2 x 4'
    """
    return f"{grid.nodes} x {grid.locals}"


def sources(old: WorkersConfig, new: WorkersConfig, scores: ArrayLike) -> np.ndarray:
    """Returns, for each new worker, the number of the old one that it comes from.

    Args:
      old, new: the grids, of W and W' workers.
      scores: [W], lower is better. A worker with score inf is copied only if all have it.
        Ties go to the lower number.

    Returns:
      int [W']. Workers that stay in a node come first in it, in their old order.

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
    """Scores [W] that rank the workers: those of the method, otherwise recent losses.

    The score is inf for a worker that waits to be restored, or whose score or parameters
    are not finite.
    """
    own = [pull.score for pull in lj.diagnostics(state.opt_state)]
    known = [score for score in own if score is not None]
    score = np.asarray(known[-1] if known else recent)
    healthy = np.isfinite(score) & ~np.asarray(lj.waiting(state.opt_state))
    for leaf in jax.tree.leaves(state.params):
        healthy &= np.isfinite(leaf).reshape(len(leaf), -1).all(axis=1)
    return np.where(healthy, score, np.inf)


def like(state: TrainState, old: WorkersConfig) -> TrainState:
    """A target to restore a state of the old workers to host memory, like `state`."""
    everywhere = state.step.value.sharding

    def leaf(x: Any, rows: tuple[int, ...]) -> Any:
        shape = rows + x.shape[len(rows) :]
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):  # cannot be a host array
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=everywhere)
        return np.broadcast_to(np.zeros([], x.dtype), shape)  # takes no memory

    def node(x: Any) -> Any:
        rows = () if of_all(x) else (old.nodes * old.locals,)
        return jax.tree.map(lambda x: leaf(x, rows), x)

    def of_all(x):
        return isinstance(x, lj.Shared) and x.axes is None

    return jax.tree.map(node, state, is_leaf=of_all)


def resized(
    state: TrainState, fresh: TrainState, workers: lj.Workers, sources: np.ndarray
) -> TrainState:
    """Returns the state of the new workers, made from a state of the old ones.

    Args:
      state: the state of the old workers, in host memory.
      fresh: a state of the new workers, which provides their random keys.
      workers: the new workers.
      sources: int [W'], the old worker for each new one.

    Raises:
      ValueError: the method cannot continue with other workers.
    """
    mine = sources[list(workers.owned)]
    no_key: Any = None
    return placed(lj.resize(state._replace(key=no_key), mine), fresh, workers)


def placed(state: TrainState, fresh: TrainState, workers: lj.Workers) -> TrainState:
    """The state, in host memory, on the devices of its workers.

    fresh: a state of these workers, which provides their random keys and the layouts.
    """
    no_key: Any = None
    rows = state._replace(key=no_key)
    return workers.put_owned(rows, lj.layouts.following(fresh))._replace(key=fresh.key)
