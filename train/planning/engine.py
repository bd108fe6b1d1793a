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


LEAVES, SIZE = 4, 8192  # of the parameters: as many float32 values in each leaf
STEPS, PERIODS = 128, 2  # simulated at least, the periods where methods are asynchronous
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


@dataclasses.dataclass(frozen=True)
class LockStep:
    """A method of the engine that only exchanges."""

    exchanges: tuple[TimedExchange, ...]

    period, window, wire = None, 1, "float32"

    def bind(self, worker: lj.asynchronous.Worker, steps: int) -> "LockStepWorker":
        """Returns the method in one worker."""
        return LockStepWorker(self.exchanges, worker, steps)


class LockStepWorker:
    """A worker that only exchanges."""

    def __init__(
        self, exchanges: Sequence[TimedExchange], worker: lj.asynchronous.Worker, steps: int
    ):
        self._exchanges, self._worker, self._steps = exchanges, worker, steps
        self._in_flight: list[tuple[int, asyncio.Task]] = []

    def step(self, x: Any, u: Any, loss: Any, t: int) -> Any:
        """Returns the parameters, which stay."""
        return x

    async def before_step(self) -> bool:
        """Returns whether there is another step to take."""
        return self._worker.count < self._steps

    async def after_step(self) -> None:
        """Begins the exchanges that are due, and waits for those that must have arrived."""
        worker, t = self._worker, self._worker.count
        for k, exchange in enumerate(self._exchanges):
            if t % exchange.every == 0:
                group = worker.transport.position.group(exchange.axes)
                key = k, t, *group
                together = worker.transport.start(
                    worker.transport.collectives.all_reduce(key, worker.params, True, group)
                )
                self._in_flight.append((t + exchange.delay, together))
            await self._land(t)

    async def _land(self, t: int) -> None:
        worker = self._worker
        for landing, together in list(self._in_flight):
            if landing <= t:
                self._in_flight.remove((landing, together))
                with contextlib.suppress(lj.asynchronous.UnreachableError):
                    await worker.wait(together)  # a member has failed: go on without

    def state(self) -> None:
        """Returns nothing: a restarted worker needs only the count."""

    def take_over(self, state: None) -> None:
        """Forgets what is in flight."""
        self._in_flight.clear()


def still(params: Any) -> lj.asynchronous.Training:
    """Returns the training of workers whose steps do not move these parameters."""
    no_move = jax.tree.map(np.zeros_like, params)
    step = lambda params, opt_state, own, t: (no_move, opt_state, own, 0.0)
    return lj.asynchronous.Training(lambda i: (params, (), ()), step)


TRAINING = still([np.zeros(SIZE, np.float32)] * LEAVES)


def lock_step(
    exchanges: Sequence[TimedExchange], grid: tuple[int, int], step: float, unequal: Unequal
) -> SimulatedPace:
    """Returns the pace of a method in lock step, for steps of so many seconds."""
    seconds = {"local": 0.0, "node": 0.0}
    for exchange in exchanges:
        name = "node" if "node" in exchange.axes and grid[0] > 1 else "local"
        seconds[name] = exchange.seconds
    nbytes = 4 * LEAVES * SIZE
    count = {"local": grid[1], "node": grid[0] * grid[1]}
    rates = {
        name: lj.asynchronous.Network.ring(max(count[name], 2), nbytes)[1] / max(each, 1e-9)
        for name, each in seconds.items()
    }
    network = lj.asynchronous.Network(rates["node"], 0.0, rates["local"], 0.0)
    method, every = LockStep(tuple(exchanges)), max(x.every for x in exchanges)
    return _run(method, every, grid, network, step, unequal, sum(seconds.values()))


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
    workers, events = math.prod(grid), [*unequal.drop.values(), *unequal.join.values()]
    last = max(events, default=0.0)
    least = PERIODS if exchange is None else 1
    steps = period * math.ceil(max(STEPS / period, least, last / step / period))
    steps += 2 * PERIODS * period * bool(events)
    if steps * workers > MOST:
        raise ValueError(
            f"`drop` and `join` must be within the first {MOST / workers * step:,.0f} s to "
            f"be simulated, got {last:g}"
        )
    timeout = unequal.timeout if events else math.inf
    if exchange is not None:  # nor does a worker count as lost that only is slow
        timeout += exchange + period * step * max([1.0, *unequal.slow.values()])
    taken: list[tuple[float, int, int, int]] = []

    def observe(worker: lj.asynchronous.Worker) -> None:
        sent = worker.transport.mailbox.bytes_sent
        taken.append((worker.transport.now(), worker.index, worker.count, sent))

    found = lj.asynchronous.simulator.run(
        TRAINING,
        method,
        *grid,
        steps,
        network,
        unequal.speeds(step),
        timeout=timeout,
        drops=unequal.drop,
        joins=unequal.join,
        collectives=exchange is not None,
        observe=observe,
    )
    ends = sorted({t for t, _, count, _ in taken if t > last and count % period == 0})
    if len(ends) < 2 and events:
        raise ValueError("`drop` must leave a worker that goes on")
    since = ends[1] if events else 0.0
    after = sum(t > since for t, *_ in taken)
    pace = workers * (found.seconds - since) / after
    reports, total = [x.report for x in found.workers], 4 * LEAVES * SIZE
    return SimulatedPace(
        pace,
        found.seconds - pace * len(taken) / workers,
        float(np.mean([x.waited for x in reports])) / found.seconds,
        max(x.longest for x in reports),
        sum(_sent(taken, i)[-1] for i in range(workers)) / len(taken) / total,
        float(max(np.diff(_sent(taken, i)).max(initial=0) for i in range(workers))) / total,
    )


def _sent(taken: Sequence[tuple[float, int, int, int]], index: int) -> list[int]:
    """The bytes that a worker has sent after each of its steps."""
    return [0, *(sent for _, worker, _, sent in taken if worker == index)]
