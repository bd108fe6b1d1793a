"""Training and testing: one worker's step, and a grid of workers in lock step."""

import abc
import contextlib
import functools
import warnings
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import lsgd_jax as lj
from train.cluster.devices import one_each
from train.cluster.session import Session
from train.config.schema import Config
from train.data.arrays import DataError
from train.data.held_out import WithHeldOut
from train.data.in_flight import Backlog
from train.data.text import Text
from train.data.translation import Translation
from train.task import batch_statistics, inside, models, optimizers, schedules
from train.task.datasets import Data, load_dataset
from train.task.forward import Check, Forward, TestResult, go_on
from train.task.images import ImageForward
from train.task.own_workers import OwnWorkers
from train.task.separate_steps import SeparateSteps
from train.task.state import TrainState
from train.task.steps_beside import StepsBeside, with_own
from train.task.text import TextForward
from train.task.translation import TranslationForward


REESTIMATE_BATCHES = 8  # per worker


def make_optimizer(config: Config) -> optax.GradientTransformationExtraArgs:
    """The base optimizer of a configuration, chained with the method."""
    rate = schedules.learning_rate(config.optimizer, config.steps)
    base = optimizers.make(config.optimizer, rate)
    return config.method.around(base, rate, config.steps)


def optimizer_before_exchange(config: Config) -> optax.GradientTransformationExtraArgs:
    """The same chain without the exchange at its end."""
    rate = schedules.learning_rate(config.optimizer, config.steps)
    base = optimizers.make(config.optimizer, rate)
    return optax.chain(*config.method.before_exchange(base, rate, config.steps))


