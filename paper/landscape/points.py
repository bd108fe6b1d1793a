"""The points that the plane of a landscape goes through."""

import itertools
from collections.abc import Iterator, Sequence

import jax
import numpy as np

import lsgd_jax as lj
from paper.landscape import plane
from paper.landscape.plane import flat
from paper.landscape.saved_run import SavedRun
from train.run import resharding


CENTER = "the center"
ALONG = "along "
Candidate = tuple[str, np.ndarray]


def role_of(pull: lj.Diagnostics, worker: int, nodes: int, locals: int) -> str:
    """Returns the name of the leader of a worker's group."""
    if nodes == 1 or locals == 1:
        return "leader"
    return (
        f"leader of node {worker // locals}" if pull.axes == ("local",) else "leader of all"
    )


def leaders_of(
    worker: int, pulls: Sequence[lj.Diagnostics], scores: np.ndarray, nodes: int
) -> list[tuple[str, int]]:
    """Returns a worker's leaders as (role, worker), the nearest first.

    They were elected last, or would be elected by the scores before the first election.
    """
    grid = np.arange(len(scores)).reshape(nodes, -1)
    locals = grid.shape[1]
    found = []
    for pull in pulls:
        if pull.leader is None:
            continue
        group = grid[worker // locals] if pull.axes == ("local",) else grid.ravel()
        elected = int(pull.leader[worker])
        leader = group[elected if elected >= 0 else np.argmin(scores[group])]
        found.append((role_of(pull, worker, nodes, locals), int(leader)))
    return list(dict.fromkeys(found))


class Points:
    """The worker in the middle, and the points that the plane may go through.

    Args:
      run: the run.
      worker: the worker in the middle. Defaults to the worst one that leads no worker.

    Attributes:
      worker: the worker in the middle.
      roles: the workers beside it as (role, worker): its leaders, or the best worker.
      pulls: the diagnostics of each pull.
      center: the center of the workers, [P].

    Raises:
      ValueError: the worker does not exist, or its parameters are not finite.
    """

    def __init__(self, run: SavedRun, worker: int | None):
        workers = run.experiment.workers
        grid = run.config.workers
        self._run = run
        self._params = run.state.params
        self.pulls = workers.fetch(lj.diagnostics(run.state.opt_state))
        scores = resharding.scores(run.state, run.recent)
        finite = workers.fetch(lj.is_finite(self._params))

        def leaders(worker):
            return leaders_of(worker, self.pulls, scores, grid.nodes)

        leading = [w for worker in range(len(scores)) for _, w in leaders(worker)]
        self.worker = self._chosen(worker, scores, finite, leading)
        sound = np.flatnonzero(finite)
        self._by_score = sound[np.argsort(scores[sound], kind="stable")]
        self.roles = leaders(self.worker)
        self._led = bool(self.roles)
        if not self._led and len(sound) > 1:
            self.roles = [("best", int(self._by_score[0]))]
        self.center = flat(lj.center(self._params, run.state.opt_state))

    def _chosen(
        self,
        worker: int | None,
        scores: np.ndarray,
        finite: np.ndarray,
        leading: list[int],
    ) -> int:
        at = f"at step {self._run.step} of {self._run.folder}"
        if not finite.any():
            raise ValueError(f"no worker has finite parameters {at}")
        if worker is None:
            led = finite & ~np.isin(np.arange(len(finite)), leading)
            among = led if led.any() else finite
            judged = among & np.isfinite(scores)
            chosen = np.flatnonzero(judged if judged.any() else among)
            return int(chosen[np.argmax(scores[chosen])])
        if not 0 <= worker < len(scores):
            raise ValueError(f"`worker` must be in 0..{len(scores) - 1}, got {worker=}")
        if not finite[worker]:
            sound = ", ".join(map(str, np.flatnonzero(finite)))
            raise ValueError(
                f"`worker` must have finite parameters, which {at} only {sound} have, got "
                f"{worker=}"
            )
        return worker

    def of(self, worker: int) -> np.ndarray:
        """Returns the parameters of a worker, [P]."""
        return flat(jax.tree.map(lambda x: x[worker], self._params))

    def name(self, worker: int) -> str:
        """Returns the worker and its roles, as in 'worker 2 (leader of node 0)'."""
        roles = [role for role, other in self.roles if other == worker]
        return f"worker {worker}" + (f" ({', '.join(roles)})" if roles else "")

    def candidates(self) -> Iterator[Candidate]:
        """Yields points that the plane may go through, by preference, with their names.

        Random directions come last, for workers that are all at one point.
        """
        named = ((self.name(worker), self.of(worker)) for _, worker in self.roles)
        center = [(CENTER, self.center)]
        yield from itertools.chain(*((named, center) if self._led else (center, named)))
        for worker in self._by_score:
            yield self.name(worker), self.of(worker)

        def mine(params):
            return jax.tree.map(lambda x: np.asarray(x[self.worker]), params)

        yield "the start of training", flat(mine(self._run.experiment.init().params))
        for seed in range(8):
            step = flat(plane.filterwise_random(seed, mine(self._params)))
            yield f"{ALONG}random direction {seed}", self.of(self.worker) + step
