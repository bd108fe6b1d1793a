"""Blocking LSGD between processes: each takes its own steps, and all meet when due."""

import contextlib
from collections.abc import Callable, Generator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import lsgd_jax as lj
from train.cluster.session import Session
from train.task import batch_statistics
from train.task.state import TrainState


Batches = Callable[[range], Generator[Any, None, None]]
ENDLESS = 2**31  # no worker takes more steps


def lsgd(
    local_pull: optax.ScalarOrSchedule = 0.1,
    global_pull: optax.ScalarOrSchedule = 0.1,
    local_period: int = 64,
    global_period: int = 128,
    loss_window: int = 10,
    wire: lj.WireFormat = "float32",
) -> lj.asynchronous.OnBudget:
    """LSGD on a budget of steps that all workers share, without waiting in between.

    Args:
      local_pull: pull towards the leader of the node, in [0, 1]; 0: off.
      global_pull: pull towards the leader of all workers, in [0, 1]; 0: off.
      local_period: steps per worker between pulls towards the node's leader.
      global_period: steps per worker between pulls towards the leader of all.
      loss_window: number of losses that elect the leader, the mean of the last ones.
      wire: the format in which parameters travel.
    """
    pulls: Any = lj.lsgd(
        local_pull, global_pull, local_period, global_period, loss_window, wire=wire
    )
    return lj.asynchronous.on_budget(pulls)


class BudgetSteps:
    """In place of one step of all workers: a round of this process's own steps.

    Args:
      step: one worker's step, see `Experiment`.
      exchange: what happens when all meet.
      workers: the grid.
      session: the processes.
      config: the experiment's.
    """

    def __init__(
        self,
        step: Callable[..., tuple[TrainState, Array]],
        exchange: lj.asynchronous.OnBudget,
        workers: lj.Workers,
        session: Session,
        config: Any,
    ):
        self._workers, self._session = workers, session
        name = session.new_folder("budget")
        self._rounds = lj.asynchronous.Rounds(workers, exchange, session.counts(), name)
        self._step = self._rounds.local.map(step, donate=0)
        averages = config.batch_statistics == "average"
        self._mean = workers.map(batch_statistics.mean, donate=0) if averages else None

    def feed(
        self, state: TrainState, steps: range, batches: Batches
    ) -> Generator[tuple[int, Any], None, None]:
        """Of each round the steps per worker at its end, and what it is called with."""
        workers, local = self._workers, self._rounds.local
        taken: Any = lj.asynchronous.steps_taken(state.opt_state)
        count = max(int(shard.data.max()) for shard in taken.addressable_shards)
        keys = workers.fetch(state.key)[np.asarray(workers.owned)]
        self._own = local.put(keys), local.share(jnp.int32(count))
        with contextlib.closing(batches(range(count, ENDLESS))) as mine:
            self._batch, self._has_begun = next(mine), False
            for until in self._rounds.ends(steps.start, steps.stop):
                yield until, (until, mine)

    def __call__(self, state: TrainState, data: Any, batch: Any) -> tuple[TrainState, Any]:
        """The state after a round, and each worker's mean loss over its own steps, [W]."""
        until, batches = batch
        rounds, workers, losses = self._rounds, self._workers, []
        params, stats, opt_state, data = rounds.enter(
            (state.params, state.stats, state.opt_state, data)
        )
        own = TrainState(params, stats, opt_state, *self._own)
        for _ in rounds.claims(until):
            own, loss = self._step(own, data, rounds.enter(self._batch))
            self._batch = next(batches)  # while the step runs
            losses.append(np.asarray(loss))
            if not self._has_begun:  # who has compiled first would take all steps
                self._session.wait_for_all()
                self._has_begun = True
        self._own = own.key, own.step
        self._session.work.begin(f"at the meeting after step {until}")
        params, stats, opt_state = rounds.leave((own.params, own.stats, own.opt_state))
        params, opt_state = rounds.meet(params, opt_state, until)
        if self._mean is not None and rounds.is_due(until) and jax.tree.leaves(stats):
            stats = self._mean(stats)
        state = TrainState(
            params, stats, opt_state, state.key, workers.share(jnp.int32(until))
        )
        return state, workers.put_owned(np.mean(losses, axis=0))