class Task:
    """The training of one worker: network, data, initial parameters and step.

    Args:
      config: the configuration.
      dataset: the data. Defaults to those of the configuration.
      place: puts data on the devices of the workers: a `lj.Workers`, or a
        `train.task.asynchronous.Place` for a worker without a grid.
      warn: called with a warning about the data.
      session: the processes of the run.

    Attributes:
      forward: applies the network to a batch.
      tx: the optimizer, which includes the method in lock step.
      method: the pulls at the end of the optimizer, or None if there are none.
      data: the data of all steps, on the devices: those of `forward.source`, or a
        `WithHeldOut`.

    Raises:
      ValueError: settings contradict each other.
      DataError: data files are missing or wrong.
    """

    def __init__(
        self,
        config: Config,
        dataset: Data | None,
        place: Any,
        warn: Callable[[str], None],
        session: Session,
    ):
        self._config = config
        self.tx = make_optimizer(config)
        self._before_exchange = optimizer_before_exchange(config)
        rate = schedules.learning_rate(config.optimizer, config.steps)
        self.method = config.method.exchanges(rate, config.steps)
        data = load_dataset(config) if dataset is None else dataset
        if isinstance(data, Text | Translation):
            if not session.same_everywhere(data.sha256):
                raise DataError("all processes must read the same text")
        if isinstance(data, Text):
            self.forward: Forward = TextForward(config, data, place)
        elif isinstance(data, Translation):
            self.forward = TranslationForward(config, data, place, warn)
        else:
            model = models.make(config, data[0].num_classes)
            self.forward = ImageForward(config, model, data, place, warn, session)
        self.data: Any = self.forward.source.data
        if self.forward.held_out is not None:
            if self.method is None:
                raise ValueError(
                    "`method.held_out` must be 0 unless the method exchanges parameters in "
                    f"lock step, got method.held_out={config.method.num_held_out}"
                )
            self.data = WithHeldOut(self.data, place.share(self.forward.held_out))

    def first_variables(self) -> dict[str, Any]:
        """The initial variables of all workers: 'params', and possibly batch statistics."""

        def init() -> dict[str, Any]:
            key, _ = jax.random.split(jax.random.key(self._config.seed))
            return self.forward.init(key)

        # The program runs once. Without optimizations CPUs compile it four times as fast.
        on_cpu = jax.default_backend() == "cpu"
        options = {"xla_backend_optimization_level": 0} if on_cpu else {}
        return jax.jit(init, compiler_options=options)()

    def start(self) -> tuple[Any, Any, Any]:
        """The start of a worker without a grid: (params, opt_state, batch statistics)."""
        stats = self.first_variables()
        params = stats.pop("params")
        return params, jax.jit(self.tx.init)(params), stats

    def keys(self) -> Array:
        """A random key for each worker, [W]."""
        grid = self._config.workers
        _, key = jax.random.split(jax.random.key(self._config.seed))
        return jax.random.split(key, grid.nodes * grid.locals)

    def learn(
        self, state: TrainState, data: Any, batch: Any, phase: lj.Phase | None = None
    ) -> tuple[Any, Any, Any, Array]:
        """One worker's step without its application: (updates, opt_state, stats, loss).

        phase: what the method does at this step. With None, the step count decides.
        """
        loss, stats, grads = self.gradient(state, data, batch)
        score = self.score(state, data, loss, phase)
        updates, opt_state = self.tx.update(
            grads, state.opt_state, state.params, value=score, grad=grads, phase=phase
        )
        return updates, opt_state, stats, loss

    def gradient(self, state: TrainState, data: Any, batch: Any) -> tuple[Any, Any, Any]:
        """One worker's (loss, batch statistics, gradient)."""
        train = data.train if isinstance(data, WithHeldOut) else data
        key = jax.random.fold_in(state.key, state.step.value)

        def loss_of(params):
            return self.forward.loss(params, state.stats, train, batch, key)

        gradient = lj.unrolled(jax.value_and_grad(loss_of, has_aux=True))
        (loss, stats), grads = gradient(state.params)
        return loss, stats, grads

    def score(
        self, state: TrainState, data: Any, loss: Array, phase: lj.Phase | None = None
    ) -> Array:
        """The loss that judges a worker: on held-out examples where a leader is elected."""
        if not isinstance(data, WithHeldOut):
            return loss

        def of_held_out():
            variables = {"params": state.params, **state.stats}
            sums = self.forward.sums(variables, *data.held_out.value)
            return self.forward.mean_loss(sums).astype(loss.dtype)

        if phase is not None:
            elects = phase.sends or phase.records
            return of_held_out() if elects else loss
        elects = jnp.asarray(False)
        for pull in self.method.pulls:  # type: ignore  # see __init__
            acts = pull.schedule.at(state.step.value + 1)
            elects |= acts.sends | acts.records
        # The step count is equal on all workers, so that only one branch is computed.
        return jax.lax.cond(elects, of_held_out, lambda: loss)

    def step(
        self, state: TrainState, data: Any, batch: Any, phase: lj.Phase | None = None
    ) -> tuple[TrainState, Array]:
        """One worker's step in lock step: (state, loss); phase as in `learn`."""
        updates, opt_state, stats, loss = self.learn(state, data, batch, phase)
        params = lj.apply_updates(state.params, updates)
        return self._after(state, params, stats, opt_state), loss

    def defer(
        self, state: TrainState, data: Any, batch: Any
    ) -> tuple[TrainState, Array, Any]:
        """One worker's `step` without the exchange of its method, see `Exchange.defer`.

        Returns:
          (state, loss, counts); `arrive` takes the counts if the exchange is due.
        """
        assert self.method is not None
        loss, stats, grads = self.gradient(state, data, batch)
        score = self.score(state, data, loss)
        *before, own = state.opt_state
        after: Any = self._before_exchange.update(
            grads, tuple(before), state.params, value=score, grad=grads
        )
        updates, base = after
        params, own, counts = self.method.defer(
            updates, own, state.params, loss=score, grad=grads
        )
        return self._after(state, params, stats, (*base, own)), loss, counts

    def arrive(
        self,
        before: Any,
        params: Any,
        stats: Any,
        own: Any,
        counts: Any,
        phase: lj.Phase,
    ) -> tuple[Any, Any, Any]:
        """One worker's exchange, which `defer` has left out.

        Args:
          before: the parameters before the step.
          params, stats, own, counts: results of `defer`; own: the state of the method.
          phase: the phase of the step.

        Returns:
          (params, stats, own).
        """
        assert self.method is not None
        params, after = self.method.arrive(before, params, own, counts, phase=phase)
        if self._config.batch_statistics == "average":
            stats = batch_statistics.averaged(stats, own, after)
        return params, stats, after

    def skip(
        self, state: TrainState, phase: lj.Phase | None = None
    ) -> tuple[TrainState, Array]:
        """One worker's step without a gradient, which takes no batch.

        phase as in `learn`.

        Returns:
          The state, and the number of steps taken, which is ready when the step is
          complete.
        """
        assert self.method is not None
        *base, own = state.opt_state
        params, own = self.method.skip(state.params, own, phase=phase)
        opt_state = (*optimizers.after_a_skip(base), own)
        after = self._after(state, params, state.stats, opt_state)
        return after, after.step.value

    def _after(
        self, state: TrainState, params: Any, stats: Any, opt_state: Any
    ) -> TrainState:
        """The state after a step; batch statistics are averaged if configured."""
        if self._config.batch_statistics == "average":
            stats = batch_statistics.averaged(stats, state.opt_state, opt_state)
        step = lj.Shared(state.step.value + 1)
        return TrainState(params, stats, opt_state, state.key, step)


