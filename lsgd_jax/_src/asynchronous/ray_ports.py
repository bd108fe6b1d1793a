"""One worker's ports on Ray: calls to other actors, each with a limit."""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable
from concurrent.futures import Future
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError, RayTaskError

from lsgd_jax._src.asynchronous.compression import Compression
from lsgd_jax._src.asynchronous.coordinator import Claim, Report, Standing
from lsgd_jax._src.asynchronous.mailbox import Mailbox
from lsgd_jax._src.asynchronous.ports import Pending, Place, Ports
from lsgd_jax._src.asynchronous.transport import Behind, Unreachable
from lsgd_jax._src.asynchronous.worker import Method, Training
from lsgd_jax._src.wire import WireFormat


EVERY = 0.05  # seconds between two reports of a worker
KNOWN = 64  # rounds that a worker remembers, for a coordinator that has lost them
RETURN = 60.0  # seconds in which a coordinator that was lost must be back


class Job(NamedTuple):
    """What all actors of a run know.

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
    grace: float
    start: float
    wire: WireFormat
    begun: float

    def worker(self, i: int) -> str:
        """The name of worker i's actor."""
        return f"{self.name}-worker-{i}"

    @property
    def coordinator(self) -> str:
        """The name of the coordinator's actor."""
        return f"{self.name}-coordinator"


class Known(NamedTuple):
    """What a worker knows of the coordinator, see `Coordinator.recall`, and its starts."""

    steps: int
    number: int
    closed: dict[Hashable, Any]
    begun: bool
    starts: int


def answer(ref: Any, who: str, limit: float) -> Any:
    """What a call gives, waited for at most `limit` seconds.

    Raises:
      Unreachable: no answer, or whoever had to give it is lost.
    """
    try:
        return ray.get(ref, timeout=limit)
    except RayTaskError as error:
        if isinstance(error.cause, Exception) and not isinstance(error.cause, RayError):
            raise error.cause from None
        raise Unreachable(f"{who} could not answer: {error.cause!r}") from None
    except RayError as error:
        raise Unreachable(
            f"{who} did not answer within {limit:g} s ({type(error).__name__})"
        ) from None


class Call(Pending):
    """A call to another actor.

    Args:
      ref: of its answer.
      who: is asked.
      limit: seconds in which it must answer.
      then: what becomes of the answer.
    """

    def __init__(
        self, ref: Any, who: str, limit: float, then: Callable[[Any], Any] = lambda x: x
    ):
        self._ref, self._who, self._limit, self._then = ref, who, limit, then
        self._until = time.monotonic() + limit

    @property
    def done(self) -> bool:
        return bool(ray.wait([self._ref], timeout=0)[0])

    def __await__(self):
        left = self._until - time.monotonic()
        # An answer that lies on another machine needs a moment even if it is there.
        return self._then(answer(self._ref, self._who, max(left, min(1.0, self._limit))))
        yield  # never reached: makes this a generator that waits where it is awaited


