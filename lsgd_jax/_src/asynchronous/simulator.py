"""Workers under simulated time: an engine on SimPy, with real steps on one device.

The methods run as they are; what passes while they wait is simulated time. All is decided
by the seed: two runs give the same parameters and the same times.
"""

from collections.abc import Callable, Coroutine, Generator, Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import simpy

from lsgd_jax._src.asynchronous.compression import Compression
from lsgd_jax._src.asynchronous.coordinator import Coordinator
from lsgd_jax._src.asynchronous.errors import Behind
from lsgd_jax._src.asynchronous.network import Links, Network
from lsgd_jax._src.asynchronous.place import Place
from lsgd_jax._src.asynchronous.simulated_ports import Failure, Meeting, SimulatedPorts
from lsgd_jax._src.asynchronous.speeds import Speeds
from lsgd_jax._src.asynchronous.worker import Method, Training, Worker, work
from lsgd_jax._src.wire import WireFormat


class Simulated(NamedTuple):
    """A run that was simulated.

    Attributes:
      workers: as they ended; of one that was lost, as it was then.
      seconds: when the last one ended.
      sent: bytes that left each node, [nodes].
    """

    workers: list[Worker]
    seconds: float
    sent: np.ndarray


class Simulation:
    """All workers of a run, their clock, their network and their coordinator.

    The arguments are those of `run`.
    """

    def __init__(
        self,
        nodes: int,
        locals: int,
        steps: int,
        period: int | None,
        network: Network,
        speeds: Speeds,
        seed: int,
        grace: float,
        loss: float,
        collectives: bool,
        wire: WireFormat,
    ):
        self.environment, self.grace, self.loss = simpy.Environment(), grace, loss
        self.nodes, self.locals, self.collectives = nodes, locals, collectives
        self.wire = Compression(wire)
        self.coordinator = Coordinator(nodes * locals, steps, period)
        self.links = Links(self.environment, network, nodes, locals)
        self.seconds = [speeds.of(i, seed) for i in range(nodes * locals)]
        self.random = np.random.default_rng([seed, nodes * locals])
        self.down: set[int] = set()
        self.ports: dict[int, SimulatedPorts] = {}
        self._meetings: dict[Hashable, Meeting] = {}
        self._served = 0.0
        self._processes: dict[int, list[simpy.Process]] = {}

    # Workers

    def enter(self, i: int) -> SimulatedPorts:
        """The ports of a worker that is there from now on."""
        self.down.discard(i)
        self.links.stuck.discard(i)
        self.ports[i] = SimulatedPorts(self, Place(i, self.nodes, self.locals))
        return self.ports[i]

    def drop(self, i: int) -> None:
        """A worker does nothing and does not answer from now on."""
        self.down.add(i)
        self.links.stuck.add(i)
        self.links.changed()
        for process in self._processes.pop(i, []):
            if process.is_alive:
                process.interrupt()

    def drive(self, coroutine: Coroutine, owner: int) -> simpy.Process:
        """Runs a coroutine: its end, with what it returns or the `Failure` it ended in."""
        process = self.environment.process(_driving(coroutine))
        alive = [other for other in self._processes.get(owner, []) if other.is_alive]
        self._processes[owner] = [*alive, process]
        return process

    # Rounds

    def meet(
        self,
        key: Hashable,
        i: int,
        value: Any,
        members: Iterable[int],
        conclude: Callable[[dict[int, Any]], Any] | None = None,
    ) -> Any:
        """Worker i brings a value to a round: the event of its end.

        The round is the coordinator's, see `Ports.round`; or, if `conclude` is given, a
        collective, in which what all have brought becomes an event that ends it.
        """
        try:
            over = self.coordinator.look(key)
            given = value if conclude is None else None  # nothing large is remembered
            self.coordinator.arrive(key, i, given, members)
        except KeyError:
            return self._at_once(Failure(Behind(f"the round {key} is long over")))
        if over is not None:
            late = Failure(Behind(f"worker {i} came too late for {key}"))
            return self._at_once(over if conclude is None else late)
        if key not in self._meetings:
            self._meetings[key] = Meeting(self.environment.event(), {}, conclude)
            timer = self.environment.timeout(self.grace)
            timer.callbacks.append(lambda _: self._close(key))
        meeting = self._meetings[key]
        meeting.brought[i] = value
        self._end([key])
        return meeting.event

    def _at_once(self, value: Any) -> simpy.Event:
        return self.environment.event().succeed(value)

    def _close(self, key: Hashable) -> None:
        if key in self._meetings:
            self.coordinator.close(key)
            self._end(list(self._meetings))  # who is absent is so from all of them

    def _end(self, keys: Iterable[Hashable]) -> None:
        for key in keys:
            if key in self._meetings and (came := self.coordinator.look(key)) is not None:
                meeting = self._meetings.pop(key)
                if meeting.conclude is None:
                    meeting.event.succeed(came)
                else:
                    brought = {i: meeting.brought[i] for i in came}
                    after = meeting.conclude(brought)
                    after.callbacks.append(lambda e, m=meeting: m.event.succeed(e.value))

    def miss(self, i: int) -> None:
        """A worker was asked in vain: rounds do not wait for it."""
        self.coordinator.leave(i)
        self._end(list(self._meetings))

    def service(self) -> simpy.Event:
        """The coordinator has served one more call, after those that came before."""
        now = self.environment.now
        self._served = max(now, self._served) + self.links.network.coordinator
        return self.environment.timeout(self._served - now)