class BaseExperiment(abc.ABC):
    """A configuration on a grid of workers. The constructor finds all its errors.

    The training state stacks the states of all workers. Tests do not change it.

    Args:
      config: the configuration.
      dataset, warn: see `Task`.
      devices: the devices to use. Defaults to the choice of `lj.Workers`.
      session: the processes of the run. Defaults to this process alone.

    Attributes:
      all_workers: the grid of all workers.
      workers: the grid of the training state: all workers, or those of this process if
        others may be lost.
      task: the training of one worker.
      forward: applies the network to a batch.
      data: the data that stay on the devices: each worker's own training data, all of them
        in a `Shared`, or nothing if batches contain the data.

    Raises:
      ValueError, DataError: see `Task`.
    """

    def __init__(
        self,
        config: Config,
        dataset: Data | None = None,
        warn: Callable[[str], None] = warnings.warn,
        devices: Sequence[jax.Device] | None = None,
        session: Session | None = None,
    ):
        self._config = config
        grid = config.workers
        session = session or Session()
        self._session = session
        # Asynchronous workers have devices of their own, in other processes.
        axes = {} if config.method.is_asynchronous else grid.axes
        if devices is None:
            devices = one_each(config)
        self.all_workers = lj.Workers(grid.nodes, grid.locals, devices=devices, inside=axes)
        self.workers = self.all_workers
        place: Any = self.workers
        if config.min_workers is not None:
            self.workers = self.all_workers.own()
            place = OwnWorkers(self.all_workers, self.workers)
        session.connect(self.workers.mesh)
        self.task = Task(config, dataset, place, warn, session)
        self.forward = self.task.forward
        self.data = self.task.data
        self._pick = self.workers.map(_of_worker)
        self._sums = self.workers.map(self._sums_of_one)
        self._stats_of_batch = self.workers.map(self._stats_of_one)

    @abc.abstractmethod
    def init(self) -> Any:
        """The initial state, in which all workers have the same parameters."""

    @abc.abstractmethod
    def bytes_sent(self, state: Any) -> int:
        """The bytes that a worker has sent so far, as a mean over the workers."""

    @property
    def crew(self) -> Any:
        """The processes of the run, if some may be lost; otherwise None."""
        return None

    @property
    def late(self) -> list[int]:
        """The steps after an election at which the leader of each pull is known."""
        return []

    def begin(self, state: Any, step: int) -> tuple[Any, int]:
        """The (state, step) with which training begins in this process.

        Where processes may be lost, it meets the others, and takes theirs if they have
        others.
        """
        return state, step

    def settled(self, state: Any) -> Any:
        """The state to save, without messages of which it is not known whether they count.

        The state itself unless processes may be lost.
        """
        return state

    def known(self, opt_state: Any) -> Any:
        """The optimizers' state as it was before such messages; it waits for none."""
        return opt_state

    def at_home(self, tree: Any) -> Any:
        """A tree out of the state, with all arrays on the devices that train."""
        return tree

    def keys(self) -> Array:
        """The random key of each worker."""
        owned = self.all_workers.owned
        return self.workers.put_owned(self.task.keys()[owned.start : owned.stop])

    @property
    def waited(self) -> float | None:
        """Seconds of waiting for messages beside the steps; None if there are none."""
        return None

    # Data

    def batches(self, steps: range) -> Generator[Any, None, None]:
        """Yields the batches of all workers for each step (from 0), on the devices."""
        return self.forward.source.batches(steps)

    def batch(self, step: int) -> Any:
        """The batches of all workers for one step (from 0), on the devices."""
        with contextlib.closing(self.batches(range(step, step + 1))) as batches:
            return next(batches)

    def backlog(self) -> Backlog:
        """A bound on the steps in flight, which depends on the memory of a batch."""
        return Backlog(self.forward.source.most_in_flight)

    # Testing

    def test_center(self, state: Any) -> TestResult:
        """Tests the center, the model that represents all workers."""
        return self.test(self.center(state))

    def test_worker(self, state: Any, worker: int, check: Check = go_on) -> TestResult:
        """Tests the model of one worker. For `check` see `test`."""
        variables = state.params, state.stats
        params, stats = self._pick(variables, lj.Shared(worker)).value
        return self.test(self._variables(params, stats, check), check)

    def sample(self, variables: Any) -> str:
        """A text that a model generates, or '' if it does not generate text."""
        # The variables are fetched to the host so that each process can draw by itself.
        fetched = self.workers.fetch(variables)
        return self.forward.sample(fetched, jax.random.key(self._config.seed))

    def score(self, variables: Any, check: Check = go_on) -> TestResult:
        """Measures of a model that take longer than a test. For `check` see `test`."""
        return self.forward.score(self.workers.fetch(variables), check)

    def center(self, state: Any, check: Check = go_on) -> dict[str, Any]:
        """The variables of the center, as they are tested. For `check` see `test`."""
        params = self.center_of_params(state)
        stats = lj.consensus(state.stats) if state.stats else {}
        return self._variables(params, stats, check)

    def center_of_params(self, state: Any) -> Any:
        """The parameters of the center. All processes find it at the same steps."""
        return self.at_home(lj.center(state.params, state.opt_state))

    def _variables(self, params: Any, stats: Any, check: Check) -> dict[str, Any]:
        if stats and self._config.batch_statistics == "reestimate":
            stats = self.reestimated(params, stats, check)
        return {"params": params, **stats}

    def test(self, variables: dict[str, Any], check: Check = go_on) -> TestResult:
        """Tests a model.

        Args:
          variables: its parameters and batch statistics.
          check: called before each batch. The test is left if it raises an exception.
        """
        shared = lj.Shared(variables)
        backlog = self.backlog()
        sums = []
        for batch in self.forward.source.test_batches:
            check()
            sums.append(backlog.add(self._sums(shared, *batch)))
        totals = np.sum(self.workers.fetch(sums), axis=(0, 2), dtype=np.float64)
        return self.forward.result(totals)

    def _sums_of_one(self, variables, *batch):
        return self.forward.sums(variables.value, *batch)

    def reestimated(self, params: Any, stats: Any, check: Check = go_on) -> Any:
        """Batch statistics of a model: the mean over some batches of every worker.

        Args:
          params: the parameters of the model.
          stats: statistics of the right shapes.
          check: see `test`.
        """
        count = min(REESTIMATE_BATCHES, self.forward.source.steps_per_epoch)
        keys = self.keys()
        shared = lj.Shared((params, stats))
        backlog = self.backlog()
        seen = []
        with contextlib.closing(self.batches(range(count))) as batches:
            for batch in batches:
                check()
                data = self.forward.source.data
                found = self._stats_of_batch(shared, data, batch, keys)
                seen.append(lj.consensus(backlog.add(found)))
        return jax.tree.map(lambda *each: sum(each) / count, *seen)

    def _stats_of_one(self, variables, data, batch, key):
        params, stats = variables.value

        def apply(stats):
            return self.forward.loss(params, stats, data, batch, key)

        return batch_statistics.of_batch(apply, stats)


