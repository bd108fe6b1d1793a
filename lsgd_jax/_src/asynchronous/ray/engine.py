"""Asynchronous workers on Ray: processes on this machine, or on a cluster."""

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from lsgd_jax._src.asynchronous.engine.contents import (
    Snapshot,
    buffered,
    unbuffered,
    unpack,
)
from lsgd_jax._src.asynchronous.engine.coordinator import Coordinator, Status
from lsgd_jax._src.asynchronous.engine.worker import Method, Training
from lsgd_jax._src.asynchronous.ray.actors import (
    LOST,
    THREADS,
    RunSpec,
    WorkerActor,
    coordinator_name,
    worker_name,
)
from lsgd_jax._src.asynchronous.ray.cluster import (
    EVERY,
    ClusterOptions,
    Health,
    beside,
    cluster,
    environment,
    handlers,
    in_one_line,
    signals,
)


ANSWER = 60.0  # seconds within which the coordinator must answer


class Outcome(NamedTuple):
    """The outcome of a run.

    Attributes:
      states: the state of each worker at the end: a dictionary with params, opt_state, own,
        count, number and method, its arrays NumPy's; `run` takes them to go on from there.
        None for a worker that had to be killed, because it did not stop when the run was
        stopped.
      status: of all workers at the end.
      restarts: number of times that each worker was restarted.
      stopped: whether the run was ended before its time.
    """

    states: list[Any]
    status: Status
    restarts: list[int]
    stopped: bool


class Remote:
    """The workers, as `on_status` sees them while they train.

    Attributes:
      restarts: number of times that each worker was restarted.
      ended: the states of workers that have ended, which are not present any more.
      stopped: whether the run is being stopped.
      processes: the node and the process of each worker that has started.
    """

    def __init__(self, workers: Sequence[Any], timeout: float, health: Health):
        self._workers = workers
        self._timeout = timeout
        self._health = health
        self.restarts = [0] * len(workers)
        self.stopped = False
        self.ended: dict[int, Any] = {}
        self.processes: dict[int, tuple[str, int]] = {}

    def latest(self, i: int) -> Snapshot | None:
        """Returns worker i's parameters; None if it does not answer."""
        call = self._workers[i].serve.remote("latest", buffered(()))
        (answer,) = self._answers([call])
        return None if answer is None else unpack(unbuffered(answer))

    def states(self, own: bool = True) -> list[Any]:
        """Returns the state of each worker after its last step, to be resumed from.

        None for a worker that does not answer, or has not begun. Workers that have ended
        are not asked, because their states are here already.
        """
        asked = [i for i in range(len(self._workers)) if i not in self.ended]
        answers = self._answers(self._workers[i].state.remote(own) for i in asked)
        states = self.ended | dict(zip(asked, answers))
        return [states[i] for i in range(len(self._workers))]

    def stop(self) -> None:
        """Ends the run: each worker stops after the step that it is in."""
        self.stopped = True
        for i, worker in enumerate(self._workers):
            if i not in self.ended:
                worker.stop.remote()

    def _answers(self, calls: Iterable[Any]) -> list[Any]:
        refs = list(calls)
        ready = self._health.wait(refs, self._timeout)
        return [_answer(ref) if ref in ready else None for ref in refs]


def _answer(ref: Any) -> Any:
    """Returns the answer to a call; None if the actor has failed."""
    try:
        return ray.get(ref)
    except RayTaskError:
        raise
    except RayError:
        return None


