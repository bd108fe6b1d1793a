"""The actors of a run in Ray's processes: the workers and the coordinator.

Only this module and the others whose names begin with `ray_` import Ray.
"""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError

from lsgd_jax._src.asynchronous.coordinator import Coordinator, Report, Round, Status
from lsgd_jax._src.asynchronous.mailbox import Mailbox
from lsgd_jax._src.asynchronous.transport import (
    GridPosition,
    Transport,
    UnreachableError,
)
from lsgd_jax._src.asynchronous.worker import Method, Training, Worker, work


EVERY = 0.05  # seconds between two reports of a worker
LOST = "the run cannot go on, because its coordinator was lost: resume it"


class Job(NamedTuple):
    """The run, as all of its actors know it.

    Attributes:
      name: of the run, unique; its actors are named after it.
      begun: when the run began, in seconds since the epoch.
      Others: as for `ray_engine.run` and `ray_cluster.Options`.
    """

    name: str
    make_training: Callable[[int], Training]
    method: Method
    nodes: int
    locals: int
    steps: int
    restore: Callable[[int], Any]
    timeout: float
    start: float
    begun: float

    def worker(self, i: int) -> str:
        """Returns the name of worker i's actor."""
        return f"{self.name}-worker-{i}"

    @property
    def coordinator(self) -> str:
        """The name of the coordinator's actor."""
        return f"{self.name}-coordinator"


class RayTransport(Transport):
    """One worker's transport: calls to other actors."""

    def __init__(self, job: Job, i: int):
        self.position, self.timeout = GridPosition(i, job.nodes, job.locals), job.timeout
        self.mailbox = Mailbox(job.method.wire, i)
        self._job, self._actors = job, {}
        self._begun = time.monotonic() - (time.time() - job.begun)
        self._status: Status | None = None
        self._reported = 0.0

    def now(self) -> float:
        return time.monotonic() - self._begun

    async def step(self, compute: Callable[[], None]) -> None:
        # In a thread, so that messages travel while XLA computes.
        await asyncio.get_running_loop().run_in_executor(None, compute)

    async def ask_peer(self, peer: int, call: str, *arguments: Any) -> Any:
        ref = getattr(self._actor(self._job.worker(peer)), call).remote(*arguments)
        try:
            answer = await asyncio.wait_for(asyncio.wrap_future(ref.future()), self.timeout)
        except (RayError, TimeoutError) as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            if not isinstance(cause, RayError | TimeoutError):
                raise cause from None
            raise UnreachableError(
                f"worker {peer} did not answer within {self.timeout:g} s "
                f"({type(cause).__name__})"
            ) from None
        if answer is None and call != "state":
            raise UnreachableError(f"worker {peer} had nothing within {self.timeout:g} s")
        return answer

    async def ask_coordinator(self, call: str, *arguments: Any) -> Any:
        """Calls the coordinator; the driver ends the run if that is lost or hangs."""
        if call == "report":
            if self._status is not None and time.monotonic() - self._reported < EVERY:
                return self._status
            self._reported = time.monotonic()
        actor = self._actor(self._job.coordinator)
        ref = getattr(actor, call).remote(self.position.index, *arguments)
        try:
            answer = await asyncio.wrap_future(ref.future())
        except RayError as error:
            raise ConnectionError(f"{LOST} ({type(error).__name__})") from None
        if call == "report":
            self._status = answer
        return answer

    def _actor(self, name: str) -> Any:
        if name not in self._actors:
            self._actors[name] = ray.get_actor(name)
        return self._actors[name]


class Stopped(Exception):
    """Ends the run at the boundary of this step."""


class WorkerActor:
    """One worker. `run` trains; peers and the driver call the other methods meanwhile.

    No method is a coroutine: Ray would run all of them on one event loop, and a request
    would wait for the step that is being computed.
    """

    def __init__(self, job: Job, i: int):
        self.job, self.index, self.transport = job, i, RayTransport(job, i)
        self.worker: Worker | None = None
        self.starts = 0  # of this worker; 0 until the coordinator has answered
        self.stopped = threading.Event()

    @ray.method(max_task_retries=-1)
    def run(self, state: Any = None) -> Any:
        """Trains to the end; returns the state at the end.

        Ray calls it again, in a new process, if the process is lost.
        """
        return asyncio.run(_train(self, state))

    @ray.method(concurrency_group="serve", max_task_retries=0)
    def latest(self) -> Any:
        mailbox = self.transport.mailbox
        return mailbox.wait(mailbox.latest, self.job.timeout)

    @ray.method(concurrency_group="serve", max_task_retries=0)
    def exchange(self, vector: Any) -> Any:
        return self.transport.mailbox.exchange(vector)

    @ray.method(concurrency_group="serve", max_task_retries=0)
    def fetch(self, key: Hashable, part: slice = slice(None)) -> Any:
        return self._found(lambda: self.transport.mailbox.fetch(key, part))

    @ray.method(concurrency_group="serve", max_task_retries=0)
    def contribution(self, number: int) -> Any:
        return self._found(lambda: self.transport.mailbox.contribution(number))

    def _found(self, ask: Callable[[], Any]) -> Any:
        """Returns the answer once it is there.

        Returns None at once if this process is a restarted one that does not take part yet:
        the request was addressed to the worker's previous incarnation.
        """
        if self.starts != 1 and (self.worker is None or not self.worker.has_begun):
            return None
        return self.transport.mailbox.wait(ask, self.job.timeout)

    @ray.method(concurrency_group="serve", max_task_retries=0)
    def state(self, own: bool = False) -> Any:
        """See `Worker.state`."""
        return None if self.worker is None else self.worker.state(own)

    @ray.method(concurrency_group="serve", max_task_retries=0)
    def stop(self) -> None:
        self.stopped.set()

    @ray.method(concurrency_group="watch", max_task_retries=0)
    def watch(self) -> None:
        """Never returns: fails as soon as the process is lost."""
        threading.Event().wait()