def _of_worker(tree: Any, worker: lj.Shared) -> lj.Shared:
    """Broadcasts the tree of one worker to all workers."""
    return lj.Shared(lj.rules.Group(("node", "local")).broadcast(tree, worker.value))


class Experiment(BaseExperiment):
    """An experiment whose workers train in lock step. For arguments see the base class.

    Attributes:
      pulls_beside: the delayed pulls, if their messages travel beside the steps, or None.
    """

    def __init__(self, config: Config, *args: Any, **options: Any):
        super().__init__(config, *args, **options)
        self.pulls_beside: Any = self._pulls_beside()
        if self.pulls_beside is not None:
            self._session.connect(self.pulls_beside.mesh)

    def _pulls_beside(self) -> Any:
        """The delayed pulls, if their messages travel beside the steps, or None.

        Raises:
          ValueError: they must, and the settings do not allow it.
        """
        config = self._config
        method = self.method
        if config.beside is None and config.min_workers is None:
            may = config.may_send_beside and method is not None
            if not may or not self.all_workers.travels_beside(method):
                return None
        if config.beside is False:
            return None
        if method is None:
            raise ValueError(
                "`beside` must be False for a method that exchanges no parameters, got "
                f"method={config.method.name}"
            )
        if config.static_phases is not None:
            raise ValueError(
                "`static_phases` must be left out with beside, got "
                f"static_phases={config.static_phases}"
            )
        if config.batch_statistics == "average":
            raise ValueError(
                "`beside` must be False with batch_statistics=average, whose mean would "
                "wait for messages"
            )
        return self.all_workers.beside(method, config.min_workers)

    @property
    def waited(self) -> float | None:
        return None if self.pulls_beside is None else self.pulls_beside.waited

    def at_home(self, tree: Any) -> Any:
        if self.pulls_beside is None:
            return tree
        return self.pulls_beside.back(tree)

    @property
    def crew(self) -> Any:
        """The processes of the run, if some may be lost; otherwise None."""
        return None if self.pulls_beside is None else self.pulls_beside.crew

    @property
    def late(self) -> list[int]:
        if self.crew is None or self.method is None:
            return []
        # It is known when the message has landed, and so counts.
        return [max(0, pull.delay - 1) for pull in self.method.pulls]

    def begin(self, state: TrainState, step: int) -> tuple[TrainState, int]:
        if self.crew is None:
            return state, step
        steps = self.separate
        assert isinstance(steps, StepsBeside)
        if self.needs_gradient(step + 1):
            batch = self.batch(self.gradients(step))
            steps.compile_first(state, self.data, batch, step)
        return steps.meet(state, step)

    def settled(self, state: TrainState) -> TrainState:
        if self.crew is None:
            return state
        return with_own(state, self.pulls_beside.settled(state.opt_state[-1]))

    def known(self, opt_state: Any) -> Any:
        if self.crew is None:
            return opt_state
        *base, own = opt_state
        return *base, self.pulls_beside.known(own)

    def center_of_params(self, state: TrainState) -> Any:
        if self.crew is None:
            return super().center_of_params(state)
        state = self.settled(state)
        if lj.has_center(state.params, state.opt_state):
            return super().center_of_params(state)
        return self.workers.share(self.pulls_beside.consensus(state.params)).value

    def __str__(self) -> str:
        where = "" if self.pulls_beside is None else ", messages beside the steps"
        return f"{self.all_workers}{where}"

    def init(self) -> TrainState:
        start = self.task.first_variables()
        specs = inside.specs(self.workers.inside)
        params = self.workers.replicate(start.pop("params"), specs)
        return TrainState(
            params=params,
            stats=self.workers.replicate(start),
            opt_state=self.workers.map(self.task.tx.init)(params),
            key=self.keys(),
            step=self.workers.share(jnp.zeros([], jnp.int32)),
        )

    @functools.cached_property
    def step(self) -> Callable[..., tuple[TrainState, Array]]:
        """The step of all workers: (state, data, batch[, phase]) -> (state, loss [W])."""
        return self.workers.map(self.task.step, donate=0, static="phase")

    @functools.cached_property
    def skip(self) -> Callable[..., tuple[TrainState, Array]]:
        """The step of all workers without a gradient: (state[, phase]) -> (state, done).

        `done` [W] is ready when the step is complete.
        """
        return self.workers.map(self.task.skip, donate=0, static="phase")

    @property
    def method(self) -> lj.Exchange | None:
        """The pulls at the end of the optimizer, or None if there are none."""
        return self.task.method

    @functools.cached_property
    def skips(self) -> list[Any]:
        """The steps without a gradient, of each pull that has some."""
        pulls = () if self.method is None else self.method.pulls
        return [pull.skips for pull in pulls if pull.skips is not None]

    def needs_gradient(self, step: int) -> bool:
        """Whether a step, from 1, computes a gradient; otherwise `skip` takes it."""
        return not any(skips.at(step) for skips in self.skips)

    def gradients(self, steps: int) -> int:
        """The number of gradients in the first steps. Each of them takes the next batch."""
        skipped = np.zeros(steps, bool)
        for skips in self.skips:
            skipped |= np.asarray(skips.at(np.arange(1, steps + 1)))
        return steps - int(skipped.sum())

    @functools.cached_property
    def separate(self) -> SeparateSteps | None:
        """Steps whose exchanges are programs of their own, or None if steps are whole."""
        task = self.task
        args = self.workers, task.defer, task.arrive, self._phase, self._config.steps
        if self.pulls_beside is not None:
            return StepsBeside(*args, self.pulls_beside)
        is_separable = self.method is not None and self.method.is_separable
        if self._config.static_phases is not None or not is_separable:
            return None
        return SeparateSteps(*args)

    def phase(self, step: int) -> lj.Phase | None:
        """The phase of a step, from 1; None if one program serves all steps."""
        is_static = self._config.static_phases
        if is_static is None:
            # On CPUs whole steps for each phase cost more to compile than they save.
            on_cpu = self.workers.mesh.devices.flat[0].platform == "cpu"
            is_static = self.separate is not None or not on_cpu
        if not is_static or self.method is None:
            return None
        return self._phase(step)

    def _phase(self, step: int) -> lj.Phase:
        assert self.method is not None
        return self.method.phase(step, self.workers.sizes)

    def take(self, state: TrainState, batch: Any, step: int) -> tuple[TrainState, Array]:
        """Takes step `step`, from 1, with its batch, as training does.

        Returns:
          The new state, and the losses [W].
        """
        if self.separate is not None:
            return self.separate(state, self.data, batch, step)
        return self.step(state, self.data, batch, phase=self.phase(step))

    def advance(self, state: TrainState, step: int) -> tuple[TrainState, Array]:
        """Takes step `step`, from 0, as one program, to the result that training has.

        Returns:
          The new state, and the losses [W]; without a gradient, see `skip`.
        """
        if not self.needs_gradient(step + 1):
            return self.skip(state)
        return self.step(state, self.data, self.batch(self.gradients(step)))

    def bytes_sent(self, state: TrainState) -> int:
        diagnostics = self.at_home(lj.diagnostics(self.known(state.opt_state)))
        return sum(pull.bytes_sent for pull in self.workers.fetch(diagnostics))