def _driving(coroutine: Coroutine) -> Generator[simpy.Event, Any, Any]:
    try:
        while True:
            yield coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    except simpy.Interrupt:
        coroutine.close()
    except Exception as error:
        return Failure(error)


def run(
    training: Training,
    method: Method,
    nodes: int,
    locals: int,
    steps: int,
    network: Network,
    speeds: Speeds | None = None,
    seed: int = 0,
    grace: float = 60.0,
    loss: float = 0.0,
    drops: Mapping[int, float] | None = None,
    joins: Mapping[int, float] | None = None,
    collectives: bool = False,
    wire: WireFormat = "float32",
    observe: Callable[[Worker], Any] = lambda worker: None,
) -> Simulated:
    """Trains with all workers under simulated time.

    Args:
      training: what a worker trains, with real steps.
      method: when it speaks to others.
      nodes, locals: the grid of workers; the coordinator is on node 0.
      steps: per worker, on average if the method has a budget.
      network: the links.
      speeds: how long steps take.
      seed: decides the speeds and the losses of messages.
      grace: seconds that a worker waits for another one.
      loss: probability that what a worker asks of another one is lost, so that it gives
        up after `grace`.
      drops: workers that are lost, and when.
      joins: workers that come, or come back, and when.
      collectives: whether groups elect and broadcast by collectives, as a synchronous
        program does, instead of through the coordinator and from worker to worker.
      wire: how vectors travel: see `Compression`.
      observe: called with a worker after each of its steps.
    """
    speeds, drops, joins = speeds or Speeds(), drops or {}, joins or {}
    simulation = Simulation(
        nodes,
        locals,
        steps,
        method.period,
        network,
        speeds,
        seed,
        grace,
        loss,
        collectives,
        wire,
    )
    environment = simulation.environment
    workers: dict[int, Worker] = {}
    ends: list[simpy.Process] = []
    last = [0.0]

    async def take_part(worker: Worker) -> None:
        await work(worker, observe)
        last[0] = environment.now

    def begin(i: int) -> None:
        workers[i] = Worker(training, method, simulation.enter(i), steps)
        ends.append(simulation.drive(take_part(workers[i]), i))

    def conduct():
        for i in range(nodes * locals):
            if i in joins and not drops.get(i, np.inf) < joins[i]:
                simulation.down.add(i)
                simulation.coordinator.leave(i)
            else:
                begin(i)
        changes = [(t, simulation.drop, i) for i, t in drops.items()]
        changes += [(t, begin, i) for i, t in joins.items()]
        for t, change, i in sorted(changes, key=lambda x: x[0]):
            yield environment.timeout(t - environment.now)
            change(i)
        for end in ends:
            if isinstance(value := (yield end), Failure):
                raise value.error

    environment.run(until=environment.process(conduct()))
    sent = simulation.links.sent
    return Simulated([worker for _, worker in sorted(workers.items())], last[0], sent)
