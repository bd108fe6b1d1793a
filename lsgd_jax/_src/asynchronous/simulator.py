"""Asynchronous workers under simulated time, with real steps on one device.

The methods run as they are, on an event loop of virtual time. All is decided by the seed:
two runs give the same parameters and the same times.
"""

import asyncio
import math
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lsgd_jax._src.asynchronous.clock import run_virtual
from lsgd_jax._src.asynchronous.coordinator import Coordinator
from lsgd_jax._src.asynchronous.network import NETWORKS, Links, Network
from lsgd_jax._src.asynchronous.simulated_transport import SimulatedTransport
from lsgd_jax._src.asynchronous.speeds import Speeds
from lsgd_jax._src.asynchronous.transport import GridPosition
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

    def enter(self, i: int, method: Method) -> SimulatedTransport:
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
        ends.append((i, workers[i].transport.start(take_part(workers[i]))))

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
