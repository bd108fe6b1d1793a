"""Workers at their own pace on Ray: processes on this machine, or on a cluster.

This module, `ray_actors` and `ray_ports` are the only ones that import Ray.
"""

import dataclasses
import logging
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import ray
from ray.exceptions import RayError, RayTaskError

from lsgd_jax.asynchronous.coordinator import Standing
from lsgd_jax.asynchronous.errors import Unreachable
from lsgd_jax.asynchronous.mailbox import Snapshot
from lsgd_jax.asynchronous.ray_actors import CoordinatorActor, Overview, WorkerActor
from lsgd_jax.asynchronous.ray_ports import RETURN, Job, answer
from lsgd_jax.asynchronous.worker import Method, Training


EVERY = 1.0  # seconds between two looks at how all workers are doing


@dataclasses.dataclass(frozen=True)
class Options:
    """Where the workers run, and for how long one waits for another.

    Attributes:
      address: of the cluster to join, such as "auto" or "10.0.0.1:6379"; None: Ray is
        started on this machine and ended with the run, unless it is running in this
        process already.
      namespace: of the actors' names.
      num_cpus: per worker, as Ray counts them: for placement only.
      num_gpus: per worker; a fraction: several share one. Without, workers use the CPU.
      object_store: bytes for what travels; None: Ray's choice. Of a Ray that is started.
      grace: seconds that a worker waits for another one.
      start: seconds within which all workers must have been placed and started.
      vain: how many times in a row a worker may be lost before it has taken a step.
      wire: type of the parameters that travel.
      env: environment variables of the workers, such as XLA_FLAGS.
    """

    address: str | None = None
    namespace: str | None = None
    num_cpus: float = 1
    num_gpus: float = 0
    object_store: int | None = None
    grace: float = 10.0
    start: float = 300.0
    vain: int = 3
    wire: Literal["float32", "bfloat16"] = "float32"
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Outcome(NamedTuple):
    """What a run ends with.

    Attributes:
      states: of each worker what it ends with: a dictionary with params, opt_state, own,
        count and method, its arrays NumPy's; `run` takes them to go on from there.
      standing: how all were doing at the end.
      restarts: of each worker how many times it was started again.
      stopped: whether the run was ended before its time.
    """

    states: list[Any]
    standing: Standing
    restarts: list[int]
    stopped: bool


class Remote:
    """The workers, as `on_standing` sees them while they train.

    Attributes:
      restarts: of each worker how many times it was started again.
      ended: what each worker has ended with, of those that have; they are not present.
      stopped: whether the run is being stopped.
    """

    def __init__(self, workers: Sequence[Any], grace: float):
        self._workers, self._grace = workers, grace
        self.restarts, self.stopped = [0] * len(workers), False
        self.ended: dict[int, Any] = {}

    def latest(self, i: int) -> Snapshot | None:
        """Worker i's parameters as one vector; None if it does not answer."""
        return self._answers([i], "latest")[0]

    def states(self, own: bool = True) -> list[Any]:
        """What each worker can be resumed from, at the last step it has taken.

        None: it does not answer, or has not begun.
        """
        return self._answers(range(len(self._workers)), "state", own)

    def stop(self) -> None:
        """Ends the run: each worker stops when it has taken the step that it is in."""
        self.stopped = True
        self._answers(range(len(self._workers)), "stop")

    def _answers(self, workers: Sequence[int], method: str, *args: Any) -> list[Any]:
        calls = [(i, getattr(self._workers[i], method).remote(*args)) for i in workers]
        until = time.monotonic() + self._grace
        return [self._answer(ref, i, until - time.monotonic()) for i, ref in calls]

    def _answer(self, ref: Any, i: int, limit: float) -> Any:
        try:
            return answer(ref, f"worker {i}", max(limit, 0.1))
        except Unreachable:
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
    on_standing: Callable[[Standing, Remote], Any] = lambda standing, remote: None,
) -> Outcome:
    """Trains with nodes x locals workers, each an actor of Ray.

    A worker that is lost is started again, and goes on from the state of a peer. SIGINT and
    SIGTERM, unless this process handles them itself, stop the run as `Remote.stop` does.

    Args:
      make_training: index -> what this worker trains. Called in the worker's process, for
        which it is pickled; devices are used only there.
      method: when a worker speaks to others, such as `Pulls`.
      nodes, locals: the grid of workers.
      steps: mean steps per worker.
      options: where, and with which limits.
      states: `Outcome.states` or `Remote.states()` of a run that is resumed; one that is
        None begins as in `make_training`.
      restore: index -> one of those states, or None. Called in a worker's process if it
        was started again and no peer has a state for it.
      on_standing: (standing, remote); called here about every second, and at the end, when
        all workers are still there to be asked.

    Raises:
      RuntimeError: a worker's code has raised an error, a worker is lost again and again
        before it gets to a step, or not all could be started; with the reason.

    For example ``run(make_training, Pulls(lsgd(), budget=True), nodes=1, locals=4,
    steps=1000)`` where ``make_training(i)`` gives a `Training`.
    """
    options = Options() if options is None else options
    before = _handlers()
    with _cluster(options, nodes * locals), _signals(before) as signaled:
        known = [state for state in states or () if state is not None]
        job = Job(
            name=f"lsgd-{uuid.uuid4().hex[:8]}",
            make_training=make_training,
            method=method,
            nodes=nodes,
            locals=locals,
            steps=steps,
            restore=restore,
            grace=options.grace,
            wire=options.wire,
            begun=time.time(),
            number=max((int(state["number"]) for state in known), default=0),
        )
        actors = _Actors(job, options)
        try:
            return actors.train(states, on_standing, signaled)
        finally:
            actors.kill()


