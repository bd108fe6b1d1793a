"""The pace of methods whose workers differ, from the engine of the simulator.

The parameters are few, and the links slower by as much, so that messages take as long as
those of the real ones. No step computes anything.
"""

import asyncio
import contextlib
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import lsgd_jax as lj
from train.planning.unequal import Unequal


LEAVES = 4  # of the parameters
SIZE = 8192  # float32 values in each leaf
NBYTES = 4 * LEAVES * SIZE
STEPS = 128  # of each worker that are simulated at least
PERIODS = 2  # that are simulated at least, where methods are asynchronous
MOST = 100_000  # steps of all workers that are simulated


class TimedExchange(NamedTuple):
    """An exchange in lock step, of which only the time counts.

    Attributes:
      seconds: from the arrival of the last worker on.
      every: steps between two of them.
      delay: steps that it may take beside computing.
      axes: of the grid along which workers exchange.
    """

    seconds: float
    every: int
    delay: int
    axes: tuple[str, ...]


class SimulatedPace(NamedTuple):
    """The pace of workers that differ.

    Attributes:
      step: seconds in which workers together take a step each, once faults are over.
      extra: seconds that the run takes beside it; fewer than 0 if faults came late.
      waiting: share of the time that workers wait, on average.
      pause: seconds of the longest wait.
      sent: share of the parameters' float32 bytes that a worker sends per step.
      peak: the same in the step that sends most.
    """

    step: float
    extra: float
    waiting: float
    pause: float
    sent: float
    peak: float


class StepTaken(NamedTuple):
    """A step of a worker that was simulated.

    Attributes:
      time: seconds at its end.
      worker: index of the worker.
      count: steps that the worker has taken.
      sent: bytes that the worker has sent.
    """

    time: float
    worker: int
    count: int
    sent: int


@dataclasses.dataclass(frozen=True)
class LockStep:
    """A method of the engine that only exchanges."""

    exchanges: tuple[TimedExchange, ...]

    period = None
    window = 1
    wire = "float32"

    def bind(self, worker: lj.asynchronous.Worker, steps: int) -> "LockStepWorker":
        """Returns the method in one worker."""
        return LockStepWorker(self.exchanges, worker, steps)


class LockStepWorker:
    """A worker that only exchanges."""

    def __init__(
        self, exchanges: Sequence[TimedExchange], worker: lj.asynchronous.Worker, steps: int
    ):
        self._exchanges = exchanges
        self._worker = worker
        self._steps = steps
        self._in_flight: list[tuple[int, asyncio.Task]] = []

    def step(self, x: Any, u: Any, loss: Any, t: int) -> Any:
        """Returns the parameters, which stay."""
        return x

    async def before_step(self) -> bool:
        """Returns whether there is another step to take."""
        return self._worker.count < self._steps

    async def after_step(self) -> None:
        """Begins the exchanges that are due, and waits for those that must have arrived."""
        params = self._worker.params
        transport = self._worker.transport
        t = self._worker.count
        for k, exchange in enumerate(self._exchanges):
            if t % exchange.every == 0:
                group = transport.position.group(exchange.axes)
                key = (k, t, *group)
                mean = transport.collectives.all_reduce(key, params, True, group)
                self._in_flight.append((t + exchange.delay, transport.start(mean)))
            await self._land(t)

    async def _land(self, t: int) -> None:
        """Waits for the exchanges that must have arrived at step t."""
        for landing, mean in list(self._in_flight):
            if landing <= t:
                self._in_flight.remove((landing, mean))
                # It fails with a member of the group: the worker goes on without it.
                with contextlib.suppress(lj.asynchronous.UnreachableError):
                    await self._worker.wait(mean)

    def state(self) -> None:
        """Returns nothing: a restarted worker needs only the count."""

    def take_over(self, state: None) -> None:
        """Forgets what is in flight."""
        self._in_flight.clear()


def still(params: Any) -> lj.asynchronous.Training:
    """Returns the training of workers whose steps do not move these parameters."""
    no_move = jax.tree.map(np.zeros_like, params)

    def start(i: int) -> tuple[Any, Any, Any]:
        return params, (), ()

    def step(params: Any, opt_state: Any, own: Any, t: int) -> tuple[Any, Any, Any, float]:
        return no_move, opt_state, own, 0.0

    return lj.asynchronous.Training(start, step)


TRAINING = still([np.zeros(SIZE, np.float32)] * LEAVES)


