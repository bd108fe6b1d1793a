"""Asynchronous workers under simulated time, with real steps in one process.

The methods run unchanged, on an event loop of virtual time. The seed decides everything:
two runs give the same parameters and the same times.
"""

import asyncio
import dataclasses
import functools
import math
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lsgd_jax._src.asynchronous.engine.collective import Collectives
from lsgd_jax._src.asynchronous.engine.contents import nbytes
from lsgd_jax._src.asynchronous.engine.coordinator import Coordinator
from lsgd_jax._src.asynchronous.engine.errors import UnreachableError
from lsgd_jax._src.asynchronous.engine.mailbox import Mailbox
from lsgd_jax._src.asynchronous.engine.transport import GridPosition, Transport
from lsgd_jax._src.asynchronous.engine.worker import Method, Training, Worker, work
from lsgd_jax._src.asynchronous.simulated.clock import run_virtual
from lsgd_jax._src.asynchronous.simulated.collectives import Meeting, Rings
from lsgd_jax._src.asynchronous.simulated.network import NETWORKS, Links, Network
from lsgd_jax._src.asynchronous.simulated.speeds import Speeds


Times = Mapping[int, float | Sequence[float]]  # seconds, by worker


class SimulatedMailbox(Mailbox):
    """A mailbox that tells coroutines when there is more in it."""

    def __init__(self, wire: Any, index: int):
        super().__init__(wire, index)
        self._awaited: dict[Hashable, asyncio.Future] = {}

    def more(self, key: Hashable | None) -> asyncio.Future:
        """Returns a future of the next post under a key, or of the next `show` (None)."""
        if key not in self._awaited:
            self._awaited[key] = asyncio.get_running_loop().create_future()
        return self._awaited[key]

    def _tell(self, key: Hashable | None) -> None:
        future = self._awaited.pop(key, None)
        if future is not None:
            future.set_result(None)


class SimulatedTransport(Transport):
    """One worker's transport: calls take the time of the network."""

    mailbox: Any

    def __init__(self, simulation: "Simulation", index: int):
        self.position = GridPosition(index, simulation.nodes, simulation.locals)
        self.timeout = simulation.timeout
        self._simulation = simulation
        self._index = index
        self.mailbox = SimulatedMailbox(simulation.method.wire, index)

    @functools.cached_property
    def collectives(self) -> Collectives:
        return Rings(self, self._simulation)

    def now(self) -> float:
        return self._simulation.now()

    async def step(self, compute: Callable[[], None]) -> None:
        compute()
        await asyncio.sleep(self._simulation.seconds[self._index]())
        # A hung worker still answers, because its mailbox is another task.
        while self._index in self._simulation.hung:
            await asyncio.sleep(self.timeout)

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task:
        task = super().start(coroutine)
        # Tasks of the worker, which end with it.
        tasks = self._simulation.tasks.setdefault(self._index, set())
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        return task

    async def ask_peer(self, peer: int, call: str, *arguments: Any) -> Any:
        """The request travels, the peer answers as soon as it can, the answer travels."""
        simulation = self._simulation
        me = self._index
        limit = self.now() + self.timeout
        is_lost = simulation.loss and simulation.random.random() < simulation.loss
        came = await simulation.links.send(me, peer, nbytes(arguments), limit)
        key = arguments[0] if call == "fetch" else None
        answer = None
        while came and not is_lost and peer not in simulation.down:
            mailbox = simulation.transports[peer].mailbox
            answer = getattr(mailbox, call)(*arguments)
            if answer is not None:
                break
            try:
                more = asyncio.shield(mailbox.more(key))
                await asyncio.wait_for(more, limit - self.now())
            except TimeoutError:
                break
        if answer is not None:
            if await simulation.links.send(peer, me, nbytes(answer), limit):
                return answer
        # A worker cannot tell a lost request from a slow peer: it waits for the whole
        # timeout.
        await asyncio.sleep(max(limit - self.now(), 0))
        raise UnreachableError(f"worker {peer} did not answer within {self.timeout:g} s")

    async def ask_coordinator(self, call: str, *arguments: Any) -> Any:
        """The call travels to worker 0's node, waits its turn, and the answer travels."""
        simulation = self._simulation
        me = self._index
        await simulation.links.send(me, 0, 0, math.inf)
        now = self.now()
        seconds = simulation.network.coordinator
        # One call at a time: a call that comes while another one is served waits for it.
        simulation.served = max(now, simulation.served) + seconds
        await asyncio.sleep(simulation.served - now)
        answer = getattr(simulation.coordinator, call)(me, *arguments)
        if call == "round":
            answer = await answer
        await simulation.links.send(me, 0, 0, math.inf)
        return answer


class Simulated(NamedTuple):
    """The outcome of a simulated run.

    Attributes:
      workers: in their last state; a failed worker in its state when it failed.
      seconds: when the last one ended, or `until` if that came first.
      sent: bytes that left each node, [nodes].
    """

    workers: list[Worker]
    seconds: float
    sent: np.ndarray