class _Actors:
    """The actors of one run, as the driver sees them."""

    def __init__(self, job: Job, options: Options):
        self._job, self._options = job, options
        count = job.nodes * job.locals
        env = {**_environment(options.num_gpus), **options.env}
        groups = {"serve": min(4 * count + 4, 64), "watch": 3}
        remote: Any = ray.remote  # its types do not know groups
        worker = remote(concurrency_groups=groups)(WorkerActor)
        placed = {
            "num_cpus": options.num_cpus,
            "num_gpus": options.num_gpus,
            "max_restarts": -1,
            "runtime_env": {"env_vars": env},
        }
        coordinator = remote(CoordinatorActor).options(
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=1000,
            name=job.coordinator,
            runtime_env={"env_vars": _environment(0)},
        )
        self.workers = [
            worker.options(name=job.worker(i), **placed).remote(job, i)
            for i in range(count)
        ]
        self.coordinator = coordinator.remote(job)
        self.remote = Remote(self.workers, options.grace)

    def kill(self) -> None:
        for actor in (*self.workers, self.coordinator):
            ray.kill(actor)

    def train(
        self,
        states: Sequence[Any] | None,
        on_standing: Callable[[Standing, Remote], Any],
        signaled: threading.Event,
    ) -> Outcome:
        given = states or [None] * len(self.workers)
        refs = {w.run.remote(s): i for i, (w, s) in enumerate(zip(self.workers, given))}
        begun = told = time.monotonic()
        while len(self.remote.ended) < len(refs):
            left = [ref for ref, i in refs.items() if i not in self.remote.ended]
            for ref in ray.wait(left, timeout=EVERY)[0]:
                self.remote.ended[refs[ref]] = self._result(ref, refs[ref])
            overview = self._overview()
            self._check(overview, time.monotonic() - begun)
            if signaled.is_set() and not self.remote.stopped:
                self.remote.stop()
            if time.monotonic() - told >= EVERY:
                told = time.monotonic()
                on_standing(overview.standing, self.remote)
        overview = self._overview()
        on_standing(overview.standing, self.remote)
        ends = [self.remote.ended[i] for i in range(len(self.workers))]
        return Outcome(ends, overview.standing, self.remote.restarts, self.remote.stopped)

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
        limit = self._options.start + RETURN
        overview = answer(self.coordinator.overview.remote(), "the coordinator", limit)
        self.remote.restarts = [max(n - 1, 0) for n in overview.starts]
        return overview

    def _check(self, overview: Overview, seconds: float) -> None:
        for i, times in enumerate(overview.vain):
            if times > self._options.vain:
                raise RuntimeError(
                    f"worker {i} was lost {times - 1} times in a row before it had taken a "
                    "step: its process ends without an error, for want of memory perhaps; "
                    "its last output is in Ray's log"
                )
        missing = [i for i, n in enumerate(overview.starts) if n == 0]
        if missing and seconds > self._options.start:
            raise RuntimeError(
                f"workers {missing} were not started within {self._options.start:g} s; "
                f"each needs {self._options.num_cpus:g} CPUs and "
                f"{self._options.num_gpus:g} GPUs of {ray.cluster_resources()}"
            )


def _environment(num_gpus: float) -> dict[str, str]:
    if num_gpus == 0:
        return {"JAX_PLATFORMS": "cpu"}
    return {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if num_gpus % 1 else {}


# The process around


@contextmanager
def _cluster(options: Options, workers: int) -> Iterator[None]:
    """Ray, as it runs in this process, joined, or started for this run."""
    if ray.is_initialized():
        yield
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    own: dict[str, Any] = {
        "num_cpus": max(os.cpu_count() or 1, round(workers * options.num_cpus + 0.5)),
        "include_dashboard": False,
        "object_store_memory": options.object_store,
        "_node_ip_address": "127.0.0.1",
    }
    ray.init(
        address=options.address or "local",
        namespace=options.namespace,
        logging_level=logging.ERROR,
        **({} if options.address else own),
    )
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _signals(before: Mapping[int, Any]) -> Iterator[threading.Event]:
    """Set by SIGINT and SIGTERM where nothing but Python or Ray handles them.

    before: the handlers as they were before Ray was started, which sets its own.
    """
    signaled = threading.Event()

    def note(number: int, frame: Any) -> None:
        if signaled.is_set():
            raise KeyboardInterrupt
        signaled.set()

    for number, handler in before.items():
        module = getattr(handler, "__module__", None) or ""
        ours = handler in (signal.SIG_DFL, signal.default_int_handler)
        signal.signal(number, note if ours or module.startswith("ray.") else handler)
    try:
        yield signaled
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _handlers() -> dict[int, Any]:
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
