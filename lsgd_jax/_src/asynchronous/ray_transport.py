"""One worker's transport on Ray: calls to other actors, each with a limit.

Only this module and the others whose names begin with `ray_` import Ray.
"""

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError, RayTaskError

from lsgd_jax._src.asynchronous.compression import Compression
from lsgd_jax._src.asynchronous.coordinator import Status
from lsgd_jax._src.asynchronous.mailbox import Mailbox
from lsgd_jax._src.asynchronous.transport import (
    GridPosition,
    Transport,
    UnreachableError,
)
from lsgd_jax._src.asynchronous.worker import Method, Training


EVERY = 0.05  # seconds between two reports of a worker
KNOWN = 64  # rounds that a worker remembers, for a coordinator that has lost them
RETURN = 60.0  # seconds in which a coordinator that failed must be back


class Job(NamedTuple):
    """The run, as all of its actors know it.

    Attributes:
      name: of the run, unique; its actors are called after it.
      begun: when the run began, in seconds since the epoch.
      Others: as for `ray_engine.run` and `ray_engine.Options`.
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
        """The name of worker i's actor."""
        return f"{self.name}-worker-{i}"

    @property
    def coordinator(self) -> str:
        """The name of the coordinator's actor."""
        return f"{self.name}-coordinator"


class Known(NamedTuple):
    """A worker's knowledge of the coordinator, see `Coordinator.recall`, and its starts."""

    steps: int
    number: int
    closed: dict[Hashable, Any]
    begun: bool
    starts: int


def cause_of(error: RayError, who: str, limit: float) -> Exception:
    """The error that a call has raised, or `UnreachableError` if there was no answer."""
    if isinstance(error, RayTaskError):
        if isinstance(error.cause, Exception) and not isinstance(error.cause, RayError):
            return error.cause
        return UnreachableError(f"{who} could not answer: {error.cause!r}")
    kind = type(error).__name__
    return UnreachableError(f"{who} did not answer within {limit:g} s ({kind})")


def answer(ref: Any, who: str, limit: float) -> Any:
    """The answer to a call, waited for at most `limit` seconds.

    Raises:
      UnreachableError: no answer, or the actor that had to give it has failed.
    """
    try:
        return ray.get(ref, timeout=limit)
    except RayError as error:
        raise cause_of(error, who, limit) from None


async def answered(ref: Any, who: str, limit: float) -> Any:
    """As `answer`, awaited."""
    try:
        return await asyncio.wait_for(asyncio.wrap_future(ref.future()), limit)
    except TimeoutError:
        raise UnreachableError(f"{who} did not answer within {limit:g} s") from None
    except RayError as error:
        raise cause_of(error, who, limit) from None


class RayTransport(Transport):
    """One worker's transport."""

    def __init__(self, job: Job, i: int):
        self.position, self.timeout = GridPosition(i, job.nodes, job.locals), job.timeout
        self.mailbox = Mailbox(Compression(job.method.wire, i))
        self._job, self._actors = job, {}
        self._begun = time.monotonic() - (time.time() - job.begun)
        self._steps, self._number, self._in_rounds, self.starts = 0, 0, False, 0
        self._closed: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = threading.Lock()
        self._status: Status | None = None
        self._reported = 0.0

    def report_at_once(self) -> None:
        """Sends the next report, however soon it comes after the last one."""
        self._reported = 0.0

    def resume(self, number: int) -> None:
        """So many rounds were held in the run that is resumed."""
        self._number = number

    @property
    def known(self) -> Known:
        """The facts that a coordinator which replaces one that failed asks for."""
        with self._lock:
            closed = dict(self._closed)
        return Known(self._steps, self._number, closed, self._in_rounds, self.starts)

    def now(self) -> float:
        return time.monotonic() - self._begun

    async def step(self, compute: Callable[[], None]) -> None:
        # In a thread, so that messages travel while XLA computes.
        await asyncio.get_running_loop().run_in_executor(None, compute)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def ask_peer(self, peer: int, call: str, *arguments: Any) -> Any:
        actor, who = self._actor(self._job.worker(peer)), f"worker {peer}"
        ref = getattr(actor, call).remote(*arguments)
        found = await answered(ref, who, self.timeout)
        if found is None and call != "state":
            raise UnreachableError(f"{who} had nothing within {self.timeout:g} s")
        return found

    async def ask_coordinator(self, call: str, *arguments: Any) -> Any:
        """A call without whose answer the run cannot go on.

        The coordinator is given the time to come back if it fails.
        """
        if call == "report" and self._status is not None:
            if time.monotonic() - self._reported < EVERY:
                return self._status
        if call == "enter":
            (self._steps,) = arguments
        self._reported = time.monotonic() if call == "report" else self._reported
        begins = call == "round" and arguments[0] == "begin"
        limit = RETURN + (self._job.start if begins else self.timeout)
        actor = self._actor(self._job.coordinator)
        ref = getattr(actor, call).remote(self.position.index, *arguments)
        try:
            result = await answered(ref, "the coordinator", limit)
        except UnreachableError as error:
            raise ConnectionError(f"the run cannot go on: {error}") from None
        self._note(call, arguments, result)
        return result

    def _note(self, call: str, arguments: tuple, result: Any) -> None:
        """Remembers an answer, for a coordinator that has lost it."""
        if call == "report":
            self._status = result
        elif call == "claim":
            self._number = max(self._number, result.number)
            self._steps = arguments[0] if result.go == "step" else self._steps
        elif call == "round" and result is not None:
            with self._lock:
                self._closed[arguments[0]] = result
                while len(self._closed) > KNOWN:
                    self._closed.popitem(last=False)
                self._number += arguments[0] == ("join", self._number)
                self._in_rounds = True

    def _actor(self, name: str) -> Any:
        if name not in self._actors:
            self._actors[name] = ray.get_actor(name)
        return self._actors[name]
