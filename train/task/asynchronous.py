"""What one worker trains that steps at its own pace.

The parts are those of `train.task.experiment`: a worker sees at its own step t what it
would see at step t among workers in lock step.
"""

import functools
import warnings
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

import lsgd_jax as lj
from train import compilation_cache
from train.cluster.session import Session
from train.config import Config
from train.data.text import Text
from train.task.datasets import Data
from train.task.experiment import (
    first_variables,
    load,
    make_forward,
    make_optimizer,
    worker_keys,
)
from train.task.forward import Source


class Own(NamedTuple):
    """What stays with a worker and changes, or says which one it is.

    Attributes:
      index: which worker.
      stats: its batch statistics.
    """

    index: int
    stats: Any


class Given(NamedTuple):
    """What a worker is given for good.

    Attributes:
      batches: what it learns from.
      data: what of that lies on the device.
      key: its random key; the step is folded in.
    """

    batches: "Batches"
    data: Any
    key: Array


def training(
    config: Config,
    dataset: Data | Text | None = None,
    warn: Callable[[str], None] = warnings.warn,
) -> lj.asynchronous.Training:
    """What each worker of a configuration trains; built once for all of a process.

    Args:
      config: the experiment's.
      dataset, warn: as for `Experiment`.

    Raises:
      ValueError, DataError: as `Experiment` does.
    """
    one = OneWorker(config, load(config) if dataset is None else dataset, warn)
    return lj.asynchronous.Training(one.init, one.step)


def of_worker(config: Config, index: int) -> lj.asynchronous.Training:
    """The same for a worker that has a process of its own."""
    del index
    lj.tune_cpu()  # a host of a cluster does not inherit the driver's environment
    compilation_cache.use(say=False)
    return training(config)


class OneWorker:
    """What `training` is made of; the arguments as there."""

    def __init__(self, config: Config, data: Data | Text, warn: Callable[[str], None]):
        self._config, self._data, self._warn = config, data, warn
        self._tx = make_optimizer(config)  # the base optimizer: the method is the engine's
        self._placed: dict[tuple, Any] = {}
        self._given: dict[int, Given] = {}
        self._forward = self._forward_of(0)
        self._step = jax.jit(self._take_step)

    def _forward_of(self, index: int) -> Any:
        grid: Any = Alone(index, self._config.workers.nodes * self._config.workers.locals)
        grid.placed = self._placed
        single = Session()
        return make_forward(self._config, self._data, grid, self._warn, single)

    @functools.cached_property
    def _start(self) -> tuple[Any, Any, Any]:
        variables = first_variables(self._forward, self._config.seed)
        params = variables.pop("params")
        return params, jax.jit(self._tx.init)(params), variables

    def init(self, index: int) -> tuple[Any, Any, Own]:
        """Where worker `index` begins: (params, opt_state, own)."""
        grid, source = self._config.workers, self._forward_of(index).source
        key = worker_keys(self._config.seed, grid.nodes * grid.locals)[index]
        self._given[index] = Given(Batches(source), source.data, key)
        params, opt_state, stats = self._start
        return params, opt_state, Own(index, stats)

    def step(self, params: Any, opt_state: Any, own: Own, t: Any) -> Any:
        """The step number t: (updates, opt_state, own, loss)."""
        batches, data, key = self._given[own.index]
        batch = batches.at(int(t) - 1)
        updates, opt_state, stats, loss = self._step(
            params, opt_state, own.stats, key, data, batch, t
        )
        return updates, opt_state, own._replace(stats=stats), loss

    def _take_step(self, params, opt_state, stats, key, data, batch, t):
        key = jax.random.fold_in(key, t - 1)

        def loss_of(params):
            return self._forward.loss(params, stats, data, batch, key)

        (loss, stats), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, opt_state = self._tx.update(grads, opt_state, params)
        return updates, opt_state, stats, loss


class Alone:
    """The grid as one of its workers sees it: of `lj.Workers` what data need.

    Args:
      index: which worker.
      num_workers: W.

    >>> grid = Alone(index=2, num_workers=4)
    >>> grid.owned, grid.put_owned(jnp.ones((1, 3))).shape
    (range(2, 3), (3,))
    """

    def __init__(self, index: int, num_workers: int):
        self.owned, self.num_workers = range(index, index + 1), num_workers
        self.placed: dict[tuple, Any] = {}  # what all workers read, by the host's arrays

    def share(self, tree: Any) -> lj.Shared:
        """Puts a tree on the device, once for all workers of a process."""
        key = tuple(map(id, jax.tree.leaves(tree)))
        if key not in self.placed:
            self.placed[key] = tree, jax.tree.map(jnp.asarray, tree)
        return lj.Shared(self.placed[key][1])

    @staticmethod
    def put_owned(rows: Any) -> Any:
        """Puts a worker's own rows [1, ...] on the device, without their leading axis."""
        return jax.tree.map(lambda x: jnp.asarray(x[0]), rows)


class Batches:
    """The batches of a worker, which as a rule asks for one after the other.

    Args:
      source: where they come from.
    """

    def __init__(self, source: Source):
        self._source, self._next = source, 0
        self._reading: Generator[Any, None, None] | None = None

    def at(self, step: int) -> Any:
        """The batch of a step (from 0)."""
        if self._reading is None or step != self._next:
            self.close()
            self._reading = self._source.batches(range(step, 2**31 - 1))
        self._next = step + 1
        return next(self._reading)

    def close(self) -> None:
        """Ends what reads ahead."""
        if self._reading is not None:
            self._reading.close()
            self._reading = None
