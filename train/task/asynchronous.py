"""Asynchronous workers: the training of one worker, and the stacked states of all.

At its own step t, a worker uses the batch and the random key that it would use at step t in
lock step.
"""

import functools
import warnings
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import lsgd_jax as lj
from train.cluster import devices
from train.cluster.session import Session
from train.config.schema import Config
from train.process import compilation_cache
from train.task import inside, schedules
from train.task.datasets import load_dataset
from train.task.experiment import BaseExperiment, Task
from train.task.state import AsynchronousState, EngineState, TrainState


State = dict[str, Any]  # the state of one worker, as engines exchange it


class Own(NamedTuple):
    """The part of a worker's state that its peers never copy.

    Attributes:
      index: the worker.
      stats: its batch statistics.
    """

    index: int
    stats: Any


def training(
    config: Config,
    warn: Callable[[str], None] = warnings.warn,
    mesh: Mesh | None = None,
) -> lj.asynchronous.Training:
    """The training of the workers of one process, compiled once for all of them.

    Args:
      config: the configuration.
      warn: see `Task`.
      mesh: the devices over which each worker is sharded. Defaults to one device.

    Raises:
      ValueError, DataError: see `Task`.
    """
    dataset = load_dataset(config)
    placed: dict[tuple, Any] = {}
    grid = config.workers
    whole = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    put = functools.partial(jax.device_put, device=whole)

    @functools.cache
    def task_of(index: int) -> tuple[Task, "Batches"]:
        place = Place(index, grid.nodes * grid.locals, placed, put)
        task = Task(config, dataset, place, warn, Session())
        return task, Batches(task.forward.source)

    task, _ = task_of(0)
    keys = task.keys()
    learn = jax.jit(task.learn)
    start = functools.cache(task.start)

    def init(index: int) -> tuple[Any, Any, Own]:
        task_of(index)
        params, opt_state, stats = start()
        return params, opt_state, Own(index, stats)

    def step(params: Any, opt_state: Any, own: Own, t: Any) -> Any:
        task, batches = task_of(own.index)
        done: Any = lj.Shared(np.int32(t - 1))
        state = TrainState(params, own.stats, opt_state, keys[own.index], done)
        data = task.forward.source.data
        batch = batches.at(int(done.value))
        updates, opt_state, stats, loss = learn(state, data, batch)
        return updates, opt_state, own._replace(stats=stats), loss

    alone = lj.asynchronous.Training(init, step)
    if mesh is None:
        return alone
    return lj.asynchronous.island(alone, mesh, inside.specs(dict(mesh.shape)))


def of_worker(config: Config, index: int) -> lj.asynchronous.Training:
    """The training of a worker in its own process."""
    del index
    # Hosts of a cluster do not inherit the driver's environment.
    devices.provide(config.workers.devices_each)
    compilation_cache.use(say=False)
    return training(config, mesh=inside.mesh(config.workers.axes))


class Place:
    """Puts the data of one worker without a grid on its devices; see `Task`.

    Args:
      index: the worker.
      num_workers: W.
      placed: the data that all workers of the process share, by their host arrays.
      put: puts a tree on the worker's devices. Defaults to one device.

    >>> place = Place(2, num_workers=4, placed={})
    >>> place.owned, place.put_owned(jnp.ones((1, 3))).shape
    (range(2, 3), (3,))
    """

    def __init__(
        self,
        index: int,
        num_workers: int,
        placed: dict[tuple, Any],
        put: Callable[[Any], Any] = jax.device_put,
    ):
        self.owned = range(index, index + 1)
        self.num_workers = num_workers
        self._placed = placed
        self._put = put

    def share(self, tree: Any) -> lj.Shared:
        """Puts a tree on the device, once for all workers of the process."""
        key = tuple(map(id, jax.tree.leaves(tree)))
        if key not in self._placed:
            self._placed[key] = tree, self._put(tree)
        return lj.Shared(self._placed[key][1])

    def put_owned(self, rows: Any) -> Any:
        """Puts the worker's rows [1, ...] on the device, without their leading axis."""
        return self._put(jax.tree.map(lambda x: x[0], rows))


