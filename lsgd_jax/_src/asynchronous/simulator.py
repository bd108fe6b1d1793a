"""Asynchronous workers under simulated time, with real steps on one device.

The methods run as they are, on an event loop of virtual time. All is decided by the seed:
two runs give the same parameters and the same times.
"""

import asyncio
import math
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from lsgd_jax._src.asynchronous.clock import run_virtual
from lsgd_jax._src.asynchronous.compression import Compression, Snapshot
from lsgd_jax._src.asynchronous.coordinator import Coordinator
from lsgd_jax._src.asynchronous.mailbox import Mailbox
from lsgd_jax._src.asynchronous.network import NETWORKS, Links, Network
from lsgd_jax._src.asynchronous.speeds import Speeds
from lsgd_jax._src.asynchronous.transport import (
    GridPosition,
    StaleWorkerError,
    Transport,
    UnreachableError,
)
from lsgd_jax._src.asynchronous.worker import Method, Training, Worker, work


class Simulated(NamedTuple):
    """The outcome of a simulated run.

    Attributes:
      workers: as they ended; one that failed as it was then.
      seconds: when the last one ended.
      sent: bytes that left each node, [nodes].
    """

    workers: list[Worker]
    seconds: float
    sent: np.ndarray


class Meeting(NamedTuple):
    """A round that is open.

    Attributes:
      result: a future.
      brought: the value of each member so far.
      conclude: see `Simulation.meet`.
    """

    result: asyncio.Future
    brought: dict[int, Any]
    conclude: Callable[[dict[int, Any]], Coroutine] | None


class Simulation:
    """All workers of a run, their network and their coordinator; see `run`."""

    def __init__(
        self,
        nodes: int,
        locals: int,
        coordinator: Coordinator,
        network: Network,
        speeds: Speeds,
        seed: int,
        timeout: float,
        loss: float,
        collectives: bool,
    ):
        self.timeout, self.loss, self.collectives = timeout, loss, collectives
        self.nodes, self.locals, self.coordinator = nodes, locals, coordinator
        self.links = Links(network, nodes, locals)
        self.seconds = [speeds.of(i, seed) for i in range(nodes * locals)]
        self.random = np.random.default_rng([seed, nodes * locals])
        self.down: set[int] = set()
        self.hung: set[int] = set()
        self.transports: dict[int, SimulatedTransport] = {}
        self._meetings: dict[Hashable, Meeting] = {}
        self._served = 0.0
        self._tasks: dict[int, set[asyncio.Task]] = {}

    def now(self) -> float:
        """Seconds since the run began."""
        return asyncio.get_running_loop().time()

    # Workers

    def enter(self, i: int, method: Method) -> "SimulatedTransport":
        """The transport of a worker that is there from now on."""
        self.down.discard(i)
        self.links.stuck.discard(i)
        position = GridPosition(i, self.nodes, self.locals)
        self.transports[i] = SimulatedTransport(self, position, method)
        return self.transports[i]

    def drop(self, i: int) -> None:
        """Worker i fails: it does nothing and does not answer from now on."""
        self.down.add(i)
        self.links.stuck.add(i)
        self.links.changed()
        for task in self._tasks.pop(i, ()):
            task.cancel()

    def own(self, i: int, task: asyncio.Task) -> asyncio.Task:
        """Notes a task of worker i, which ends with it."""
        tasks = self._tasks.setdefault(i, set())
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(lambda task: task.cancelled() or task.exception())
        return task

    # Rounds

    async def meet(
        self,
        key: Hashable,
        i: int,
        value: Any,
        members: Iterable[int],
        conclude: Callable[[dict[int, Any]], Coroutine] | None = None,
    ) -> Any:
        """Worker i brings a value to a round; its result.

        The round is the coordinator's, see `Transport.round`, or a collective, whose result
        is that of the coroutine `conclude`.
        """
        try:
            over = self.coordinator.look(key)
            given = value if conclude is None else None  # nothing large is remembered
            self.coordinator.arrive(key, i, given, members)
        except KeyError:
            return None
        if over is not None:
            return over if conclude is None else None
        loop = asyncio.get_running_loop()
        if key not in self._meetings:
            self._meetings[key] = Meeting(loop.create_future(), {}, conclude)
            loop.call_later(self.timeout, self._close, key)
        meeting = self._meetings[key]
        meeting.brought[i] = value
        self._conclude([key])
        return await asyncio.shield(meeting.result)

    def leave(self, i: int, finished: bool = False) -> None:
        """Rounds do not wait for worker i any more."""
        (self.coordinator.finish if finished else self.coordinator.leave)(i)
        self._conclude(list(self._meetings))

    def _close(self, key: Hashable) -> None:
        if key in self._meetings:
            self.coordinator.close(key)
            self._conclude(list(self._meetings))  # an absent worker is so from all of them

    def _conclude(self, keys: Iterable[Hashable]) -> None:
        for key in keys:
            if key in self._meetings and (came := self.coordinator.look(key)) is not None:
                meeting = self._meetings.pop(key)
                if meeting.conclude is None:
                    meeting.result.set_result(came)
                else:
                    brought = {i: meeting.brought[i] for i in came}
                    task = asyncio.ensure_future(meeting.conclude(brought))
                    task.add_done_callback(_into(meeting.result))

    async def serve(self) -> None:
        """Waits until the coordinator has served one more call, after earlier ones."""
        now = self.now()
        self._served = max(now, self._served) + self.links.network.coordinator
        await asyncio.sleep(self._served - now)


