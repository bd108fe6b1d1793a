"""Workers in one thread, taking turns: an engine without a network, for tests.

What is sent has arrived; a worker waits only for what others have not done yet. Time is
counted in the seconds that a step is said to take.
"""

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Any

from lsgd_jax.asynchronous.coordinator import Coordinator
from lsgd_jax.asynchronous.errors import Behind, Unreachable
from lsgd_jax.asynchronous.mailbox import Mailbox
from lsgd_jax.asynchronous.ports import Pending, Place, Ports
from lsgd_jax.asynchronous.worker import Method, Training, Worker, work


class Memory:
    """All workers of a run, their clock and their coordinator.

    Args:
      nodes, locals: the grid of workers.
      steps, period: as for `Coordinator`.
      step_seconds: of each worker, how long a step takes; one for all if it is a number.
      grace: seconds that a worker waits for another one.

    Attributes:
      now: seconds since the run began.
      lost: workers that do nothing and do not answer from now on.
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
    ):
        count = nodes * locals
        given = isinstance(step_seconds, int | float)
        self.step_seconds = [step_seconds] * count if given else list(step_seconds)
        self.now, self.grace = 0.0, grace
        self.coordinator = Coordinator(count, steps, period)
        self.lost: set[int] = set()
        self.ports = [MemoryPorts(self, Place(i, nodes, locals)) for i in range(count)]
        self.tasks: list[Task] = []

    def start(self, coroutine: Any, owner: int) -> "Task":
        """Adds a coroutine to those that take turns."""
        task = Task(self, coroutine, owner)
        self.tasks.append(task)
        return task

    def run(self) -> None:
        """Lets all take turns until none is left; what the lost were at stays undone."""
        while tasks := [t for t in self.tasks if not t.ended and t.owner not in self.lost]:
            ready = [task for task in tasks if task.is_ready]
            for task in ready:
                if task.owner not in self.lost:
                    task.turn()
            if not ready:
                self.now = min(task.waits_for.until for task in tasks)
            self.tasks = [task for task in self.tasks if not task.ended]


class Answer(Pending):
    """What `ask` gives as soon as it is not None, or what `late` makes of a late one."""

    def __init__(
        self,
        memory: Memory,
        ask: Callable[[], Any],
        limit: float,
        late: Callable[[], Any],
    ):
        self._memory, self._ask, self._late = memory, ask, late
        self.until, self._found = memory.now + limit, None

    @property
    def done(self) -> bool:
        if self._found is None:
            self._found = self._ask()
        return self._found is not None or self._memory.now >= self.until

    def __await__(self):
        while not self.done:
            yield self
        return self._late() if self._found is None else self._found[0]


class Task(Pending):
    """A coroutine that takes turns."""

    def __init__(self, memory: Memory, coroutine: Any, owner: int):
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
        self.place, self.grace, self.mailbox = place, memory.grace, Mailbox()
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

    def exchange(self, peer: int, vector) -> Pending:
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

    def report(self, report) -> Pending:
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
        def ask():
            there = peer not in self._memory.lost
            return _found(call(self._memory.ports[peer].mailbox)) if there else None

        def late():
            raise Unreachable(f"worker {peer} did not answer within {self.grace:g} s")

        return Answer(self._memory, ask, self.grace, late)


def _found(value: Any) -> tuple[Any] | None:
    return None if value is None else (value,)


def run(
    training: Training,
    method: Method,
    nodes: int,
    locals: int,
    steps: int,
    observe: Callable[[Worker], Any] = lambda worker: None,
    **options: Any,
) -> list[Worker]:
    """Trains with all workers in one thread: the workers as they ended; see `Memory`."""
    memory = Memory(nodes, locals, steps, method.period, **options)
    workers = [Worker(training, method, ports, steps) for ports in memory.ports]
    tasks = [memory.start(work(w, observe), w.index) for w in workers]
    memory.run()
    for task in tasks:
        if task.error is not None:
            raise task.error
    return workers
