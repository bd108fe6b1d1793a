"""The actors of a run in Ray's processes: the workers and the coordinator."""

import asyncio
import os
import threading
import warnings
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import numpy as np
import ray
from ray.exceptions import RayError

from lsgd_jax._src.asynchronous.coordinator import Claim, Coordinator, Report, Status
from lsgd_jax._src.asynchronous.ray_transport import Job, Known, RayTransport
from lsgd_jax._src.asynchronous.worker import Worker, work


class Overview(NamedTuple):
    """The coordinator's answer to the driver.

    Attributes:
      status: of all workers.
      starts: how many times each worker was started.
      vain: how many times each was started since it last took a step that was new to it,
        or came to a round.
      processes: the node and the process of each worker.
    """

    status: Status
    starts: list[int]
    vain: list[int]
    processes: dict[int, tuple[str, int]]


class Stopped(Exception):
    """Ends the run at the boundary of this step."""


class WorkerActor:
    """One worker. `run` trains; peers and the driver call the rest meanwhile."""

    def __init__(self, job: Job, i: int):
        self.job, self.index, self.transport = job, i, RayTransport(job, i)
        self.worker: Worker | None = None
        self.stopped = threading.Event()

    @ray.method(max_task_retries=-1)
    def run(self, state: Any = None) -> Any:
        """Trains to the end: the state that it ends with.

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
    def fetch(self, key: Hashable, part: slice) -> Any:
        return self._found(lambda: self.transport.mailbox.fetch(key, part))

    @ray.method(concurrency_group="serve", max_task_retries=0)
    def contribution(self, number: int) -> Any:
        return self._found(lambda: self.transport.mailbox.contribution(number))

    def _found(self, ask: Callable[[], Any]) -> Any:
        """The answer, once it is there; None for a request to an earlier incarnation."""
        if self._is_back():
            return None
        return self.transport.mailbox.wait(ask, self.job.timeout)

    def _is_back(self) -> bool:
        """Whether it has been started again, and does not take part yet.

        `starts` is 0 until the coordinator has told; no peer asks a first process so early.
        """
        worker = self.worker
        return self.transport.starts != 1 and (worker is None or worker.state() is None)

    @ray.method(concurrency_group="serve", max_task_retries=0)
    def state(self, own: bool = False) -> Any:
        return self.state_with(own)

    def state_with(self, own: bool) -> Any:
        """The state of `Worker.state`, with how many rounds there were."""
        state = None if self.worker is None else self.worker.state(own)
        return state and {**state, "number": self.transport.known.number}

    @ray.method(concurrency_group="serve", max_task_retries=0)
    def stop(self) -> None:
        self.stopped.set()

    @ray.method(concurrency_group="watch", max_task_retries=0)
    def known(self) -> Known:
        return self.transport.known

    @ray.method(concurrency_group="watch", max_task_retries=0)
    def watch(self) -> None:
        """Never returns: fails as soon as the process is lost."""
        threading.Event().wait()


# No method of the class is a coroutine: Ray would run all of them on one event loop, and a
# request would wait for the step that is being computed.


async def _train(actor: WorkerActor, state: Any) -> Any:
    """Trains a worker to the end: the state that it ends with."""
    job, transport, i = actor.job, actor.transport, actor.index
    where = (ray.get_runtime_context().get_node_id(), os.getpid())
    transport.starts, all_lost = await transport.ask_coordinator("hello", where)
    if all_lost and (state := job.restore(i)) is None:
        raise RuntimeError("all workers were lost, and there is nothing to restore")
    training, restore = job.make_training(i), lambda: job.restore(i)
    worker = Worker(training, job.method, transport, job.steps, restore)
    if state is not None:
        worker.take_over(state)
        transport.resume(state["number"])
        await transport.ask_coordinator("resume", state["number"])
    actor.worker = worker
    _compile(worker)

    def observe(worker: Worker) -> None:
        if actor.stopped.is_set():
            raise Stopped

    try:
        await work(worker, observe)
    except Stopped:
        pass
    await worker.tell()
    transport.report_at_once()
    await transport.report(worker.report)
    await transport.finish()
    return actor.state_with(own=True)


def _compile(worker: Worker) -> None:
    """Compiles the step before there are others that wait for it."""
    given = worker.params, worker.opt_state, worker.own, np.int32(worker.count + 1)
    jax.block_until_ready(worker.training.step(*given)[-1])


class CoordinatorActor:
    """`Coordinator` in one thread: no call awaits anything in the midst of it.

    If it fails, Ray starts it again, and it asks the workers what it knew.
    """

    def __init__(self, job: Job):
        workers = job.nodes * job.locals
        self._job, self._all = job, range(workers)
        self._coordinator, self._lost_all = self._fresh(), False
        self._open: dict[Hashable, asyncio.Future] = {}
        self._going: set[int] = set()  # workers that have begun and whose process is there
        self._starts, self._vain, self._best = ([0] * workers for _ in range(3))
        self._pids: dict[int, tuple[str, int]] = {}
        self._watched: dict[int, asyncio.Task] = {}
        self._recalled: asyncio.Task | None = None
        with warnings.catch_warnings():  # Ray's own use of what it has deprecated
            warnings.simplefilter("ignore")
            self._again = ray.get_runtime_context().was_current_actor_reconstructed

    def _fresh(self) -> Coordinator:
        return Coordinator(len(self._all), self._job.steps, self._job.method.period)

    async def hello(self, i: int, where: tuple[str, int]) -> tuple[int, bool]:
        """Worker i has been started.

        Returns:
          How many times so far, and whether all that had begun were lost: then the run
          begins anew, from what can be restored.
        """
        await self._ready()
        if self._starts[i]:  # nothing else may have told of the loss of the one before
            await self.leave(i)
        self._going.discard(i)
        if self._coordinator.begun and not self._going:
            self._coordinator, self._lost_all = self._fresh(), True
        self._starts[i] += 1
        self._vain[i] += 1
        self._pids[i] = where
        self._watch(i)
        return self._starts[i], self._lost_all and not self._coordinator.begun

    async def resume(self, i: int, number: int) -> None:
        """Worker i goes on from a state with so many rounds held."""
        await self._ready()
        if not self._coordinator.begun:
            self._coordinator.number = max(self._coordinator.number, number)

    async def enter(self, i: int, steps: int) -> tuple[list[int], bool]:
        await self._ready()
        return self._coordinator.enter(i, steps)

    async def leave(self, i: int) -> None:
        await self._ready()
        self._coordinator.leave(i)
        self._wake()

    async def missed(self, i: int, peer: int) -> None:
        """Worker i has waited for a peer in vain."""
        await self.leave(peer)

    async def claim(self, i: int, step: int) -> Claim:
        await self._ready()
        return self._coordinator.claim(i, step)

    async def finish(self, i: int) -> None:
        await self._ready()
        self._coordinator.finish(i)
        self._wake()

    async def report(self, i: int, report: Report) -> Status:
        await self._ready()
        if report.steps > self._best[i]:  # steps that are taken again are no progress
            self._best[i], self._vain[i] = report.steps, 0
        if report.steps:
            self._going.add(i)
        return self._coordinator.report(i, report)

    async def round(
        self, i: int, key: Hashable, value: Any, members: list[int]
    ) -> dict[int, Any] | None:
        """The values of a round, once it closes or the timeout is over; None: forgotten."""
        await self._ready()
        try:
            values = self._coordinator.arrive(key, i, value, members)
        except KeyError:
            return None
        if values is None:
            loop = asyncio.get_running_loop()
            closed = self._open.setdefault(key, loop.create_future())
            limit = self._job.start if key == "begin" else self._job.timeout
            try:
                values = await asyncio.wait_for(asyncio.shield(closed), limit)
            except TimeoutError:
                values = self._coordinator.close(key)
        self._wake()
        self._note_begin(key, values)
        return values

    async def overview(self) -> Overview:
        await self._ready()
        status = self._coordinator.status()
        return Overview(status, list(self._starts), list(self._vain), dict(self._pids))

    def _wake(self) -> None:
        for key in list(self._open):
            if (values := self._coordinator.look(key)) is not None:
                self._open.pop(key).set_result(values)
                self._note_begin(key, values)

    def _note_begin(self, key: Hashable, values: dict[int, Any]) -> None:
        """Notes the start at once: the next hello must not take these for lost."""
        if key == "begin":
            self._going.update(i for i in values if i in self._coordinator.present)

    # Workers that are lost

    def _watch(self, i: int) -> None:
        if (task := self._watched.get(i)) is None or task.done():
            self._watched[i] = asyncio.get_running_loop().create_task(self._lose(i))

    async def _lose(self, i: int) -> None:
        """Makes worker i absent as soon as its process is lost."""
        starts = self._starts[i]
        try:
            await ray.get_actor(self._job.worker(i)).watch.remote()
        except (RayError, ValueError):
            if starts == self._starts[i]:
                self._going.discard(i)
                self._coordinator.leave(i)
                self._wake()
        if starts != self._starts[i]:
            self._watched[i] = asyncio.get_running_loop().create_task(self._lose(i))

    # A coordinator that was lost

    async def _ready(self) -> None:
        """Waits until it knows what the one before it knew."""
        if self._again:
            if self._recalled is None:
                self._recalled = asyncio.get_running_loop().create_task(self._recall())
            await asyncio.shield(self._recalled)

    async def _recall(self) -> None:
        async def ask(i: int) -> Known | None:
            try:
                call = ray.get_actor(self._job.worker(i)).known.remote()
                return await asyncio.wait_for(call, self._job.timeout)
            except (RayError, ValueError, TimeoutError):
                return None

        for i, known in enumerate(await asyncio.gather(*map(ask, self._all))):
            if known is not None:
                self._starts[i] = known.starts
                if known.begun:
                    self._going.add(i)
                    self._coordinator.recall(i, known.steps, known.number, known.closed)
                    self._watch(i)
