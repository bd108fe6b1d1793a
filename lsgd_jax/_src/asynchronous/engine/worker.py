"""An asynchronous worker: its training, its state, and its loop on every engine."""

import asyncio
import dataclasses
import functools
import math
import zlib
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from lsgd_jax._src.asynchronous.engine.contents import (
    as_vector,
    finite,
    on_host,
)
from lsgd_jax._src.asynchronous.engine.coordinator import NextAction, Status, WorkerReport
from lsgd_jax._src.asynchronous.engine.errors import StaleWorkerError, UnreachableError
from lsgd_jax._src.asynchronous.engine.sharding import sharding_of
from lsgd_jax._src.asynchronous.engine.transport import Transport
from lsgd_jax._src.trees import Tree
from lsgd_jax._src.workers.transfer import is_key


STALE = 10  # times in a row that a worker may take over without taking a new step


class Training(NamedTuple):
    """The training of one worker: its initial state and its step.

    Attributes:
      init: index -> (params, opt_state, own). A restarted worker takes over `params` and
        `opt_state`, the base optimizer's state, from a peer. `own` stays with the worker:
        its data, random keys, batch statistics. The worker keeps the layout of parameters
        that are sharded over devices of its process, see `island`.
      step: (params, opt_state, own, t) -> (updates, opt_state, own, loss), jitted; t = 1,
        2, … int32, the worker's own step; loss at params, before the step. It must have no
        other effect, since engines may call it once more to compile it.
    """

    init: Callable[[int], tuple[Tree, Any, Any]]
    step: Callable[[Tree, Any, Any, Any], tuple[Tree, Any, Any, Any]]


class Method(Protocol):
    """Decides when a worker communicates, and how the answers move it.

    Attributes:
      period: steps per worker between rounds of the coordinator, or None.
      window: number of losses in a worker's score.
      wire: the format in which whole parameters travel.
    """

    @property
    def period(self) -> int | None: ...

    @property
    def window(self) -> int: ...

    @property
    def wire(self) -> Any: ...

    def bind(self, worker: "Worker", steps: int) -> Any:
        """Returns the method in one worker; `steps` is the mean number of steps.

        The worker calls its `step`, `before_step`, `after_step`, `state` and `take_over`,
        see `Driver`.
        """
        ...