def _into(result: asyncio.Future) -> Callable[[asyncio.Task], None]:
    def settle(task: asyncio.Task) -> None:
        if task.cancelled():
            result.cancel()
        elif error := task.exception():
            result.set_exception(error)
            result.exception()  # retrieved, also if no worker awaits it any more
        else:
            result.set_result(task.result())

    return settle


class SimulatedMailbox(Mailbox):
    """A mailbox that tells coroutines when there is more in it."""

    def __init__(self, wire: Compression):
        super().__init__(wire)
        self._awaited: dict[Hashable, asyncio.Future] = {}

    def show(self, *arguments: Any, **options: Any) -> None:
        super().show(*arguments, **options)
        self._tell(None)

    def post(self, key: Hashable, vector: Any) -> None:
        super().post(key, vector)
        self._tell(key)

    def more(self, key: Hashable | None) -> asyncio.Future:
        """Done when something is posted under a key, or shown (None)."""
        if key not in self._awaited:
            self._awaited[key] = asyncio.get_running_loop().create_future()
        return self._awaited[key]

    def _tell(self, key: Hashable | None) -> None:
        if (future := self._awaited.pop(key, None)) is not None:
            future.set_result(None)


class SimulatedTransport(Transport):
    """One worker's transport. Sums, and on demand broadcasts, take a collective's time."""

    mailbox: Any

    def __init__(self, simulation: Simulation, position: GridPosition, method: Method):
        self.position, self.timeout = position, simulation.timeout
        self._simulation, self._index = simulation, position.index
        self.mailbox = SimulatedMailbox(Compression(method.wire, position.index))
        self.timed, self.is_collective = self, simulation.collectives

    def now(self) -> float:
        return self._simulation.now()

    async def step(self, compute: Callable[[], None]) -> None:
        compute()
        await self.sleep(self._simulation.seconds[self._index]())
        while self._index in self._simulation.hung:
            await self.sleep(self.timeout)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task:
        return self._simulation.own(self._index, super().start(coroutine))

    # Peers

    async def ask_peer(self, peer: int, call: str, *arguments: Any) -> Any:
        """The request travels, the peer answers as soon as it can, the answer travels."""
        simulation, me = self._simulation, self._index
        limit = self.now() + self.timeout
        is_lost = simulation.loss and simulation.random.random() < simulation.loss
        size = sum(map(_bytes_of, arguments))
        came = await simulation.links.send(me, peer, size, limit)
        key, answer = arguments[0] if call == "fetch" else None, None
        while came and not is_lost and peer not in simulation.down:
            mailbox = simulation.transports[peer].mailbox
            if (answer := getattr(mailbox, call)(*arguments)) is not None:
                break
            try:
                more = asyncio.shield(mailbox.more(key))
                await asyncio.wait_for(more, limit - self.now())
            except TimeoutError:
                break
        if answer is not None:
            if await simulation.links.send(peer, me, _bytes_of(answer), limit):
                return answer
        await self.sleep(max(limit - self.now(), 0))
        raise UnreachableError(f"worker {peer} did not answer within {self.timeout:g} s")

    # Groups, in the time of a collective that begins when the last member has come

    async def sum(
        self, key: Hashable, vector: np.ndarray, gives: bool, group: Sequence[int]
    ) -> tuple[np.ndarray, int, list[int]]:
        """As `all_reduce`, in the time of a ring."""

        def add(brought: dict[int, Any]) -> tuple[np.ndarray, int, list[int]]:
            givers = [given for given in brought.values() if given is not None]
            return sum(givers, np.zeros_like(vector)), len(givers), list(brought)

        given = vector if gives else None
        return await self._collective(("total", key), given, group, add)

    async def broadcast(
        self, key: Hashable, vector: np.ndarray | None, source: int, group: Sequence[int]
    ) -> np.ndarray:
        """As `collective.broadcast`, in the time of a sum of one vector and of zeros."""
        return await self._collective(
            ("of", key), vector, group, lambda brought: brought.get(source)
        )

    async def _collective(
        self,
        key: Hashable,
        value: Any,
        group: Sequence[int],
        combine: Callable[[dict[int, Any]], Any],
    ) -> Any:
        """The result that a group makes of what its members bring."""
        simulation = self._simulation

        async def conclude(brought: dict[int, Any]) -> Any:
            result, came = combine(brought), list(brought)
            if result is None:
                raise UnreachableError(f"the source of {key} has failed")
            size = _bytes_of(result)
            each = round(2 * (len(came) - 1) / len(came) * size)
            for i in came:
                simulation.transports[i].mailbox.bytes_sent += each
            limit = simulation.now() + self.timeout
            if not await simulation.links.circulate(came, size, limit):
                raise UnreachableError(f"{key} did not end within {self.timeout:g} s")
            return (result,)

        ended = await simulation.meet(key, self._index, value, group, conclude)
        if ended is None:
            raise StaleWorkerError(f"worker {self._index} came too late for {key}")
        return ended[0]

    # The coordinator

    async def ask_coordinator(self, call: str, *arguments: Any) -> Any:
        simulation, me = self._simulation, self._index
        if call == "round" and simulation.collectives:
            key, value, members = arguments
            together = lambda brought: brought
            return await self._collective(key, value, members, together)
        await self._to_coordinator()
        await simulation.serve()
        if call == "round":
            key, value, members = arguments
            answer = await simulation.meet(key, me, value, members)
        elif call == "missed":
            answer = simulation.leave(*arguments)
        elif call == "finish":
            answer = simulation.leave(me, finished=True)
        else:
            answer = getattr(simulation.coordinator, call)(me, *arguments)
        await self._to_coordinator()
        return answer

    async def _to_coordinator(self) -> None:
        """A small message to the node of worker 0, or back."""
        await self._simulation.links.send(self._index, 0, 0, math.inf)


