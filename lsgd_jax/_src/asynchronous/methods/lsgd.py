"""Asynchronous Leader SGD: pulls towards the leaders' latest snapshots."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from lsgd_jax._src.asynchronous.engine.worker import Worker
from lsgd_jax._src.asynchronous.methods.driver import (
    Driver,
    FreeRunning,
    InFlight,
)
from lsgd_jax._src.trees import value_at
from lsgd_jax._src.wire.wire import Wire, WireFormat


@dataclasses.dataclass(frozen=True)
class LSGD(FreeRunning):
    r"""Leader SGD whose workers never wait for each other.

    Every W τ steps of all workers together, each worker asks the leader of its node for its
    parameters and goes on with its own steps. When the snapshot z arrives,

    .. math:: y \leftarrow y - \lambda (y - z).

    Every W τ_G steps it does the same with the leader of all workers and λ_G.

    The leader is the worker with the lowest mean loss over its last `loss_window` steps, as
    reported to the coordinator. Ties go to the lowest index. The leader itself is not
    moved. A worker that is not finite never leads, and takes the leader's parameters as
    they are. A worker that has not stepped since the last pull does not lead. A worker that
    does not answer is left out for a while. ``Pulls(lj.lsgd(...), budget=True)`` is the
    same method with a barrier at each pull.

    Args:
      local_pull: pull towards the leader of the node, λ in [0, 1] or a schedule of the
        worker's own steps; 0 disables this level.
      global_pull: pull towards the leader of all, λ_G in [0, 1] or a schedule; 0 disables
        this level.
      local_period: steps per worker between pulls towards the node's leader, τ.
      global_period: steps per worker between pulls towards the leader of all, τ_G.
      loss_window: number of losses in a worker's score.
      wire: the format in which parameters travel, or a `Wire`.

    Raises:
      ValueError: pulls outside [0, 1], periods or a window below 1.

    Reference: Teng et al., Leader Stochastic Gradient Descent, NeurIPS 2019,
    arXiv:1905.10395. The released code counts steps in the same way and then waits.

    >>> import lsgd_jax as lj
    >>> lj.asynchronous.LSGD(local_period=16, global_period=64).window
    10
    """

    local_pull: optax.ScalarOrSchedule = 0.1
    global_pull: optax.ScalarOrSchedule = 0.1
    local_period: int = 64
    global_period: int = 128
    loss_window: int = 10
    wire: Wire | WireFormat = "float32"

    positive = ("local_period", "global_period", "loss_window")
    fractions = schedules = ("local_pull", "global_pull")

    @property
    def window(self) -> int:
        """Losses in a worker's score."""
        return self.loss_window

    def bind(self, worker: Worker, steps: int) -> "LSGDWorker":
        """Returns the method in one worker."""
        position = worker.transport.position
        levels = [
            Level(position.group("local"), self.local_pull, self.local_period),
            Level(position.group(("node", "local")), self.global_pull, self.global_period),
        ]

        on = [level for level in levels if callable(level.pull) or level.pull > 0]
        return LSGDWorker(worker, on)


class Level(NamedTuple):
    """One level of leaders: candidates, strength and period of the pull."""

    group: list[int]
    pull: optax.ScalarOrSchedule
    period: int


class LSGDWorker(Driver):
    """Leader SGD in one worker. Each level has one request in flight at most."""

    kept = ("counted",)

    def __init__(self, worker: Worker, levels: list[Level]):
        super().__init__(worker, peers=range(worker.transport.position.workers))
        self._levels = levels
        # Per level, at its last pull: steps of all workers, and steps of each.
        self.counted = [0] * len(levels)
        self._seen: list[dict[int, int]] = [{} for _ in levels]

    async def done(self) -> None:
        """Asks the leaders of the levels on which all workers have taken W τ steps."""
        status = self.worker.status
        if status is None:
            return
        total = sum(report.steps for report in status.reports.values())
        for k, level in enumerate(self._levels):
            budget = max(1, len(status.present)) * level.period
            # Steps that a restarted worker takes again count once.
            self.counted[k] = min(self.counted[k], total)
            pulls = (total - self.counted[k]) // budget
            self.counted[k] += pulls * budget
            if not pulls or k in self.in_flight:
                continue
            self.peers.count_choice()
            steps = {i: status.reports[i].steps for i in level.group}
            moving = [i for i in steps if steps[i] > self._seen[k].get(i, 0)]
            self._seen[k] = steps
            leader = status.leader(filter(self.peers.is_tried, moving))
            if leader is not None and leader != self.worker.index:
                self.ask_snapshot(leader, slot=k)

    def landed(self, slot: int, request: InFlight, answer: Any) -> bool:
        """Pulls the worker towards a leader's snapshot."""
        is_finite = self.is_finite and bool(jnp.isfinite(self.worker.score))
        weight = value_at(self._levels[slot].pull, jnp.int32(self.worker.count))
        return self.pull(answer.params, jnp.clip(weight, 0, 1), is_finite)