def run(
    make_training: Callable[[int], Training],
    method: Method,
    nodes: int,
    locals: int,
    steps: int,
    *,
    options: ClusterOptions | None = None,
    states: Sequence[Any] | None = None,
    restore: Callable[[int], Any] = lambda i: None,
    on_status: Callable[[Status, Remote], Any] = lambda status, remote: None,
) -> Outcome:
    """Trains with nodes x locals workers, each an actor of Ray.

    A worker that is lost is started again, and goes on from the state of a peer. The
    coordinator is a process beside this one; if it is lost, the run ends. SIGINT and
    SIGTERM, unless this process handles them itself, stop the run as `Remote.stop` does.

    Args:
      make_training: index -> the training of a worker. Called in the worker's process, for
        which it is pickled; devices are used only there.
      method: decides when a worker communicates, such as `Pulls`.
      nodes, locals: the grid of workers.
      steps: mean steps per worker.
      options: where the workers run, and with which limits.
      states: `Outcome.states` or `Remote.states()` of a run that is resumed; a worker whose
        state is None begins as in `make_training`.
      restore: index -> one of those states, or None. Called in a worker's process if it
        was started again and no peer has a state for it.
      on_status: (status, remote); called here about every second, and at the end, when
        all workers are still there to be asked.

    Raises:
      RuntimeError: a worker's code has raised an error, a worker is lost again and again
        before it gets to a step, not all could be started, or the coordinator or Ray itself
        is lost; with the reason.

    For example ``run(make_training, Pulls(lsgd(), budget=True), nodes=1, locals=4,
    steps=1000)`` where ``make_training(i)`` gives a `Training`.
    """
    options = ClusterOptions() if options is None else options
    before = handlers()
    with cluster(options, nodes * locals) as health, signals(before) as signaled:
        spec = RunSpec(
            name="",
            make_training=make_training,
            method=method,
            nodes=nodes,
            locals=locals,
            steps=steps,
            restore=restore,
            timeout=options.timeout,
            begun=time.time(),
        )
        actors = _Actors(spec, options, states or [None] * (nodes * locals), health)
        try:
            return actors.train(on_status, signaled)
        finally:
            if not health.is_lost:
                actors.kill()