def _bytes_of(content: Any) -> int:
    if isinstance(content, Snapshot):
        content = content.vector
    return sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(content))


def run(
    training: Training,
    method: Method,
    nodes: int,
    locals: int,
    steps: int,
    network: Network = NETWORKS["free"],
    speeds: Speeds | None = None,
    seed: int = 0,
    timeout: float = 60.0,
    loss: float = 0.0,
    drops: Mapping[int, float] | None = None,
    joins: Mapping[int, float] | None = None,
    hangs: Mapping[int, float] | None = None,
    collectives: bool = False,
    observe: Callable[[Worker], Any] = lambda worker: None,
) -> Simulated:
    """Trains with all workers under simulated time.

    Args:
      training: what a worker trains, with real steps.
      method: decides when it communicates.
      nodes, locals: the grid of workers; the coordinator is on node 0.
      steps: per worker, on average if the method has a budget.
      network: the links. Defaults to a network on which nothing takes time.
      speeds: how long steps take.
      seed: decides the speeds and the losses of messages.
      timeout: seconds that a worker waits for another one.
      loss: probability that a request to another worker is lost, so that the worker gives
        up after `timeout`.
      drops: workers that fail, and when.
      joins: workers that come, or come back, and when.
      hangs: workers that take no more steps, but answer, and when.
      collectives: whether groups elect and broadcast by collectives, as a synchronous
        program does, instead of through the coordinator and from worker to worker.
      observe: called with a worker after each of its steps.

    Raises:
      RuntimeError: all workers wait for each other for ever.
    """
    given = dict(drops or {}), dict(joins or {}), dict(hangs or {})

    async def conduct() -> Simulated:
        coordinator = Coordinator(nodes * locals, steps, method.period)
        simulation = Simulation(
            nodes,
            locals,
            coordinator,
            network,
            speeds or Speeds(),
            seed,
            timeout,
            loss,
            collectives,
        )
        return await _conduct(simulation, training, method, steps, given, observe)

    return run_virtual(conduct())