class Worker:
    """One worker: its parameters, its states and its progress.

    Args:
      training: its training.
      method: decides when it communicates.
      transport: its calls to others.
      steps: mean steps per worker.
      restore: returns an earlier `state`, or None. Called by a worker that comes late and
        finds no peer to take over from.

    Attributes:
      index: of the worker.
      x, params: before and after the last local step.
      count: local steps taken.
      number: rounds of the coordinator that it knows of.
      loss: at x.
      sharding: the layout of the parameters over several devices, or None.
      is_finite: whether the parameters are finite, as far as the method checks.
      measure, reference: return what is published beside the parameters, see
        `Mailbox.show`.
      report: its progress, for the coordinator.
      status: the coordinator's last answer, or None.
    """

    def __init__(
        self,
        training: Training,
        method: Method,
        transport: Transport,
        steps: int,
        restore: Callable[[], Any] = lambda: None,
    ):
        self.training = training
        self.transport = transport
        self.restore = restore
        self.index = transport.position.index
        self.params, self.opt_state, self.own = training.init(self.index)
        self.x = self.params
        self.count = 0
        self.loss = np.nan
        self.resumed = False
        self._has_stepped = False
        self._kept = None
        self.sharding = sharding_of(self.params)
        self._losses: deque[float] = deque(maxlen=method.window)
        self.report = WorkerReport()
        self.number = 0
        self.status: Status | None = None
        self._told: asyncio.Task[Status] | None = None
        self._asked: tuple[int, asyncio.Task[NextAction]] | None = None
        self.is_finite: Any = True
        self.measure: Callable[[], float] = lambda: 0.0
        self.reference: Callable[[], Tree] = lambda: None
        self.method = method.bind(self, steps)
        transport.mailbox.state = self.state

    @property
    def score(self) -> float:
        """The mean of the last losses; inf without any, or if one is not finite."""
        if not self._losses:
            return math.inf
        mean = sum(self._losses) / len(self._losses)
        return mean if math.isfinite(mean) else math.inf

    def vector(self) -> np.ndarray:
        """The parameters as one vector, float32 [n]."""
        return as_vector(self.params)

    def on_host(self) -> Tree:
        """The parameters that hold floats, in the host's memory."""
        return on_host(self.params)

    def publish(self) -> None:
        """Shows the present parameters to peers."""
        # The tree of this step: the worker may have moved on when a peer asks for it.
        params = functools.partial(on_host, self.params)
        self.transport.mailbox.show(params, self.measure(), self.reference())

    async def granted(self, join: Callable[[int], Awaitable[None]], ahead: bool) -> bool:
        """Returns whether the next step is granted; joins the rounds that are due first.

        Args:
          join: takes part in the coordinator's round with this number.
          ahead: whether to claim the step after it already, so that no step waits for the
            coordinator.
        """
        while True:
            step = self.count + 1
            if self._asked is not None and self._asked[0] == step:
                _, asked = self._asked
            else:  # the first step, or the worker has taken over another count
                asked = self.transport.tell("claim", step)
            self._asked = None
            claim = await self.wait(asked)
            self.number = claim.number
            if claim.go != "join":
                break
            await join(claim.number)
        if ahead and claim.go == "step":
            self._asked = step + 1, self.transport.tell("claim", step + 1)
        return claim.go == "step"

    async def step(self) -> None:
        """Takes one local step and measures its speed."""
        begun = self.transport.now()
        await self.transport.step(self.compute)
        seconds = self.transport.now() - begun
        if seconds <= 0:
            return
        speed = 1 / seconds
        if self.count > 2:  # the first steps include compilation
            known = self.report.speed
            speed = known + 0.1 * (speed - known)
        self.report.speed = speed

    def compute(self) -> None:
        """Computes one local step."""
        t = self.count + 1
        u, self.opt_state, self.own, loss = self.training.step(
            self.params, self.opt_state, self.own, np.int32(t)
        )
        self.x = self.params
        self.params = self.method.step(self.x, u, loss, t)
        self.count = t
        self.loss = float(loss)
        self._has_stepped = True
        self._losses.append(self.loss)

    async def wait(self, call: asyncio.Task) -> Any:
        """Returns the result of a call; counts its time as waiting."""
        begun = self.transport.now()
        try:
            return await call
        finally:
            seconds = self.transport.now() - begun
            self.report.waited += seconds
            self.report.longest = max(self.report.longest, seconds)

    async def tell(self) -> None:
        """Reports the progress to the coordinator without waiting for its answer.

        No further report leaves until this one is answered.
        """
        report = self.report
        report.steps = self.count
        if self._has_stepped:
            report.loss = self.loss if self.is_finite else math.nan
        # A worker that is not finite is never the leader, whatever its last losses were.
        report.score = self.score if self.is_finite else math.inf
        report.bytes_sent = self.transport.mailbox.bytes_sent
        if await self.hear():
            self._told = self.transport.tell("report", dataclasses.replace(report))

    async def hear(self) -> bool:
        """Updates the status if the last report is answered; returns whether it is."""
        if self._told is not None:
            if not self._told.done():
                return False
            told = self._told
            self._told = None
            try:
                self.status = await told
            except UnreachableError:
                pass  # the old status stays; the next report includes this one
        return True

    async def finish(self) -> None:
        """Tells the coordinator that this worker has taken its last step."""
        await self.tell()
        await self.transport.tell("finish", dataclasses.replace(self.report))

    def keep(self) -> None:
        """Makes `state` return the present state, at the boundary of a step.

        Peers may ask for it at any time, from other threads: they always get parameters and
        states of the same step. `Training.step` must therefore not donate them.
        """
        now = {
            "params": self.params,
            "opt_state": self.opt_state,
            "own": self.own,
            "count": self.count,
            "number": self.number,
            "method": self.method.state(),
        }
        # A copy of the containers: arrays cannot change, and dicts of a method may.
        self._kept = jax.tree.map(lambda x: x, now)

    @property
    def has_begun(self) -> bool:
        """Whether `state` has a state to return."""
        return self._kept is not None

    def state(self, own: bool = False) -> Any:
        """Returns the state from which another worker can go on, or None before `keep`.

        own: whether to include the part that only this worker itself can resume from.
        """
        kept = self._kept
        if kept is None:
            return None
        return {k: jax.tree.map(_to_host, x) for k, x in kept.items() if own or k != "own"}

    def take_over(self, state: Any) -> None:
        """Continues from a peer's state, or from an earlier state of this worker."""
        self.params = self.x = jax.tree.map(_to_device, self.params, state["params"])
        self.opt_state = jax.tree.map(_to_device, self.opt_state, state["opt_state"])
        if "own" in state:
            self.own = jax.tree.map(_to_device, self.own, state["own"])
            self.resumed = True
        self.count = int(state["count"])
        self.number = int(state["number"])
        self.method.take_over(state["method"])

    async def enter(self) -> None:
        """Takes part; takes over from a peer if the others have begun already."""
        _, late = await self.wait(self.transport.tell("enter", self.count, self.number))
        if not late:
            # A checksum of the start, so that different seeds are an error and not a bad
            # run.
            start = None if self.resumed else zlib.crc32(self.vector().tobytes())
            everyone = list(range(self.transport.position.workers))
            starts = await self.transport.round("begin", start, everyone)
            different = len(set(starts.values()) - {None})
            if different > 1:
                raise ValueError(
                    "all workers must start from the same parameters, got "
                    f"{different} different ones"
                )
            late = self.index not in starts
        if late:
            await self.catch_up()
        self.keep()
        self.publish()

    async def catch_up(self) -> None:
        """Takes over from a peer, otherwise from a restored state.

        The peer with the most steps is asked first, because a hung one falls behind. Peers
        that have finished count as well.

        Raises:
          UnreachableError: no peer answers, and there is no state to restore.
        """
        report = self.transport.tell("report", dataclasses.replace(self.report))
        status = await self.wait(report)
        others = [i for i in {*status.present, *status.finished} if i != self.index]
        for peer in sorted(others, key=lambda i: (-status.reports[i].steps, i)):
            try:
                state = await self.wait(self.transport.ask(peer, "state"))
            except UnreachableError:
                continue
            # A diverged peer has nothing to give, so the next one is asked.
            if state is not None and finite(on_host(state["params"])):
                break
        else:
            state = self.restore()
        if state is not None:
            self.take_over(state)
            await self.wait(self.transport.tell("enter", self.count, self.number))
        elif others:
            raise UnreachableError(
                f"worker {self.index} is behind and has nothing to go on from: none of the "
                f"workers {others} answered within {self.transport.timeout:g} s"
            )


