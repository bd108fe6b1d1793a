"""What runs in Ray's processes: the workers and the coordinator."""

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

from lsgd_jax._src.asynchronous.coordinator import Claim, Coordinator, Report, Standing
from lsgd_jax._src.asynchronous.ports import Pending
from lsgd_jax._src.asynchronous.ray_ports import Job, Known, RayPorts, drive
from lsgd_jax._src.asynchronous.worker import Worker, work


class Overview(NamedTuple):
    """What the coordinator tells the driver.

    Attributes:
      standing: how all workers are doing.
      starts: of each worker how many times it was started.
      vain: of each worker how many times it was since it last came to a step or a round.
      processes: of each worker its node and the process there.
    """

    standing: Standing
    starts: list[int]
    vain: list[int]
    processes: dict[int, tuple[str, int]]


class Stopped(Exception):
    """The run is to end at the boundary of this step."""


class WorkerActor:
    """One worker. `run` trains; the rest is what others ask for meanwhile."""

    def __init__(self, job: Job, i: int):
        self._job, self._i = job, i
        self._ports = RayPorts(job, i)
        self._worker: Worker | None = None
        self._stop = threading.Event()

    @ray.method(max_task_retries=-1)
    def run(self, state: Any = None) -> Any:
        """Trains to the end: the state that it ends with.

        Ray calls it again, in a new process, if the process is lost.
        """
        job, ports = self._job, self._ports
        where = (ray.get_runtime_context().get_node_id(), os.getpid())
        ports.starts, all_lost = drive(_awaited(ports.coordinator("hello", where)))
        if all_lost and (state := job.restore(self._i)) is None:
            raise RuntimeError("all workers were lost, and there is nothing to restore")
        worker = Worker(
            job.make_training(self._i),
            job.method,
            ports,
            job.steps,
            lambda: job.restore(self._i),
        )
        if state is not None:
            worker.take_over(state)
            ports.resume(state["number"])
            drive(_awaited(ports.coordinator("resume", state["number"])))
        self._worker = worker
        _compile(worker)
        try:
            drive(work(worker, self._observe))
        except Stopped:
            pass
        drive(worker.tell())
        drive(_awaited(ports.report_now(worker.report)))
        drive(_awaited(ports.coordinator("leave")))
        return self._state(own=True)

    def _observe(self, worker: Worker) -> None:
        del worker
        if self._stop.is_set():
            raise Stopped

    @ray.method(concurrency_group="serve", max_task_retries=0)
    def latest(self) -> Any:
        mailbox = self._ports.mailbox
        return self._packed(mailbox.wait(mailbox.latest, self._job.grace))

    @ray.method(concurrency_group="serve", max_task_retries=0)
    def exchange(self, vector: Any) -> Any:
        theirs = self._ports.wire.unpack(vector)
        return self._packed(self._ports.mailbox.exchange(theirs))

    @ray.method(concurrency_group="serve", max_task_retries=0)
    def fetch(self, key: Hashable, part: slice) -> Any:
        return self._found(lambda: self._ports.mailbox.read(key, part))

    @ray.method(concurrency_group="serve", max_task_retries=0)
    def contribution(self, number: int) -> Any:
        return self._found(lambda: self._ports.mailbox.contribution(number))

    def _found(self, ask: Callable[[], Any]) -> Any:
        """What a peer asks for, once it is there; None if the process before was asked."""
        if self._is_back():
            return None
        return self._packed(self._ports.mailbox.wait(ask, self._job.grace))

    def _is_back(self) -> bool:
        """Whether it has been started again, and does not take part yet.

        `starts` is 0 until the coordinator has told; no peer asks a first process so early.
        """
        worker = self._worker
        return self._ports.starts != 1 and (worker is None or worker.state() is None)

    def _packed(self, content: Any) -> Any:
        return self._ports.wire.pack(content)

    @ray.method(concurrency_group="serve", max_task_retries=0)
    def state(self, own: bool = False) -> Any:
        return self._state(own)

    def _state(self, own: bool) -> Any:
        """What `Worker.state` gives, with how many rounds there were."""
        state = None if self._worker is None else self._worker.state(own)
        return state and {**state, "number": self._ports.known.number}

    @ray.method(concurrency_group="serve", max_task_retries=0)
    def stop(self) -> None:
        self._stop.set()

    @ray.method(concurrency_group="watch", max_task_retries=0)
    def known(self) -> Known:
        return self._ports.known

    @ray.method(concurrency_group="watch", max_task_retries=0)
    def watch(self) -> None:
        """Never returns: fails as soon as the process is lost."""
        threading.Event().wait()


def _compile(worker: Worker) -> None:
    """Has the step compiled before there are others that wait for it."""
    given = worker.params, worker.opt_state, worker.own, np.int32(worker.count + 1)
    jax.block_until_ready(worker.training.step(*given)[-1])


async def _awaited(pending: Pending) -> Any:
    return await pending


class CoordinatorActor:
    """`Coordinator` in one thread: nothing is awaited while it is spoken to.

    If it is lost, Ray starts it again, and it asks the workers what it knew.
    """

    def __init__(self, job: Job):
        workers = job.nodes * job.locals
        self._job, self._all = job, range(workers)
        self._coordinator, self._lost_all = self._fresh(), False
        self._open: dict[Hashable, asyncio.Future] = {}
        self._going: set[int] = set()  # who has begun, and whose process is there
        self._starts, self._vain = [0] * workers, [0] * workers
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

    async def report(self, i: int, report: Report) -> Standing:
        await self._ready()
        if report.steps > self._coordinator.standing().reports[i].steps:
            self._vain[i] = 0
        if report.steps:
            self._going.add(i)
        return self._coordinator.report(i, report)

    async def round(
        self, i: int, key: Hashable, value: Any, members: list[int]
    ) -> dict[int, Any] | None:
        """What all have brought, once they have, or `grace` is over; None: forgotten."""
        await self._ready()
        try:
            values = self._coordinator.arrive(key, i, value, members)
        except KeyError:
            return None
        if values is None:
            loop = asyncio.get_running_loop()
            closed = self._open.setdefault(key, loop.create_future())
            limit = self._job.start if key == "begin" else self._job.grace
            try:
                values = await asyncio.wait_for(asyncio.shield(closed), limit)
            except TimeoutError:
                values = self._coordinator.close(key)
        self._wake()
        self._note_begin(key, values)
        return values

    async def overview(self) -> Overview:
        await self._ready()
        standing = self._coordinator.standing()
        return Overview(standing, list(self._starts), list(self._vain), dict(self._pids))

    def _wake(self) -> None:
        for key in list(self._open):
            if (values := self._coordinator.look(key)) is not None:
                self._open.pop(key).set_result(values)
                self._note_begin(key, values)

    def _note_begin(self, key: Hashable, values: dict[int, Any]) -> None:
        """At once: the next to say hello must not take those for lost who wait in it."""
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
                return await asyncio.wait_for(call, self._job.grace)
            except (RayError, ValueError, TimeoutError):
                return None

        for i, known in enumerate(await asyncio.gather(*map(ask, self._all))):
            if known is not None:
                self._starts[i] = known.starts
                if known.begun:
                    self._going.add(i)
                    self._coordinator.recall(i, known.steps, known.number, known.closed)
                    self._watch(i)