class _Actors:
    """The actors of one run: starts them, follows them, and restarts lost workers.

    Args:
      spec: the run, which is named anew whenever all actors are started.
      options: where the workers run, and with which limits.
      states: the state that each worker begins from, or None.
      health: of Ray.
    """

    def __init__(
        self, spec: RunSpec, options: ClusterOptions, states: Sequence[Any], health: Health
    ):
        self._spec = spec
        self._options = options
        self._states = states
        self._health = health
        self._everyone = range(len(states))
        self.workers: list[Any] = [None] * len(states)
        self.remote = Remote(self.workers, options.timeout, health)
        self._best = [0] * len(states)  # the most steps that each worker has taken
        self._losses = [0] * len(states)  # of each worker since its last new step
        self._marks: dict[int, Any] = {}
        self._moved: dict[int, float] = {}
        self._begin(all_lost=False)

    def _begin(self, all_lost: bool) -> None:
        """Starts the coordinator, beside this process, and all workers."""
        options = self._options
        name = f"lsgd-{uuid.uuid4().hex[:8]}"
        spec = self._spec = self._spec._replace(name=name)
        self._until = time.monotonic() + options.start
        self._all_lost = all_lost
        self._runs: dict[Any, int] = {}  # the worker of each call of `run`
        self._places: dict[Any, int] = {}  # the worker of each call of `where`
        self._restarted: set[int] = set()
        count = len(self._everyone)
        coordinator = beside(
            Coordinator, name=coordinator_name(spec.name), max_concurrency=1000 + 4 * count
        )
        self.coordinator = coordinator.remote(
            count, spec.steps, spec.method.period, spec.timeout, options.start
        )
        for i in self._everyone:
            self._start(i)

    def _start(self, i: int) -> None:
        options = self._options
        remote: Any = ray.remote  # its types do not know groups
        groups = {"serve": min(4 * len(self._everyone) + 4, THREADS)}
        env = {**environment(options.num_gpus), **options.env}
        actor = remote(concurrency_groups=groups)(WorkerActor)
        worker = self.workers[i] = actor.options(
            num_cpus=options.num_cpus,
            num_gpus=options.num_gpus,
            name=worker_name(self._spec.name, i),
            runtime_env={"env_vars": env},
        ).remote(self._spec, i, i in self._restarted)
        self._places[worker.where.remote()] = i
        self._runs[worker.run.remote(self._states[i], self._all_lost)] = i

    def kill(self) -> None:
        for actor in (*self.workers, self.coordinator):
            ray.kill(actor)

    def train(
        self, on_status: Callable[[Status, Remote], Any], signaled: threading.Event
    ) -> Outcome:
        ended = self.remote.ended
        told = time.monotonic()
        stopped = None
        while len(ended) < len(self._everyone):
            done, _ = ray.wait(list(self._runs), timeout=EVERY)
            status = self._status()  # first: without the coordinator, workers fail
            lost = {}
            for ref in done:
                i = self._runs.pop(ref)
                try:
                    ended[i] = self._result(ref, i)
                except RayActorError as error:
                    lost[i] = error
            if lost:
                self._restart(lost, status)
            self._check_places()
            self._kill_hung_workers(status)
            if signaled.is_set() and not self.remote.stopped:
                self.remote.stop()
            if self.remote.stopped:
                stopped = stopped or time.monotonic()
                if time.monotonic() - stopped > 2 * self._options.timeout:
                    self._give_up()
            if time.monotonic() - told >= EVERY:
                told = time.monotonic()
                on_status(status, self.remote)
        status = self._status()
        on_status(status, self.remote)
        ends = [ended[i] for i in self._everyone]
        return Outcome(ends, status, self.remote.restarts, self.remote.stopped)

    def _give_up(self) -> None:
        """Kills workers that hang and so do not stop: the run ends without their states."""
        for i in self._everyone:
            if i not in self.remote.ended:
                self.remote.ended[i] = None
                ray.kill(self.workers[i])

    def _result(self, ref: Any, i: int) -> Any:
        try:
            return ray.get(ref)
        except RayTaskError as error:
            cause = error.cause
            kind = type(cause).__name__
            raise RuntimeError(f"worker {i} has raised {kind}: {cause}") from error
        except RayActorError:
            raise
        except RayError as error:
            raise RuntimeError(f"worker {i} cannot be run: {error}") from error

    def _restart(self, lost: dict[int, RayActorError], status: Status) -> None:
        """Starts lost workers again; all of them if no other one can go on."""
        for i in lost:
            ray.kill(self.workers[i])  # frees its name
        if self.remote.stopped:
            self.remote.ended.update(dict.fromkeys(lost))
            return
        for i, error in lost.items():
            self.remote.restarts[i] += 1
            self._losses[i] += 1
            if self._losses[i] >= self._options.vain:
                raise RuntimeError(
                    f"worker {i} was lost {self._losses[i]} times in a row before it had "
                    "taken a step: its process hangs or ends without an error, perhaps out "
                    "of memory; see its last output in Ray's log"
                ) from error
        # A restarted worker can go on once it has taken over and taken a step.
        left = self._runs.values()
        going = [i for i in left if i not in self._restarted or status.reports[i].steps]
        if not going and not self.remote.ended:
            self.kill()
            self._begin(all_lost=any(self._best))
            return
        self._restarted.update(lost)
        for i in lost:
            self.coordinator.lost.remote(i)
            self._start(i)

    def _status(self) -> Status:
        """Asks the coordinator; notes the progress of all workers."""
        limit = ANSWER + max(self._until - time.monotonic(), 0)
        try:
            asked = self.coordinator.status.remote()
            self._health.wait([asked], limit)
            status: Status = ray.get(asked, timeout=0)
        except RayError as error:
            reason = f"{type(error).__name__}: {in_one_line(error)}"
            raise RuntimeError(f"{LOST} ({reason})") from error
        for i, report in status.reports.items():
            if report.steps > self._best[i]:  # steps that are taken again are no progress
                self._best[i] = report.steps
                self._losses[i] = 0
        return status

    def _check_places(self) -> None:
        """Notes the processes of workers that have started."""
        refs = list(self._places)
        ready = ray.wait(refs, num_returns=len(refs), timeout=0)[0] if refs else []
        for ref in ready:
            i = self._places.pop(ref)
            place = _answer(ref)
            if place is not None:
                self.remote.processes[i] = place
        missing = [i for i in self._everyone if i not in self.remote.processes]
        if missing and time.monotonic() > self._until:
            raise RuntimeError(
                f"workers {missing} were not started within {self._options.start:g} s; "
                f"each needs {self._options.num_cpus:g} CPUs and "
                f"{self._options.num_gpus:g} GPUs of {ray.cluster_resources()}"
            )

    def _kill_hung_workers(self, status: Status) -> None:
        """Kills workers that have taken no step for too long; they are lost then."""
        now = time.monotonic()
        for i in set(self.remote.processes).difference(self.remote.ended):
            mark = self.remote.restarts[i], status.reports[i].steps
            if mark != self._marks.get(i):
                self._marks[i] = mark
                self._moved[i] = now
            elif now - self._moved[i] > self._options.stall:
                self._moved[i] = now
                ray.kill(self.workers[i])