async def work(worker: Worker, observe: Callable[[Worker], Any] = lambda worker: None):
    """Trains a worker to the end; `observe` is called after every step.

    Raises:
      RuntimeError: the worker was left behind several times without taking a new step.
    """
    await worker.enter()
    best = worker.count
    stale = 0
    while True:
        try:
            if not await worker.method.before_step():
                break
            await worker.step()
            await worker.method.after_step()
        except StaleWorkerError as error:
            stale += 1
            if stale > STALE:
                raise RuntimeError(
                    f"worker {worker.index} was left behind {stale} times without getting "
                    f"beyond step {best}: {error}"
                ) from error
            await worker.enter()
            continue
        if worker.count > best:
            best = worker.count
            stale = 0
        worker.keep()
        await worker.tell()
        observe(worker)
    worker.keep()
    return worker


def _to_host(x: Any) -> Any:
    if is_key(x):
        x = jax.random.key_data(x)
    return np.asarray(x) if isinstance(x, jax.Array) else x


def _to_device(like: Any, x: Any) -> Any:
    if is_key(like):
        x = jax.random.wrap_key_data(x, impl=jax.random.key_impl(like))
    if isinstance(like, jax.Array) and like.committed:
        return jax.device_put(x, like.sharding)
    return jnp.asarray(x) if isinstance(like, jax.Array) else x
