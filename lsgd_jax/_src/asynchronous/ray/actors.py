"""A worker in a process of Ray, and its calls to other actors.

Only this module and the others whose names begin with `ray_` import Ray.
"""

import asyncio
import functools
import os
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import ray
from ray.exceptions import RayError, RayTaskError

from lsgd_jax._src.asynchronous.engine.contents import Buffered, buffered, unbuffered
from lsgd_jax._src.asynchronous.engine.coordinator import Status
from lsgd_jax._src.asynchronous.engine.errors import UnreachableError
from lsgd_jax._src.asynchronous.engine.mailbox import Mailbox
from lsgd_jax._src.asynchronous.engine.transport import GridPosition, Transport
from lsgd_jax._src.asynchronous.engine.worker import Method, Training, Worker, work


EVERY = 0.05  # seconds between two reports of a worker
THREADS = 64  # that serve a worker's peers
WAITING = 48  # of these threads that may wait
BUSY = "busy"  # the answer of a worker for which no more may wait; ask again
AGAIN = 0.02  # seconds until a busy worker is asked again
LOST = "the run cannot go on, because its coordinator was lost: resume it"


class RunSpec(NamedTuple):
    """The run, as all of its actors know it.

    Attributes:
      name: of the run, unique; its actors are named after it.
      begun: when the run began, in seconds since the epoch.
      Others: as for `ray_engine.run` and `ray_engine.ClusterOptions`.
    """

    name: str
    make_training: Callable[[int], Training]
    method: Method
    nodes: int
    locals: int
    steps: int
    restore: Callable[[int], Any]
    timeout: float
    begun: float


def worker_name(run: str, i: int) -> str:
    """Returns the name of worker i's actor."""
    return f"{run}-worker-{i}"


def coordinator_name(run: str) -> str:
    """Returns the name of the coordinator's actor."""
    return f"{run}-coordinator"


class RayTransport(Transport):
    """One worker's transport: calls to other actors.

    Args:
      run: the name of the run.
      position, timeout, mailbox: see `Transport`.
      begun: when the run began, in seconds since the epoch.
      namespace: of the actors' names. Defaults to this process's.
    """

    def __init__(
        self,
        run: str,
        position: GridPosition,
        timeout: float,
        mailbox: Mailbox,
        begun: float,
        namespace: str | None = None,
    ):
        self.position = position
        self.timeout = timeout
        self.mailbox = mailbox
        self._run = run
        self._namespace = namespace
        self._actors = {}
        self._begun = time.monotonic() - (time.time() - begun)
        self._status: Status | None = None
        self._reported = 0.0

    def now(self) -> float:
        return time.monotonic() - self._begun

    async def step(self, compute: Callable[[], None]) -> None:
        # In a thread, so that messages travel while XLA computes.
        await asyncio.get_running_loop().run_in_executor(None, compute)

    async def ask_peer(self, peer: int, call: str, *arguments: Any) -> Any:
        name = worker_name(self._run, peer)
        until = self.now() + self.timeout
        try:
            actor = self._actor(name)
            given = buffered(arguments)
            if call == "state":
                return await self._answer(actor.state.remote())

            while True:
                answer = unbuffered(await self._answer(actor.serve.remote(call, given)))
                if not (isinstance(answer, str) and answer == BUSY):
                    break
                if self.now() > until:
                    raise TimeoutError
                await asyncio.sleep(AGAIN)
        except (RayError, TimeoutError) as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            if not isinstance(cause, RayError | TimeoutError):
                raise cause from None
            self._actors.pop(name, None)  # the peer may be restarted as another actor
            raise UnreachableError(
                f"worker {peer} did not answer within {self.timeout:g} s "
                f"({type(cause).__name__})"
            ) from None
        if answer is None:
            raise UnreachableError(f"worker {peer} had nothing within {self.timeout:g} s")
        return answer

    async def _answer(self, ref: Any) -> Any:
        return await asyncio.wait_for(asyncio.wrap_future(ref.future()), self.timeout)

    async def ask_coordinator(self, call: str, *arguments: Any) -> Any:
        """Calls the coordinator; the driver ends the run if that is lost or hangs."""
        if call == "report":
            if self._status is not None and time.monotonic() - self._reported < EVERY:
                return self._status
            self._reported = time.monotonic()
        try:
            actor = self._actor(coordinator_name(self._run))
            ref = getattr(actor, call).remote(self.position.index, *arguments)
            answer = await asyncio.wrap_future(ref.future())
        except RayTaskError as error:
            raise error.cause from None
        except (RayError, UnreachableError) as error:
            raise ConnectionError(f"{LOST} ({type(error).__name__})") from None
        if call == "report":
            self._status = answer
        return answer

    def _actor(self, name: str) -> Any:
        if name not in self._actors:
            try:
                self._actors[name] = ray.get_actor(name, self._namespace)
            except ValueError:
                raise UnreachableError(f"there is no actor {name}") from None
        return self._actors[name]