class Beside(Pending):
    """A coroutine in a thread of its own."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]):
        self._future: Future[Any] = Future()
        threading.Thread(target=self._run, args=(coroutine,), daemon=True).start()

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        try:
            self._future.set_result(drive(coroutine))
        except BaseException as error:
            self._future.set_exception(error)

    @property
    def done(self) -> bool:
        return self._future.done()

    def __await__(self):
        return self._future.result()  # each of its waits has a limit
        yield


class Passed(Pending):
    """Nothing to wait for but, at most, the time."""

    done = True

    def __init__(self, seconds: float = 0.0, result: Any = None):
        self._seconds, self._result = seconds, result

    def __await__(self):
        if self._seconds:
            time.sleep(self._seconds)
        return self._result
        yield


def drive(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine whose awaits block: what it returns."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise RuntimeError("on Ray nothing but the engine's own calls can be awaited")


class RayPorts(Ports):
    """One worker's ports."""

    def __init__(self, job: Job, i: int):
        self.place, self.grace = Place(i, job.nodes, job.locals), job.grace
        self.wire = Compression(job.wire)
        self.mailbox = Mailbox(self.wire)
        self._job, self._actors = job, {}
        self._begun = time.monotonic() - (time.time() - job.begun)
        self._steps, self._number, self._in_rounds, self.starts = 0, 0, False, 0
        self._closed: OrderedDict[Hashable, Any] = OrderedDict()
        self._lock = threading.Lock()
        self._standing: Standing | None = None
        self._reported = 0.0

    def resume(self, number: int) -> None:
        """So many rounds were held in the run that is resumed."""
        self._number = number

    @property
    def known(self) -> Known:
        """What it knows of the coordinator."""
        with self._lock:
            closed = dict(self._closed)
        return Known(self._steps, self._number, closed, self._in_rounds, self.starts)

    def now(self) -> float:
        return time.monotonic() - self._begun

    def stepped(self) -> Pending:
        return Passed()

    def sleep(self, seconds: float) -> Pending:
        return Passed(seconds)

    def start(self, coroutine) -> Pending:
        return Beside(coroutine)

    # Peers

    def latest(self, peer: int) -> Pending:
        return self._peer(peer, "latest")

    def exchange(self, peer: int, vector) -> Pending:
        self.mailbox.bytes_sent += self.wire.nbytes(vector.size)
        return self._peer(peer, "exchange", self.wire.pack(vector))

    def fetch(self, peer: int, key: Hashable, part: slice = slice(None)) -> Pending:
        return self._peer(peer, "fetch", key, part)

    def contribution(self, peer: int, number: int) -> Pending:
        return self._peer(peer, "contribution", number)

    def state(self, peer: int) -> Pending:
        return Call(self._ask(peer, "state"), f"worker {peer}", self.grace)

    def _peer(self, peer: int, method: str, *args: Any) -> Pending:
        def found(content: Any) -> Any:
            if content is None:
                raise Unreachable(f"worker {peer} had nothing within {self.grace:g} s")
            return self.wire.unpack(content)

        return Call(self._ask(peer, method, *args), f"worker {peer}", self.grace, found)

    def _ask(self, peer: int, method: str, *args: Any) -> Any:
        return getattr(self._actor(self._job.worker(peer)), method).remote(*args)

    def _actor(self, name: str) -> Any:
        if name not in self._actors:
            self._actors[name] = ray.get_actor(name)
        return self._actors[name]

    # The coordinator

    def enter(self, steps: int) -> Pending:
        self._steps = steps
        return self.coordinator("enter", steps)

    def claim(self, step: int) -> Pending:
        def noted(claim: Claim) -> Claim:
            self._number = max(self._number, claim.number)
            self._steps = step if claim.go == "step" else self._steps
            return claim

        return self.coordinator("claim", step, then=noted)

    def round(self, key: Hashable, value: Any, members: list[int]) -> Pending:
        def noted(values: dict[int, Any] | None) -> dict[int, Any]:
            if values is None:
                raise Behind(f"the round {key} is long over")
            self._note(key, values)
            return values

        return self.coordinator("round", key, value, list(members), then=noted)

    def missed(self, peer: int) -> Pending:
        return self.coordinator("missed", peer)

    def report(self, report: Report) -> Pending:
        """At most every `EVERY` seconds; in between it gives what is known."""
        if self._standing is not None and time.monotonic() - self._reported < EVERY:
            return Passed(result=self._standing)
        self._reported = time.monotonic()
        return self.report_now(report)

    def report_now(self, report: Report) -> Pending:
        """As `report`, whenever the last one was."""

        def noted(standing: Standing) -> Standing:
            self._standing = standing
            return standing

        return self.coordinator("report", report, then=noted)

    def coordinator(
        self, method: str, *args: Any, then: Callable[[Any], Any] = lambda x: x
    ) -> Pending:
        """A call to the coordinator, which is given the time to come back if it is lost."""
        actor = self._actor(self._job.coordinator)
        ref = getattr(actor, method).remote(self.place.index, *args)
        limit = RETURN + (self._job.start if "begin" in args else self.grace)
        return CoordinatorCall(ref, "the coordinator", limit, then)

    def _note(self, key: Hashable, values: dict[int, Any]) -> None:
        with self._lock:
            self._closed[key] = values
            while len(self._closed) > KNOWN:
                self._closed.popitem(last=False)
            if key == ("join", self._number):
                self._number += 1
            self._in_rounds = True


class CoordinatorCall(Call):
    """A call without whose answer the run cannot go on."""

    def __await__(self):
        try:
            return (yield from super().__await__())
        except Unreachable as error:
            raise ConnectionError(f"the run cannot go on: {error}") from None