async def _train(actor: WorkerActor, state: Any) -> Any:
    """Trains a worker to the end; returns its state at the end."""
    job, transport, i = actor.job, actor.transport, actor.index
    where = (ray.get_runtime_context().get_node_id(), os.getpid())
    actor.starts, all_lost = await transport.ask_coordinator("hello", where)
    if all_lost and (state := job.restore(i)) is None:
        raise RuntimeError("all workers were lost, and there is nothing to restore")
    training, restore = job.make_training(i), lambda: job.restore(i)
    worker = Worker(training, job.method, transport, job.steps, restore)
    if state is not None:
        worker.take_over(state)
    actor.worker = worker
    # Compiles the step while no other worker waits for it.
    given = worker.params, worker.opt_state, worker.own, np.int32(worker.count + 1)
    jax.block_until_ready(training.step(*given)[-1])

    def observe(worker: Worker) -> None:
        if actor.stopped.is_set():
            raise Stopped

    try:
        await work(worker, observe)
    except Stopped:
        pass
    await worker.finish()
    return worker.state(own=True)


class Overview(NamedTuple):
    """The coordinator's answer to the driver.

    Attributes:
      status: of all workers.
      starts: number of times that each worker was started.
      vain: the same since it last took a step that was new to it.
      processes: the node and the process of each worker.
    """

    status: Status
    starts: list[int]
    vain: list[int]
    processes: dict[int, tuple[str, int]]


class CoordinatorActor(Coordinator):
    """The coordinator, which also watches the workers' processes.

    As some methods are coroutines, Ray runs all of them on one event loop.
    """

    def __init__(self, job: Job):
        self._job, workers = job, job.nodes * job.locals
        self._starts, self._vain, self._best = ([0] * workers for _ in range(3))
        self._pids: dict[int, tuple[str, int]] = {}
        self._going: set[int] = set()  # workers that have begun and whose process is alive
        self._watched: dict[int, asyncio.Task] = {}
        self._lost_all = False
        self._begin()

    def _begin(self) -> None:
        job = self._job
        workers = job.nodes * job.locals
        super().__init__(workers, job.steps, job.method.period, job.timeout, job.start)

    async def hello(self, i: int, where: tuple[str, int]) -> tuple[int, bool]:
        """Notes that worker i was started.

        Returns:
          The number of times that it was started, and whether all workers that had begun
          were lost. The run then begins again, from states that can be restored.
        """
        if self._starts[i]:  # its loss may not have been noticed before
            self.leave(i)
        self._going.discard(i)
        if self.begun and not self._going:
            self._begin()
            self._lost_all = True
        self._starts[i] += 1
        self._vain[i] += 1
        self._pids[i] = where
        self._watched[i] = asyncio.create_task(self._watch(i, self._starts[i]))
        return self._starts[i], self._lost_all and not self.begun

    async def _watch(self, i: int, starts: int) -> None:
        """Marks worker i absent as soon as the process of this start is lost."""
        try:
            await ray.get_actor(self._job.worker(i)).watch.remote()
        except (RayError, ValueError):
            if starts == self._starts[i]:
                self._going.discard(i)
                self.leave(i)

    def _close(self, key: Hashable, held: Round) -> None:
        super()._close(key, held)
        if key == "begin":
            self._going.update(i for i in held.values if self.members[i].present)

    def report(self, i: int, report: Report) -> Status:
        if report.steps > self._best[i]:  # steps that are taken again are no progress
            self._best[i], self._vain[i] = report.steps, 0
        if report.steps:
            self._going.add(i)
        return super().report(i, report)

    async def overview(self) -> Overview:
        """Returns the progress of the run, for the driver."""
        lists = list(self._starts), list(self._vain)
        return Overview(self.status(), *lists, dict(self._pids))