@dataclasses.dataclass
class Simulation:
    """All workers of a run, their network and their coordinator; arguments as for `run`."""

    method: Method
    nodes: int
    locals: int
    steps: int
    network: Network = NETWORKS["free"]
    speeds: Speeds | None = None
    seed: int = 0
    timeout: float = 60.0
    loss: float = 0.0
    collectives: bool = False

    def __post_init__(self):
        count = self.nodes * self.locals
        speeds = self.speeds or Speeds()
        self.coordinator = Coordinator(count, self.steps, self.method.period, self.timeout)
        self.links = Links(self.network, self.nodes, self.locals)
        self.seconds = [speeds.of(i, self.seed) for i in range(count)]
        self.random = np.random.default_rng([self.seed, count])
        self.down: set[int] = set()
        self.hung: set[int] = set()
        self.transports: dict[int, SimulatedTransport] = {}
        self.meetings: dict[Hashable, Meeting] = {}
        self.served = 0.0  # when the coordinator will have served all calls so far
        self.tasks: dict[int, set[asyncio.Task]] = {}

    def now(self) -> float:
        """Returns the seconds since the run began."""
        return asyncio.get_running_loop().time()

    def enter(self, training: Training, i: int) -> Worker:
        """Returns worker i, which is there from now on."""
        self.down.discard(i)
        self.links.stuck.discard(i)
        self.transports[i] = SimulatedTransport(self, i)
        return Worker(training, self.method, self.transports[i], self.steps)

    def drop(self, i: int) -> None:
        """Lets worker i fail: from now on it does nothing and does not answer."""
        self.down.add(i)
        self.links.stuck.add(i)
        self.links.changed()
        for task in self.tasks.pop(i, ()):
            task.cancel()

    async def run(
        self,
        training: Training,
        drops: Times,
        joins: Times,
        hangs: Mapping[int, float],
        until: float,
        observe: Callable[[Worker], Any],
    ) -> Simulated:
        """Starts, drops and stops workers at their times, until all have ended."""
        everyone = range(self.nodes * self.locals)
        workers = dict[int, Worker]()
        ends: list[tuple[int, asyncio.Task]] = []
        last = 0.0

        async def take_part(worker: Worker) -> None:
            nonlocal last
            await work(worker, observe)
            last = self.now()
            await worker.finish()

        def begin(i: int) -> None:
            workers[i] = self.enter(training, i)
            ends.append((i, workers[i].transport.start(take_part(workers[i]))))

        def stop(i: int) -> None:
            nonlocal last
            if any(not end.done() for j, end in ends if j == i):
                last = until
            self.drop(i)

        lost = _listed(drops)
        came = _listed(joins)
        for i in everyone:
            if i in came and not min(lost.get(i, [math.inf])) < min(came[i]):
                self.down.add(i)
                self.coordinator.leave(i)
            else:
                begin(i)
        changes = [(t, self.drop, i) for i, times in lost.items() for t in times]
        changes += [(t, begin, i) for i, times in came.items() for t in times]
        changes += [(t, self.hung.add, i) for i, t in hangs.items()]
        changes = [change for change in changes if change[0] < until]
        if math.isfinite(until):
            changes += [(until, stop, i) for i in everyone]
        for t, change, i in sorted(changes, key=lambda x: x[0]):
            await asyncio.sleep(t - self.now())
            change(i)
        await self._end_of(ends)
        ended = [worker for _, worker in sorted(workers.items())]
        return Simulated(ended, last, self.links.sent)

    async def _end_of(self, ends: list[tuple[int, asyncio.Task]]) -> None:
        """Waits for the tasks of all workers that do not hang; raises their errors."""
        while True:
            awaited = [e for i, e in ends if not e.done() and i not in self.hung]
            if not awaited:
                break
            done, _ = await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            for end in done:
                if not end.cancelled():
                    end.result()


def _listed(times: Times) -> dict[int, list[float]]:
    """Returns the times of each worker as a list."""
    return {i: list(t) if isinstance(t, Sequence) else [t] for i, t in times.items()}


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
    drops: Times | None = None,
    joins: Times | None = None,
    hangs: Mapping[int, float] | None = None,
    collectives: bool = False,
    observe: Callable[[Worker], Any] = lambda worker: None,
    until: float = math.inf,
) -> Simulated:
    """Trains with all workers under simulated time.

    Args:
      training: the training of a worker, with real steps.
      method: decides when it communicates.
      nodes, locals: the grid of workers; the coordinator is on node 0.
      steps: per worker, on average if the method has a budget.
      network: the links. Defaults to a network on which nothing takes time.
      speeds: how long steps take.
      seed: decides the speeds and the losses of messages.
      timeout: seconds that a worker waits for another one.
      loss: probability that a request to another worker is lost, so that the worker gives
        up after `timeout`.
      drops: workers that fail, and when: a time each, or several.
      joins: workers that come, or come back, and when: a time each, or several.
      hangs: workers that take no more steps, but answer, and when.
      collectives: whether groups elect and broadcast by collectives, as a synchronous
        program does, instead of through the coordinator and from worker to worker.
      observe: called with a worker after each of its steps.
      until: seconds after which the run ends, whatever steps are left. Defaults to no end.

    Raises:
      RuntimeError: all workers wait for each other for ever.
    """
    simulation = Simulation(
        method,
        nodes,
        locals,
        steps,
        network=network,
        speeds=speeds,
        seed=seed,
        timeout=timeout,
        loss=loss,
        collectives=collectives,
    )
    training_of_all = simulation.run(
        training, drops or {}, joins or {}, hangs or {}, until, observe
    )
    return run_virtual(training_of_all)


def first_worker(
    training: Training, method: Method, nodes: int, locals: int, steps: int
) -> Worker:
    """Returns worker 0 of a run before its first step: its state, after all checks.

    Args:
      training: `step` is not called.
      method, nodes, locals, steps: as for `run`.
    """
    worker = Simulation(method, nodes, locals, steps).enter(training, 0)
    worker.keep()
    return worker