class Batches:
    """The batches of one worker, which usually requests them in order.

    Args:
      source: the source of the batches, see `train.task.forward.Forward`.
    """

    def __init__(self, source: Any):
        self._source = source
        self._next = 0
        self._reading: Generator[Any, None, None] | None = None

    def at(self, step: int) -> Any:
        """The batch of a step (from 0)."""
        if self._reading is None or step != self._next:
            if self._reading is not None:
                self._reading.close()  # stops reading ahead
            self._reading = self._source.batches(range(step, 2**31 - 1))
        self._next = step + 1
        return next(self._reading)


class AsynchronousExperiment(BaseExperiment):
    """An experiment whose workers train asynchronously in other processes.

    The grid of this process holds and tests their stacked states. For arguments see
    `BaseExperiment`.

    Attributes:
      method: the method that an engine runs.
    """

    def __init__(self, config: Config, *args: Any, **options: Any):
        rate = schedules.learning_rate(config.optimizer, config.steps)
        self.method = config.method.asynchronous(rate, config.steps)
        super().__init__(config, *args, **options)

    def __str__(self) -> str:
        grid = self._config.workers
        name = self._config.method.name
        return f"{name}: {grid.nodes} x {grid.locals} asynchronous workers"

    def init(self) -> AsynchronousState:
        states = [self._first] * self.workers.num_workers
        return self.stacked(states, step=0, sent=[0.0] * len(states))

    @functools.cached_property
    def _first(self) -> State:
        """The initial state of a worker. Building it also checks the method."""
        grid = self._config.workers
        steps = self._config.steps
        params, opt_state, stats = self.task.start()
        no_step: Any = None  # is taken here
        training = lj.asynchronous.Training(
            lambda i: (params, opt_state, Own(i, stats)), no_step
        )
        first = lj.asynchronous.simulator.first_worker(
            training, self.method, grid.nodes, grid.locals, steps
        )
        return first.state(own=True)

    def stacked(
        self, states: Sequence[State], step: int, sent: Sequence[float]
    ) -> AsynchronousState:
        """Stacks the states of all workers, their batch statistics averaged if configured.

        Args:
          states: the state of each worker.
          step: the mean of their steps.
          sent: the bytes that each worker has sent.
        """

        def stack(*leaves):
            return np.stack([np.asarray(leaf) for leaf in leaves])

        def column(name):
            return [state[name] for state in states]

        def put(trees):
            return self.workers.put(jax.tree.map(stack, *trees))

        stats = put([own.stats for own in column("own")])
        if stats and self._config.batch_statistics == "average":
            stats = self.workers.replicate(lj.consensus(stats))
        return AsynchronousState(
            params=put(column("params")),
            stats=stats,
            opt_state=put(column("opt_state")),
            key=self.workers.put(self.task.keys()),
            step=self.workers.share(jnp.int32(step)),
            engine=EngineState(
                method=put([jax.tree.leaves(tree) for tree in column("method")]),
                count=self.workers.put(np.asarray(column("count"), np.int32)),
                number=self.workers.put(np.asarray(column("number"), np.int32)),
                sent=self.workers.put(np.asarray(sent, np.float32)),
            ),
        )

    def apart(self, state: AsynchronousState) -> list[State]:
        """Splits a stacked state into the states of the workers; inverts `stacked`."""
        state = self.workers.fetch(state)
        engine = state.engine
        method = jax.tree.structure(self._first["method"])

        def row(tree, i):
            return jax.tree.map(lambda x: x[i], tree)

        return [
            {
                "params": row(state.params, i),
                "opt_state": row(state.opt_state, i),
                "own": Own(i, row(state.stats, i)),
                "count": int(engine.count[i]),
                "method": method.unflatten(row(engine.method, i)),
                "number": int(engine.number[i]),
            }
            for i in range(self.workers.num_workers)
        ]

    def sent(self, state: AsynchronousState) -> list[float]:
        """The bytes that each worker has sent."""
        return self.workers.fetch(state.engine.sent).tolist()

    def bytes_sent(self, state: AsynchronousState) -> int:
        return int(np.mean(self.sent(state)))
