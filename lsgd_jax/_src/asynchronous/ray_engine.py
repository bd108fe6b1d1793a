"""Asynchronous workers on Ray: processes on this machine, or on a cluster."""

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from lsgd_jax._src.asynchronous.coordinator import Status
from lsgd_jax._src.asynchronous.ray_actors import (
    LOST,
    CoordinatorActor,
    Job,
    Overview,
    WorkerActor,
)
from lsgd_jax._src.asynchronous.ray_cluster import (
    Options,
    cluster,
    environment,
    handlers,
    signals,
)
from lsgd_jax._src.asynchronous.vectors import Snapshot, unpack
from lsgd_jax._src.asynchronous.worker import Method, Training


EVERY = 1.0  # seconds between two questions to the coordinator
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

    def __init__(self, workers: Sequence[Any], timeout: float):
        self._workers, self._timeout = workers, timeout
        self.restarts, self.stopped = [0] * len(workers), False
        self.ended: dict[int, Any] = {}
        self.processes: dict[int, tuple[str, int]] = {}

    def latest(self, i: int) -> Snapshot | None:
        """Returns worker i's parameters as one vector; None if it does not answer."""
        return unpack(self._answers([self._workers[i].latest.remote()])[0])

    def states(self, own: bool = True) -> list[Any]:
        """Returns the state of each worker after its last step, to be resumed from.

        None for a worker that does not answer, or has not begun.
        """
        return self._answers(worker.state.remote(own) for worker in self._workers)

    def stop(self) -> None:
        """Ends the run: each worker stops after the step that it is in."""
        self.stopped = True
        for i, worker in enumerate(self._workers):
            if i not in self.ended:
                worker.stop.remote()

    def _answers(self, calls: Iterable[Any]) -> list[Any]:
        refs = list(calls)
        ready, _ = ray.wait(refs, num_returns=len(refs), timeout=self._timeout)
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
    options: Options | None = None,
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
        before it gets to a step, not all could be started, or the coordinator is lost; with
        the reason.

    For example ``run(make_training, Pulls(lsgd(), budget=True), nodes=1, locals=4,
    steps=1000)`` where ``make_training(i)`` gives a `Training`.
    """
    options = Options() if options is None else options
    before = handlers()
    with cluster(options, nodes * locals), signals(before) as signaled:
        job = Job(
            name=f"lsgd-{uuid.uuid4().hex[:8]}",
            make_training=make_training,
            method=method,
            nodes=nodes,
            locals=locals,
            steps=steps,
            restore=restore,
            timeout=options.timeout,
            start=options.start,
            begun=time.time(),
        )
        actors = _Actors(job, options)
        try:
            return actors.train(states, on_status, signaled)
        finally:
            actors.kill()


class _Actors:
    """The actors of one run, as the driver sees them."""

    def __init__(self, job: Job, options: Options):
        self._options, count = options, job.nodes * job.locals
        env = {**environment(options.num_gpus), **options.env}
        groups = {"serve": min(4 * count + 4, 64), "watch": 1}
        remote: Any = ray.remote  # its types do not know groups
        worker = remote(concurrency_groups=groups)(WorkerActor)
        placed = {
            "num_cpus": options.num_cpus,
            "num_gpus": options.num_gpus,
            "max_restarts": -1,
            "runtime_env": {"env_vars": env},
        }
        here = ray.get_runtime_context().get_node_id()
        self.coordinator = (
            remote(CoordinatorActor)
            .options(
                num_cpus=0,
                max_concurrency=1000,
                name=job.coordinator,
                runtime_env={"env_vars": environment(0)},
                scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=True),
            )
            .remote(job)
        )
        self.workers = [
            worker.options(name=job.worker(i), **placed).remote(job, i)
            for i in range(count)
        ]
        self.remote = Remote(self.workers, options.timeout)
        self._until = time.monotonic() + options.start
        self._marks: dict[int, Any] = {}
        self._moved: dict[int, float] = {}

    def kill(self) -> None:
        for actor in (*self.workers, self.coordinator):
            ray.kill(actor)

    def train(
        self,
        states: Sequence[Any] | None,
        on_status: Callable[[Status, Remote], Any],
        signaled: threading.Event,
    ) -> Outcome:
        given, ended = states or [None] * len(self.workers), self.remote.ended
        refs = {w.run.remote(s): i for i, (w, s) in enumerate(zip(self.workers, given))}
        told, stopped = time.monotonic(), None
        while len(ended) < len(refs):
            left = [ref for ref, i in refs.items() if i not in ended]
            done, _ = ray.wait(left, timeout=EVERY)
            overview = self._overview()  # first: without the coordinator, workers fail
            for ref in done:
                ended[refs[ref]] = self._result(ref, refs[ref])
            self._check(overview)
            self._restart_hung_workers(overview)
            if signaled.is_set() or self.remote.stopped:
                self.remote.stop()  # again, since a restarted worker has not heard it
                stopped = stopped or time.monotonic()
                if time.monotonic() - stopped > 2 * self._options.timeout:
                    self._give_up()
            if time.monotonic() - told >= EVERY:
                told = time.monotonic()
                on_status(overview.status, self.remote)
        status = self._overview().status
        on_status(status, self.remote)
        ends = [ended[i] for i in range(len(self.workers))]
        return Outcome(ends, status, self.remote.restarts, self.remote.stopped)

    def _give_up(self) -> None:
        """Kills workers that hang and so do not stop: the run ends without their states."""
        for i, worker in enumerate(self.workers):
            if i not in self.remote.ended:
                self.remote.ended[i] = None
                ray.kill(worker)

    def _result(self, ref: Any, i: int) -> Any:
        try:
            return ray.get(ref)
        except RayTaskError as error:
            cause = error.cause
            kind = type(cause).__name__
            raise RuntimeError(f"worker {i} has raised {kind}: {cause}") from error
        except RayError as error:
            raise RuntimeError(f"worker {i} cannot be run: {error}") from error

    def _overview(self) -> Overview:
        limit = ANSWER + max(self._until - time.monotonic(), 0)
        try:
            overview = ray.get(self.coordinator.overview.remote(), timeout=limit)
        except RayTaskError:
            raise
        except RayError as error:
            raise RuntimeError(f"{LOST} ({type(error).__name__})") from error
        self.remote.restarts = [max(n - 1, 0) for n in overview.starts]
        self.remote.processes = overview.processes
        return overview

    def _check(self, overview: Overview) -> None:
        for i, times in enumerate(overview.vain):
            if times > self._options.vain:
                raise RuntimeError(
                    f"worker {i} was lost {times - 1} times in a row before it had taken a "
                    "step: its process hangs or ends without an error, perhaps out of "
                    "memory; see its last output in Ray's log"
                )
        missing = [i for i, n in enumerate(overview.starts) if n == 0]
        if missing and time.monotonic() > self._until:
            raise RuntimeError(
                f"workers {missing} were not started within {self._options.start:g} s; "
                f"each needs {self._options.num_cpus:g} CPUs and "
                f"{self._options.num_gpus:g} GPUs of {ray.cluster_resources()}"
            )

    def _restart_hung_workers(self, overview: Overview) -> None:
        now = time.monotonic()
        for i, starts in enumerate(overview.starts):
            mark = starts, overview.status.reports[i].steps
            if not starts or i in self.remote.ended or mark != self._marks.get(i):
                self._marks[i], self._moved[i] = mark, now
            elif now - self._moved[i] > self._options.stall:
                self._moved[i] = now
                ray.kill(self.workers[i], no_restart=False)