class Stopped(Exception):
    """Ends the run at the boundary of this step."""


class WorkerActor:
    """One worker. `run` trains; peers and the driver call the other methods meanwhile.

    No method is a coroutine: Ray would run all of them on one event loop, and a request
    would wait for the step that is being computed.
    """

    def __init__(self, spec: RunSpec, i: int, is_restarted: bool):
        self.spec = spec
        self.index = i
        position = GridPosition(i, spec.nodes, spec.locals)
        mailbox = Mailbox(spec.method.wire, i)
        self.transport = RayTransport(
            spec.name, position, spec.timeout, mailbox, spec.begun
        )
        self.worker: Worker | None = None
        # Otherwise all threads could wait for sums whose parts no thread is left to give.
        self._waiting = threading.Semaphore(WAITING)
        self._is_restarted = is_restarted
        self.stopped = threading.Event()

    def run(self, state: Any, all_lost: bool) -> Any:
        """Trains to the end; returns the state at the end.

        Args:
          state: to begin from, or None.
          all_lost: whether all workers were lost. A state is restored then.
        """
        return asyncio.run(_train(self, state, all_lost))

    @ray.method(concurrency_group="serve")
    def serve(self, call: str, arguments: Buffered) -> Buffered:
        """Calls a method of the mailbox; returns the answer once it is there.

        Returns None at once from a restarted worker that does not take part yet: the
        request was addressed to its previous incarnation.
        """
        has_begun = self.worker is not None and self.worker.has_begun
        if self._is_restarted and not has_begun:
            return buffered(None)
        mailbox = self.transport.mailbox
        given = unbuffered(arguments)

        def ask() -> Any:
            return getattr(mailbox, call)(*given)

        if not self._waiting.acquire(blocking=False):
            answer = mailbox.wait(ask, timeout=0.0)
            return buffered(BUSY if answer is None else answer)
        try:
            return buffered(mailbox.wait(ask, self.spec.timeout))
        finally:
            self._waiting.release()

    @ray.method(concurrency_group="serve")
    def state(self, own: bool = False) -> Any:
        """See `Worker.state`."""
        return None if self.worker is None else self.worker.state(own)

    @ray.method(concurrency_group="serve")
    def stop(self) -> None:
        self.stopped.set()

    @ray.method(concurrency_group="serve")
    def where(self) -> tuple[str, int]:
        """Returns the node and the process that it runs in."""
        return ray.get_runtime_context().get_node_id(), os.getpid()


async def _train(actor: WorkerActor, state: Any, all_lost: bool) -> Any:
    spec = actor.spec
    i = actor.index
    restore = functools.partial(spec.restore, i)
    if all_lost:
        state = restore()
        if state is None:
            raise RuntimeError("all workers were lost, and there is nothing to restore")
    training = spec.make_training(i)
    worker = Worker(training, spec.method, actor.transport, spec.steps, restore)
    if state is not None:
        worker.take_over(state)
    actor.worker = worker
    # Compiles the step while no other worker waits for it.
    t = np.int32(worker.count + 1)
    *_, loss = training.step(worker.params, worker.opt_state, worker.own, t)
    jax.block_until_ready(loss)

    def observe(worker: Worker) -> None:
        if actor.stopped.is_set():
            raise Stopped

    try:
        await work(worker, observe)
    except Stopped:
        pass
    await worker.finish()
    return worker.state(own=True)
