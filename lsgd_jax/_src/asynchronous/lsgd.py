"""Leader SGD without waiting: pulls towards the leaders' latest snapshots."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from lsgd_jax._src.asynchronous.coordinator import Standing
from lsgd_jax._src.asynchronous.errors import Unreachable
from lsgd_jax._src.asynchronous.free_running import FreeRunning
from lsgd_jax._src.asynchronous.peers import Peers
from lsgd_jax._src.asynchronous.ports import Pending
from lsgd_jax._src.asynchronous.worker import Worker
from lsgd_jax._src.checks import check_fraction, check_positive_int
from lsgd_jax._src.trees import value_at


@dataclasses.dataclass(frozen=True)
class LSGD:
    r"""Leader SGD whose workers never wait for each other.

    Once all workers together have taken W τ steps since the last time, each of them asks
    the best worker of its node for its parameters, goes on with its own steps, and when the
    snapshot z has arrived, after whatever delay,

    .. math:: y \leftarrow y - \lambda (y - z),

    and likewise, once W τ_G steps were taken, towards the best worker of all with λ_G. The
    best has the lowest mean loss over its last `loss_window` steps, as the coordinator was
    told it. Ties go to the lowest index; who is not finite never leads and takes the
    leader's parameters whole; the leader is not moved. A worker that has not stepped since
    the last time does not lead, and one that does not answer not for a while. The form in
    which all come together is ``Pulls(lj.lsgd(...), budget=True)``.

    Args:
      local_pull: pull towards the leader of the node, λ in [0, 1] or a schedule of the
        worker's own steps; 0 switches the level off.
      global_pull: pull towards the leader of all, λ_G in [0, 1] or a schedule; 0 switches
        the level off.
      local_period: steps per worker between pulls towards the node's leader, τ.
      global_period: steps per worker between pulls towards the leader of all, τ_G.
      loss_window: how many of the last losses a worker is judged by.

    Raises:
      ValueError: pulls outside [0, 1], periods or a window below 1.

    Reference: Teng et al., Leader Stochastic Gradient Descent, NeurIPS 2019,
    arXiv:1905.10395; the released code counts steps in the same way and then waits.

    >>> import lsgd_jax as lj
    >>> lj.asynchronous.LSGD(local_period=16, global_period=64).window
    10
    """

    local_pull: optax.ScalarOrSchedule = 0.1
    global_pull: optax.ScalarOrSchedule = 0.1
    local_period: int = 64
    global_period: int = 128
    loss_window: int = 10

    period = None

    def __post_init__(self):
        check_positive_int("loss_window", self.loss_window)
        for name in ("local", "global"):
            check_positive_int(f"{name}_period", getattr(self, f"{name}_period"))
            if not callable(pull := getattr(self, f"{name}_pull")):
                check_fraction(f"{name}_pull", pull)

    @property
    def window(self) -> int:
        """Losses in a worker's score."""
        return self.loss_window

    def bind(self, worker: Worker, steps: int) -> "Following":
        """The method in one worker."""
        del steps
        place = worker.ports.place
        levels = [
            Level(place.group("local"), self.local_pull, self.local_period),
            Level(place.group(("node", "local")), self.global_pull, self.global_period),
        ]
        is_on = lambda pull: callable(pull) or pull > 0
        return Following(worker, [level for level in levels if is_on(level.pull)])


class Level(NamedTuple):
    """Whose leader is followed, how hard, how often."""

    group: list[int]
    pull: optax.ScalarOrSchedule
    period: int


class Coming(NamedTuple):
    """A leader's snapshot that is in flight.

    Attributes:
      leader: whose.
      since: the worker's own step at which it was asked for.
      lost: what rounding took of this worker then.
      snapshot: the call.
    """

    leader: int
    since: int
    lost: Any
    snapshot: Pending


class Following(FreeRunning):
    """Leader SGD in one worker."""

    def __init__(self, worker: Worker, levels: list[Level]):
        super().__init__(worker)
        self._levels, self._peers = levels, Peers(range(worker.ports.place.workers))
        self._counted = [0] * len(levels)  # steps of all up to the last pull of each level
        self._seen: list[dict[int, int]] = [
            {} for _ in levels
        ]  # steps of each at that time
        self._coming: dict[int, Coming] = {}

    async def after_step(self) -> None:
        """Lands what has arrived, asks for what is due."""
        for k, level in enumerate(self._levels):
            if k in self._coming and self._coming[k].snapshot.done:
                await self._land(level, self._coming.pop(k))
        if (standing := self.worker.standing) is not None:
            for k, level in enumerate(self._levels):
                if self._is_due(k, standing) and k not in self._coming:
                    self._ask(k, level, standing)
        self.worker.publish()

    def _is_due(self, k: int, standing: Standing) -> bool:
        """Whether so many steps were taken; those that a worker takes again count once."""
        total = sum(report.steps for report in standing.reports.values())
        budget = max(1, len(standing.present)) * self._levels[k].period
        self._counted[k] = min(self._counted[k], total)
        rounds = (total - self._counted[k]) // budget
        self._counted[k] += rounds * budget
        return rounds > 0

    def _ask(self, k: int, level: Level, standing: Standing) -> None:
        self._peers.turn()
        steps = {i: standing.reports[i].steps for i in level.group}
        moving = [i for i in level.group if steps[i] > self._seen[k].get(i, 0)]
        self._seen[k] = steps
        leader = standing.leader(filter(self._peers.is_tried, moving))
        if leader is not None and leader != self.worker.index:
            worker = self.worker
            snapshot = worker.ports.latest(leader)
            self._coming[k] = Coming(leader, worker.count, self.lost(), snapshot)

    async def _land(self, level: Level, coming: Coming) -> None:
        try:
            snapshot = await coming.snapshot
        except Unreachable:
            self._peers.failed(coming.leader)
            return
        self._peers.answered(coming.leader)
        fit = self.fit and bool(jnp.isfinite(self.worker.score.value))
        weight = value_at(level.pull, jnp.int32(self.worker.count))
        if self.pull(snapshot.vector + coming.lost, jnp.clip(weight, 0, 1), fit):
            self.mixed(coming.since)

    def state(self) -> Any:
        """What passes to a worker that starts again."""
        return {"counted": list(self._counted)}

    def take_over(self, state: Any) -> None:
        """Goes on from another worker's; what was in flight was meant for another step."""
        self._counted, self._coming = [int(n) for n in state["counted"]], {}
