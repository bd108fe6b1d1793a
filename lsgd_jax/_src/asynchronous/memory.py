"""Workers in one thread, taking turns: an engine without a network, for tests.

A worker waits only for what others have not done yet, and for the seconds that a step or an
answer is said to take; these are counted, not spent.
"""

import dataclasses
import inspect
from collections.abc import Callable, Collection, Coroutine, Hashable, Sequence
from typing import Any

import numpy as np

from lsgd_jax._src.asynchronous.compression import Compression
from lsgd_jax._src.asynchronous.coordinator import Coordinator, Report
from lsgd_jax._src.asynchronous.errors import Behind, Unreachable
from lsgd_jax._src.asynchronous.mailbox import Mailbox
from lsgd_jax._src.asynchronous.ports import Pending, Place, Ports
from lsgd_jax._src.asynchronous.worker import Method, Training, Worker, work
from lsgd_jax._src.wire import WireFormat


class Lost(Exception):
    """Ends a worker that is lost in the middle of its own turn."""


class Memory:
    """All workers of a run, their clock and their coordinator.

    Args:
      nodes, locals: the grid of workers.
      steps, period: as for `Coordinator`.
      step_seconds: of each worker, how long a step takes; one for all if it is a number.
      grace: seconds that a worker waits for another one.
      latency: seconds that the answer of a worker takes.
      wire: how vectors travel: see `Compression`.

    Attributes:
      now: seconds since the run began.
      lost: workers that do nothing and do not answer from now on.
      hung: workers that do nothing, but answer.
      ports: of each worker.
    """

    def __init__(
        self,
        nodes: int,
        locals: int,
        steps: int,
        period: int | None = None,
        step_seconds: float | Sequence[float] = 1.0,
        grace: float = 10.0,
        latency: float = 0.0,
        wire: WireFormat = "float32",
    ):
        count = nodes * locals
        given = isinstance(step_seconds, int | float)
        self.step_seconds = [step_seconds] * count if given else list(step_seconds)
        self.now, self.grace, self.latency = 0.0, grace, latency
        self.wire = Compression(wire)
        self.coordinator = Coordinator(count, steps, period)
        self.lost: set[int] = set()
        self.hung: set[int] = set()
        self.ports = [MemoryPorts(self, Place(i, nodes, locals)) for i in range(count)]
        self.tasks: list[Task] = []

    def start(self, coroutine: Coroutine[Any, Any, Any], owner: int) -> "Task":
        """Adds a coroutine to those that take turns."""
        task = Task(self, coroutine, owner)
        self.tasks.append(task)
        return task

    def lose(self, i: int) -> None:
        """Worker i is lost: what it was at stays undone."""
        self.lost.add(i)
        for task in self.tasks:
            if task.owner == i:
                task.end()

    def again(self, i: int) -> "MemoryPorts":
        """The ports of worker i, which was lost and is started again."""
        self.lost.discard(i)
        self.ports[i] = MemoryPorts(self, self.ports[i].place)
        return self.ports[i]

    def run(self) -> None:
        """Lets all take turns until none is left but those that are lost or hang."""
        while tasks := [t for t in self.tasks if not t.ended and t.owner not in self.hung]:
            ready = [task for task in tasks if task.is_ready]
            for task in ready:
                if not task.ended and task.owner not in self.hung:
                    task.turn()
            if not ready:
                self.now = min(task.until for task in tasks)
            self.tasks = [task for task in self.tasks if not task.ended]


class Answer(Pending):
    """What `ask` gives as soon as it is not None, or what `late` makes of a late one."""

    def __init__(
        self,
        memory: Memory,
        ask: Callable[[], Any],
        limit: float,
        late: Callable[[], Any],
        latency: float = 0.0,
    ):
        self._memory, self._ask, self._late = memory, ask, late
        self._limit, self._latency = memory.now + limit, latency
        self._found, self._arrives = ask(), memory.now + latency

    @property
    def until(self) -> float:
        """When the wait for it ends, as far as it is known."""
        return self._limit if self._found is None else self._arrives

    @property
    def done(self) -> bool:
        if self._found is None and (found := self._ask()) is not None:
            self._found, self._arrives = found, self._memory.now + self._latency
        return self._memory.now >= self.until

    def __await__(self):
        while not self.done:
            yield self
        return self._late() if self._found is None else self._found[0]


class Task(Pending):
    """A coroutine that takes turns."""

    def __init__(self, memory: Memory, coroutine: Coroutine[Any, Any, Any], owner: int):
        self._coroutine, self._memory, self.owner = coroutine, memory, owner
        self.waits_for: Answer | Task | None = None
        self.ended, self._result = False, None
        self.error: Exception | None = None

    @property
    def is_ready(self) -> bool:
        """Whether its turn would get it any further."""
        return self.waits_for is None or self.waits_for.done

    @property
    def until(self) -> float:
        """When what it waits for is given up."""
        return float("inf") if self.waits_for is None else self.waits_for.until

    def turn(self) -> None:
        """Runs it until it must wait."""
        try:
            self.waits_for = self._coroutine.send(None)
        except StopIteration as stop:
            self.ended, self._result = True, stop.value
        except Exception as error:
            self.ended, self.error = True, error

    def end(self) -> None:
        """Ends it wherever it is."""
        self.ended = True
        if inspect.getcoroutinestate(self._coroutine) != inspect.CORO_RUNNING:
            self._coroutine.close()

    @property
    def done(self) -> bool:
        return self.ended

    def __await__(self):
        while not self.ended:
            yield self
        if self.error is not None:
            raise self.error
        return self._result


