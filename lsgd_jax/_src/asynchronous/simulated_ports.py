"""What a worker can ask of others in a simulation."""

import math
from collections.abc import Callable, Coroutine, Generator, Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from lsgd_jax._src.asynchronous.compression import Compression
from lsgd_jax._src.asynchronous.coordinator import Coordinator, Report
from lsgd_jax._src.asynchronous.errors import Unreachable
from lsgd_jax._src.asynchronous.mailbox import Mailbox, Snapshot
from lsgd_jax._src.asynchronous.place import Place
from lsgd_jax._src.asynchronous.ports import Pending, Ports


if TYPE_CHECKING:
    from lsgd_jax._src.asynchronous.simulator import Simulation


class Failure(NamedTuple):
    """What an event brings instead of an answer."""

    error: Exception


class Meeting(NamedTuple):
    """A round that has not ended.

    Attributes:
      event: its end.
      brought: what each member has brought.
      conclude: see `Simulation.meet`.
    """

    event: Any
    brought: dict[int, Any]
    conclude: Callable[[dict[int, Any]], Any] | None


class Call(Pending):
    """What an event brings, or the error that it brings."""

    def __init__(self, event: Any):
        self._event = event

    @property
    def done(self) -> bool:
        return self._event.processed

    def __await__(self):
        if not self._event.processed:
            yield self._event
        value = self._event.value
        if isinstance(value, Failure):
            raise value.error
        return value


class SimulatedMailbox(Mailbox):
    """A mailbox that tells those who wait for something when there is more in it.

    Args:
      environment: the simulation's.
      wire: how vectors travel.
    """

    def __init__(self, environment: Any, wire: Compression):
        super().__init__(wire)
        self._environment = environment
        self._awaited: dict[Hashable, Any] = {}

    def show(self, *arguments: Any, **options: Any) -> None:
        super().show(*arguments, **options)
        self._tell(None)

    def post(self, key: Hashable, vector: np.ndarray) -> None:
        super().post(key, vector)
        self._tell(key)

    def more(self, key: Hashable | None) -> Any:
        """When something is posted under a key, or shown (None)."""
        if key not in self._awaited:
            self._awaited[key] = self._environment.event()
        return self._awaited[key]

    def _tell(self, key: Hashable | None) -> None:
        if (event := self._awaited.pop(key, None)) is not None:
            event.succeed()


