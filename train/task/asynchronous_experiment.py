"""Workers at their own pace, side by side: their states as one, to test and to keep."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import lsgd_jax as lj
from train.config import Config
from train.task.asynchronous import Own
from train.task.experiment import Experiment, first_variables
from train.task.state import TrainState


State = dict[str, Any]  # of one worker, as an engine gives and takes it


class AsynchronousState(NamedTuple):
    """What a `TrainState` holds besides, of workers at their own pace; leaves [W, ...].

    Attributes:
      base: the state of the base optimizer.
      method: the leaves of the method's state.
      count: int32, steps that each worker has taken.
      number: int32, rounds that it has seen.
      sent: float32, bytes that it has sent.
    """

    base: Any
    method: list[Any]
    count: Any
    number: Any
    sent: Any


class AsynchronousExperiment(Experiment):
    """An experiment whose workers train elsewhere, each at its own pace.

    The arguments are those of `Experiment`; the attribute `step` is not to be called.

    Attributes:
      method: what the workers do besides their own steps.
    """

    def __init__(self, config: Config, *args: Any, **options: Any):
        self.method = config.method.asynchronous()
        super().__init__(config, *args, **options)

    def __str__(self) -> str:
        grid, name = self._config.workers, self._config.method.name
        return f"{name}: {grid.nodes} x {grid.locals} workers at their own pace"

    def init(self) -> TrainState:
        """The state before the first step."""
        states = [self._first] * self.workers.num_workers
        return self.stacked(states, step=0, sent=[0.0] * len(states))

    @functools.cached_property
    def _first(self) -> State:
        """The state of a worker before the first step; the method is checked by the way."""
        grid, steps = self._config.workers, self._config.steps
        stats = first_variables(self.forward, self._config.seed)
        params = stats.pop("params")
        begin = lambda i: (params, self._tx.init(params), Own(i, stats))
        nothing: Any = None  # no step is taken here
        task = lj.asynchronous.Training(begin, nothing)
        first = lj.asynchronous.simulator.first_worker(
            task, self.method, grid.nodes, grid.locals, steps
        )
        return {**first.state(own=True), "number": 0}

    def stacked(
        self, states: Sequence[State], step: int, sent: Sequence[float]
    ) -> TrainState:
        """The states of all workers as one.

        Args:
          states: of each worker.
          step: how far they are, on the mean.
          sent: bytes that each has sent.
        """
        stack = lambda *leaves: np.stack([np.asarray(leaf) for leaf in leaves])
        column = lambda name: [state[name] for state in states]
        put = lambda trees: self.workers.put(jax.tree.map(stack, *trees))
        kept = AsynchronousState(
            base=put(column("opt_state")),
            method=put([jax.tree.leaves(tree) for tree in column("method")]),
            count=self.workers.put(np.asarray(column("count"), np.int32)),
            number=self.workers.put(np.asarray(column("number"), np.int32)),
            sent=self.workers.put(np.asarray(sent, np.float32)),
        )
        return TrainState(
            params=put(column("params")),
            stats=put([own.stats for own in column("own")]),
            opt_state=kept,
            key=self.workers.put(self.worker_keys()),
            step=self.workers.share(jnp.int32(step)),
        )

    def sent(self, state: TrainState) -> list[float]:
        """Bytes that each worker has sent."""
        return self.workers.fetch(state.opt_state.sent).tolist()

    def bytes_sent(self, state: TrainState) -> int:
        return int(np.mean(self.sent(state)))

    def apart(self, state: TrainState) -> list[State]:
        """Each worker's own part of a state: what `stacked` was made of."""
        kept, host = state.opt_state, self.workers.fetch
        params, stats, base, leaves = map(
            host, (state.params, state.stats, kept.base, kept.method)
        )
        counts, numbers = host((kept.count, kept.number))
        method = jax.tree.structure(self._first["method"])
        row = lambda tree, i: jax.tree.map(lambda x: x[i], tree)
        return [
            {
                "params": row(params, i),
                "opt_state": row(base, i),
                "own": Own(i, row(stats, i)),
                "count": int(counts[i]),
                "method": method.unflatten(row(leaves, i)),
                "number": int(numbers[i]),
            }
            for i in range(self.workers.num_workers)
        ]