async def _conduct(
    simulation: Simulation,
    training: Training,
    method: Method,
    steps: int,
    given: Sequence[Mapping[int, float]],
    observe: Callable[[Worker], Any],
) -> Simulated:
    """Starts, drops and stops workers at their times, until all have ended."""
    drops, joins, hangs = given
    workers: dict[int, Worker] = {}
    ends: list[tuple[int, asyncio.Task]] = []
    last = 0.0

    async def take_part(worker: Worker) -> None:
        nonlocal last
        await work(worker, observe)
        last = simulation.now()
        await worker.tell()
        await worker.transport.finish()

    def begin(i: int) -> None:
        workers[i] = Worker(training, method, simulation.enter(i, method), steps)
        task = asyncio.ensure_future(take_part(workers[i]))
        ends.append((i, simulation.own(i, task)))

    for i in range(simulation.nodes * simulation.locals):
        if i in joins and not drops.get(i, math.inf) < joins[i]:
            simulation.down.add(i)
            simulation.coordinator.leave(i)
        else:
            begin(i)
    changes = [(t, simulation.drop, i) for i, t in drops.items()]
    changes += [(t, begin, i) for i, t in joins.items()]
    changes += [(t, simulation.hung.add, i) for i, t in hangs.items()]
    for t, change, i in sorted(changes, key=lambda x: x[0]):
        await asyncio.sleep(t - simulation.now())
        change(i)
    still = lambda: [e for i, e in ends if not e.done() and i not in simulation.hung]
    while awaited := still():
        done, _ = await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        for end in done:
            if not end.cancelled():
                end.result()  # raises what has ended it
    sent = simulation.links.sent
    return Simulated([worker for _, worker in sorted(workers.items())], last, sent)


def first_worker(
    training: Training, method: Method, nodes: int, locals: int, steps: int
) -> Worker:
    """Worker 0 of a run before its first step, by itself: its state and its checks.

    Args:
      training: `step` is not called.
      method, nodes, locals, steps: as for `run`.
    """

    async def begin() -> Worker:
        coordinator = Coordinator(nodes * locals, steps, method.period)
        given = NETWORKS["free"], Speeds(), 0, 60.0, 0.0, False
        simulation = Simulation(nodes, locals, coordinator, *given)
        worker = Worker(training, method, simulation.enter(0, method), steps)
        worker.keep()
        return worker

    return run_virtual(begin())