class SimulatedPorts(Ports):
    """One worker's ports."""

    def __init__(self, simulation: "Simulation", place: Place):
        self.place, self.grace = place, simulation.grace
        self._simulation, self._environment = simulation, simulation.environment
        self.mailbox = mailbox = SimulatedMailbox(self._environment, simulation.wire)
        self.more = mailbox.more

    # Time

    def now(self) -> float:
        return self._environment.now

    def stepped(self) -> Pending:
        return self.sleep(self._simulation.seconds[self.place.index]())

    def sleep(self, seconds: float) -> Pending:
        return Call(self._environment.timeout(seconds))

    def start(self, coroutine: Coroutine) -> Pending:
        return Call(self._simulation.drive(coroutine, self.place.index))

    def _run(self, process: Generator) -> Pending:
        return Call(self._environment.process(process))

    # Peers

    def latest(self, peer: int) -> Pending:
        return self._run(self._ask(peer, lambda mailbox: mailbox.latest()))

    def exchange(self, peer: int, vector: np.ndarray) -> Pending:
        wire = self.mailbox.wire
        size, vector = wire.nbytes(vector.size), wire.arrived(vector)
        self.mailbox.bytes_sent += size
        call = lambda mailbox: mailbox.exchange(vector)
        return self._run(self._ask(peer, call, size=size))

    def fetch(self, peer: int, key: Hashable, part: slice = slice(None)) -> Pending:
        return self._run(self._ask(peer, lambda mailbox: mailbox.read(key, part), key=key))

    def contribution(self, peer: int, number: int) -> Pending:
        return self._run(self._ask(peer, lambda mailbox: mailbox.contribution(number)))

    def state(self, peer: int) -> Pending:
        return self._run(self._ask(peer, lambda mailbox: mailbox.state()))

    def _ask(
        self,
        peer: int,
        call: Callable[[Mailbox], Any],
        size: int = 0,
        key: Hashable | None = None,
    ) -> Generator[Any, Any, Any]:
        """The request travels, the peer answers as soon as it can, the answer travels."""
        simulation, me = self._simulation, self.place.index
        limit = self._environment.now + self.grace
        late = Failure(Unreachable(f"worker {peer} did not answer within {self.grace:g} s"))
        is_lost = simulation.loss and simulation.random.random() < simulation.loss
        came = yield simulation.links.send(me, peer, size, limit)
        answer = None
        while came and not is_lost and peer not in simulation.down:
            there = simulation.ports[peer]
            if (answer := call(there.mailbox)) is not None:
                break
            timer = self._environment.timeout(limit - self._environment.now)
            if timer in (yield there.more(key) | timer):
                return late
        if answer is not None:
            size = _bytes_of(answer, simulation.wire)
            back = simulation.links.send(peer, me, size, limit)
            if (yield back):
                return simulation.wire.arrived(answer)
        yield self._environment.timeout(max(limit - self._environment.now, 0))
        return late

    # Groups

    async def total(
        self,
        key: Hashable,
        vector: np.ndarray,
        gives: bool,
        group: Sequence[int],
        error: np.ndarray | None = None,
    ) -> tuple[np.ndarray, int, list[int]]:
        """As `Ports.total`, in the time of a ring that begins when the last has come."""
        if self.mailbox.wire.is_narrow:
            return await super().total(key, vector, gives, group, error)

        def add(brought: dict[int, Any]) -> tuple[np.ndarray, int, list[int]]:
            givers = [given for given in brought.values() if given is not None]
            return sum(givers, np.zeros_like(vector)), len(givers), list(brought)

        given = vector if gives else None
        return await self._collective(("total", key), given, group, add)

    async def broadcast(
        self, key: Hashable, vector: np.ndarray | None, source: int, group: Sequence[int]
    ) -> np.ndarray:
        """As `Ports.broadcast`; as a collective it is the sum of one and of zeros."""
        if not self._simulation.collectives:
            return await super().broadcast(key, vector, source, group)

        def choose(brought: dict[int, Any]) -> Any:
            lost = Failure(Unreachable(f"worker {source} is lost, whose turn it was"))
            return brought.get(source, lost)

        return await self._collective(("of", key), vector, group, choose)

    def _collective(
        self,
        key: Hashable,
        value: Any,
        group: Sequence[int],
        combine: Callable[[dict[int, Any]], Any],
    ) -> Pending:
        """What all in a group get of what each brings, in the time of its bytes."""
        simulation, me = self._simulation, self.place.index

        def conclude(brought: dict[int, Any]) -> Any:
            result, came = combine(brought), list(brought)
            lost = isinstance(result, Failure)
            size = 0 if lost else _bytes_of(result, simulation.wire)
            each = round(2 * (len(came) - 1) / len(came) * size)
            for i in came:
                simulation.ports[i].mailbox.bytes_sent += each
            limit = self._environment.now + self.grace
            lost = Failure(Unreachable(f"{key} did not end within {self.grace:g} s"))
            return self._environment.process(
                _after(simulation.links.circulate(came, size, limit), result, lost)
            )

        return Call(simulation.meet(key, me, value, group, conclude))

    # The coordinator

    def enter(self, steps: int) -> Pending:
        return self._coordinator(lambda c: c.enter(self.place.index, steps))

    def claim(self, step: int) -> Pending:
        return self._coordinator(lambda c: c.claim(self.place.index, step))

    def missed(self, peer: int) -> Pending:
        return self._coordinator(lambda _: self._simulation.miss(peer))

    def report(self, report: Report) -> Pending:
        return self._coordinator(lambda c: c.report(self.place.index, report))

    def round(self, key: Hashable, value: Any, members: list[int]) -> Pending:
        if self._simulation.collectives:
            return self._collective(key, value, members, lambda brought: brought)
        return self._run(self._join(key, value, members))

    def _coordinator(self, call: Callable[[Coordinator], Any]) -> Pending:
        return self._run(self._through(lambda: call(self._simulation.coordinator)))

    def _through(self, call: Callable[[], Any]) -> Generator[Any, Any, Any]:
        yield self._to_coordinator()
        yield self._simulation.service()
        result = call()
        yield self._to_coordinator()
        return result

    def _join(self, key: Hashable, value: Any, members: list[int]):
        yield self._to_coordinator()
        yield self._simulation.service()
        came = yield self._simulation.meet(key, self.place.index, value, members)
        yield self._to_coordinator()
        return came

    def _to_coordinator(self) -> Any:
        """A small message to the node of worker 0, or back."""
        return self._simulation.links.send(self.place.index, 0, 0, math.inf)


def _after(event: Any, result: Any, lost: Failure) -> Generator[Any, Any, Any]:
    arrived = yield event
    return result if arrived else lost


def _bytes_of(answer: Any, wire: Compression) -> int:
    content = answer.vector if isinstance(answer, Snapshot) else answer
    if isinstance(content, np.ndarray):
        return wire.nbytes(content.size)
    return sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(content))