class MemoryPorts(Ports):
    """One worker's ports."""

    def __init__(self, memory: Memory, place: Place):
        self.place, self.grace = place, memory.grace
        self.mailbox = Mailbox(memory.wire)
        self._memory = memory

    def now(self) -> float:
        return self._memory.now

    def stepped(self) -> Pending:
        return self.sleep(self._memory.step_seconds[self.place.index])

    def sleep(self, seconds: float) -> Pending:
        return Answer(self._memory, lambda: None, seconds, late=lambda: None)

    def start(self, coroutine) -> Pending:
        return self._memory.start(coroutine, self.place.index)

    def latest(self, peer: int) -> Pending:
        return self._peer(peer, lambda mailbox: mailbox.latest())

    def exchange(self, peer: int, vector: np.ndarray) -> Pending:
        wire = self.mailbox.wire
        self.mailbox.bytes_sent += wire.nbytes(vector.size)
        vector = wire.arrived(vector)
        return self._peer(peer, lambda mailbox: mailbox.exchange(vector))

    def fetch(self, peer: int, key: Hashable, part: slice = slice(None)) -> Pending:
        return self._peer(peer, lambda mailbox: mailbox.read(key, part))

    def contribution(self, peer: int, number: int) -> Pending:
        return self._peer(peer, lambda mailbox: mailbox.contribution(number))

    def state(self, peer: int) -> Pending:
        return self._peer(peer, lambda mailbox: mailbox.state())

    def enter(self, steps: int) -> Pending:
        return self._coordinator(lambda c: c.enter(self.place.index, steps))

    def claim(self, step: int) -> Pending:
        return self._coordinator(lambda c: c.claim(self.place.index, step))

    def missed(self, peer: int) -> Pending:
        return self._coordinator(lambda c: c.leave(peer))

    def report(self, report: Report) -> Pending:
        report = dataclasses.replace(report)  # as it is now
        return self._coordinator(lambda c: c.report(self.place.index, report))

    def round(self, key: Hashable, value: Any, members: Collection[int]) -> Pending:
        coordinator = self._memory.coordinator
        try:
            coordinator.arrive(key, self.place.index, value, members)
        except KeyError:
            return self._raising(Behind(f"the round {key} is long over"))
        look = lambda: _found(coordinator.look(key))
        return Answer(self._memory, look, self.grace, lambda: coordinator.close(key))

    def _coordinator(self, call: Callable[[Coordinator], Any]) -> Pending:
        result = call(self._memory.coordinator)
        return Answer(self._memory, lambda: (result,), 0, lambda: result)

    def _raising(self, error: Exception) -> Pending:
        def late():
            raise error

        return Answer(self._memory, lambda: None, 0, late)

    def _peer(self, peer: int, call: Callable[[Mailbox], Any]) -> Pending:
        memory = self._memory

        def ask():
            there = peer not in memory.lost
            if not there:
                return None
            return _found(memory.wire.arrived(call(memory.ports[peer].mailbox)))

        def late():
            raise Unreachable(f"worker {peer} did not answer within {self.grace:g} s")

        return Answer(memory, ask, self.grace, late, memory.latency)


def _found(value: Any) -> tuple[Any] | None:
    return None if value is None else (value,)


def run(
    training: Training,
    method: Method,
    nodes: int,
    locals: int,
    steps: int,
    observe: Callable[[Worker], Any] = lambda worker: None,
    events: Callable[[Memory, Worker], Any] = lambda memory, worker: None,
    restarts: bool = False,
    **options: Any,
) -> list[Worker]:
    """Trains with all workers in one thread: the workers as they ended.

    Args:
      training, method, nodes, locals, steps, observe: as for every engine.
      events: called after every step, too, to lose workers or to have them hang.
      restarts: whether a worker that is lost is started again, as long as others are there.
      **options: of `Memory`.
    """
    memory = Memory(nodes, locals, steps, method.period, **options)
    tasks: dict[int, Task] = {}
    workers: dict[int, Worker] = {}

    def begin(ports: MemoryPorts) -> None:
        i = ports.place.index
        workers[i] = Worker(training, method, ports, steps)
        tasks[i] = memory.start(work(workers[i], after_step), i)

    def after_step(worker: Worker) -> None:
        if restarts:
            for i in sorted(memory.lost):
                begin(memory.again(i))
        events(memory, worker)
        if worker.index in memory.lost:
            raise Lost
        observe(worker)

    for ports in list(memory.ports):
        begin(ports)
    memory.run()
    for task in tasks.values():
        if task.error is not None and not isinstance(task.error, Lost):
            raise task.error
    return [worker for _, worker in sorted(workers.items())]