def lock_step(
    exchanges: Sequence[TimedExchange], grid: tuple[int, int], step: float, unequal: Unequal
) -> SimulatedPace:
    """Returns the pace of a method in lock step, for steps of so many seconds."""
    nodes, locals = grid
    seconds = {"local": 0.0, "node": 0.0}
    for exchange in exchanges:
        crosses = "node" in exchange.axes and nodes > 1
        seconds["node" if crosses else "local"] = exchange.seconds
    network = lj.asynchronous.Network(
        bandwidth=_bandwidth(nodes * locals, seconds["node"]),
        latency=0.0,
        inside_bandwidth=_bandwidth(locals, seconds["local"]),
        inside_latency=0.0,
    )
    method = LockStep(tuple(exchanges))
    period = max(exchange.every for exchange in exchanges)
    return _run(method, period, grid, network, step, unequal, sum(seconds.values()))


def _bandwidth(workers: int, seconds: float) -> float:
    """The bandwidth at which workers add up the simulated parameters in so many seconds."""
    _, size = lj.asynchronous.Network.ring(max(workers, 2), NBYTES)
    return size / max(seconds, 1e-9)


def free_running(
    method: lj.asynchronous.Method,
    period: int,
    network: lj.asynchronous.Network,
    parameters: float,
    grid: tuple[int, int],
    step: float,
    unequal: Unequal,
) -> SimulatedPace:
    """Returns the pace of an asynchronous method for so many parameters."""
    smaller = network.scaled(LEAVES * SIZE / parameters)
    return _run(method, period, grid, smaller, step, unequal)


def _run(
    method: Any,
    period: int,
    grid: tuple[int, int],
    network: lj.asynchronous.Network,
    step: float,
    unequal: Unequal,
    exchange: float | None = None,
) -> SimulatedPace:
    """Simulates a method; `exchange` has the seconds of its exchanges in lock step."""
    workers = math.prod(grid)
    events = [*unequal.drop.values(), *unequal.join.values()]
    last = max(events, default=0.0)
    steps = _steps(period, step, events, PERIODS if exchange is None else 1)
    if steps * workers > MOST:
        raise ValueError(
            f"`drop` and `join` must be within the first {MOST / workers * step:,.0f} s to "
            f"be simulated, got {last:g}"
        )
    taken: list[StepTaken] = []

    def observe(worker: lj.asynchronous.Worker) -> None:
        now = worker.transport.now()
        sent = worker.transport.mailbox.bytes_sent
        taken.append(StepTaken(now, worker.index, worker.count, sent))

    found = lj.asynchronous.simulator.run(
        TRAINING,
        method,
        *grid,
        steps,
        network=network,
        speeds=unequal.speeds(step),
        timeout=_timeout(period, step, unequal, exchange) if events else math.inf,
        drops=unequal.drop,
        joins=unequal.join,
        collectives=exchange is not None,
        observe=observe,
    )
    since = _settled(taken, last, period) if events else 0.0
    after = sum(each.time > since for each in taken)
    pace = workers * (found.seconds - since) / after
    reports = [worker.report for worker in found.workers]
    sent = [_sent(taken, i) for i in range(workers)]
    return SimulatedPace(
        step=pace,
        extra=found.seconds - pace * len(taken) / workers,
        waiting=float(np.mean([report.waited for report in reports])) / found.seconds,
        pause=max(report.longest for report in reports),
        sent=sum(each[-1] for each in sent) / len(taken) / NBYTES,
        peak=float(max(np.diff(each).max(initial=0) for each in sent)) / NBYTES,
    )


def _steps(period: int, step: float, events: Sequence[float], least: int) -> int:
    """The number of steps of each worker that are simulated, at least `least` periods."""
    last = max(events, default=0.0)
    periods = math.ceil(max(STEPS / period, least, last / step / period))
    if events:  # the pace is that after the last fault
        periods += 2 * PERIODS
    return periods * period


def _timeout(period: int, step: float, unequal: Unequal, exchange: float | None) -> float:
    """Seconds after which a worker counts as lost, which one that is only slow does not."""
    if exchange is None:
        return unequal.timeout
    slowest = max([1.0, *unequal.slow.values()])
    return unequal.timeout + exchange + period * step * slowest


def _settled(taken: Sequence[StepTaken], last: float, period: int) -> float:
    """The time at which the second period after the last fault has ended."""
    ends = {each.time for each in taken if each.time > last and each.count % period == 0}
    if len(ends) < 2:
        raise ValueError("`drop` must leave a worker that goes on")
    return sorted(ends)[1]


def _sent(taken: Sequence[StepTaken], index: int) -> list[int]:
    """The bytes that a worker has sent before its first step and after each step."""
    return [0, *(each.sent for each in taken if each.worker == index)]
