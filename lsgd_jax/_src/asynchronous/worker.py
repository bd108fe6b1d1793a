"""A worker that steps at its own pace: what it trains, and its loop on every engine."""

import dataclasses
import math
import zlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from lsgd_jax._src.asynchronous.coordinator import Report
from lsgd_jax._src.asynchronous.election import Score
from lsgd_jax._src.asynchronous.errors import Behind, Unreachable
from lsgd_jax._src.asynchronous.mailbox import finite
from lsgd_jax._src.asynchronous.ports import Pending, Ports
from lsgd_jax._src.asynchronous.vectors import flat_of
from lsgd_jax._src.trees import Tree


class Training(NamedTuple):
    """What one worker trains, and how it takes a step.

    Attributes:
      init: index -> (params, opt_state, own). `opt_state`: what a worker that is started
        again takes over from a peer together with the parameters: the base optimizer's
        state. `own`: what stays with the worker: its data, random keys, batch statistics.
      step: (params, opt_state, own, t) -> (updates, opt_state, own, loss), jitted; t = 1,
        2, … int32, the worker's own step; loss at params, before the step. It has no other
        effect: engines may call it once more, to compile it.
    """

    init: Callable[[int], tuple[Tree, Any, Any]]
    step: Callable[[Tree, Any, Any, Any], tuple[Tree, Any, Any, Any]]


class Running(Protocol):
    """A method as it runs in one worker: see `Method.bind`."""

    def step(self, x: Tree, u: Tree, loss: Any, t: int) -> Tree: ...
    async def before_step(self) -> bool: ...
    async def after_step(self) -> None: ...
    def state(self) -> Any: ...
    def take_over(self, state: Any) -> None: ...


class Method(Protocol):
    """When a worker speaks to others, and what it does with what they say.

    Attributes:
      period: steps per worker between rounds that the coordinator calls; None: none.
      window: losses that a worker is judged by.
    """

    @property
    def period(self) -> int | None: ...

    @property
    def window(self) -> int: ...

    def bind(self, worker: "Worker", steps: int) -> Running:
        """The method in one worker that is to take so many steps."""
        ...


class Worker:
    """One worker: parameters, states, and where it stands.

    Args:
      restore: what `state` once gave, or None; asked by a worker that comes late and finds
        no peer to take over from.

    Attributes:
      x, params: before and after the last local step.
      count: local steps taken.
      loss: at x.
      fit: whether the parameters are finite, as far as the method looks.
      measure: what others see besides, see `Snapshot`.
      report: what the coordinator is told.
      standing: what it has answered last, None before that.
    """

    def __init__(
        self,
        training: Training,
        method: Method,
        ports: Ports,
        steps: int,
        restore: Callable[[], Any] = lambda: None,
    ):
        self.training, self.ports, self.restore = training, ports, restore
        self.params, self.opt_state, self.own = training.init(ports.place.index)
        self.x, self.count, self.loss = self.params, 0, np.nan
        self.resumed, self._kept = False, None
        self.flat, self.score = flat_of(self.params), Score(method.window)
        self.report, self.standing = Report(), None
        self._told: Pending | None = None
        self.fit: Any = True
        self.measure = 0.0
        self.running = method.bind(self, steps)
        ports.mailbox.serve_state(self.state)

    @property
    def index(self) -> int:
        """Which worker this is."""
        return self.ports.place.index

    def vector(self) -> np.ndarray:
        """The parameters as they travel."""
        return self.flat.vector(self.params)

    def publish(self) -> None:
        """Lets others see the parameters as they are now."""
        params, score = self.params, self.score.value
        self.ports.mailbox.show(
            lambda: self.flat.vector(params), self.count, self.measure, score
        )

    async def step(self) -> None:
        """One local step, and how fast they are."""
        begun = self.ports.now()
        self.compute()
        await self.ports.stepped()
        if (seconds := self.ports.now() - begun) > 0:
            speed, known = 1 / seconds, self.report.speed
            compiled = self.count > 2  # the first steps take the time to compile, too
            self.report.speed = known + 0.1 * (speed - known) if compiled else speed

    def compute(self) -> None:
        """What a local step computes."""
        t = self.count + 1
        u, self.opt_state, self.own, loss = self.training.step(
            self.params, self.opt_state, self.own, np.int32(t)
        )
        self.x = self.params
        self.params = self.running.step(self.x, u, loss, t)
        self.count, self.loss = t, float(loss)
        self.score.add(self.loss)

    async def wait(self, pending: Pending) -> Any:
        """The result of a call, with the time that it took counted as waiting."""
        begun = self.ports.now()
        try:
            return await pending
        finally:
            seconds = self.ports.now() - begun
            self.report.waited += seconds
            self.report.longest = max(self.report.longest, seconds)

    async def tell(self) -> None:
        """Tells the coordinator how far this worker is; does not wait for its answer.

        The next report leaves when this one has been answered.
        """
        report = self.report
        report.steps = self.count
        report.loss = self.loss if self.fit else math.nan
        report.score = self.score.value if self.fit else math.inf
        report.bytes_sent = self.ports.mailbox.bytes_sent
        if self._told is not None:
            if not self._told.done:
                return
            try:
                self.standing = await self._told
            except Unreachable:
                pass  # what was known stays; the next report says what this one did
        self._told = self.ports.report(dataclasses.replace(report))

    def keep(self) -> None:
        """Makes `state` give what is now, at the boundary of a step, until the next one.

        Others ask for it at any time, from threads of their own: they get one step's
        parameters and states, never those of two. `Training.step` must not donate them.
        """
        now = {
            "params": self.params,
            "opt_state": self.opt_state,
            "own": self.own,
            "count": self.count,
            "method": self.running.state(),
        }
        self._kept = jax.tree.map(lambda x: x, now)

    def state(self, own: bool = False) -> Any:
        """All that another worker needs to go on from here; None before it has begun.

        own: with what this worker needs besides, to be resumed itself.
        """
        if (kept := self._kept) is None:
            return None
        return {k: jax.tree.map(_to_host, x) for k, x in kept.items() if own or k != "own"}

    def take_over(self, state: Any) -> None:
        """Goes on from another worker's state, with what is its own, or from its own."""
        self.params = self.x = jax.tree.map(_to_device, self.params, state["params"])
        self.opt_state = jax.tree.map(_to_device, self.opt_state, state["opt_state"])
        if "own" in state:
            self.own, self.resumed = jax.tree.map(_to_device, self.own, state["own"]), True
        self.count = int(state["count"])
        self.running.take_over(jax.tree.map(jnp.asarray, state["method"]))

    async def enter(self) -> None:
        """Takes part; who comes after the others have begun takes over from one of them."""
        _, late = await self.wait(self.ports.enter(self.count))
        if not late:
            start = None if self.resumed else zlib.crc32(self.vector().tobytes())
            everyone = list(range(self.ports.place.workers))
            starts = await self.ports.round("begin", start, everyone)
            if (different := len(set(starts.values()) - {None})) > 1:
                raise ValueError(
                    "all workers must start from the same parameters, but "
                    f"{different} different ones came together"
                )
            late = self.index not in starts
        if late:
            await self.catch_up()
        self.keep()
        self.publish()

    async def catch_up(self) -> None:
        """Takes over from a peer, or from what is restored.

        The one that has come furthest is asked first: one that hangs stays behind.

        Raises:
          Unreachable: others are there, but none answers, and nothing is restored.
        """
        standing = await self.wait(self.ports.report(dataclasses.replace(self.report)))
        others = [i for i in standing.present if i != self.index]
        for peer in sorted(others, key=lambda i: -standing.reports[i].steps):
            try:
                state = await self.wait(self.ports.state(peer))
            except Unreachable:
                continue
            if state is not None and finite(self.flat.vector(state["params"])):
                break
        else:
            state = self.restore()
        if state is not None:
            self.take_over(state)
            await self.wait(self.ports.enter(self.count))
        elif others:
            raise Unreachable(
                f"worker {self.index} is behind, and none of the workers {others} that it "
                f"could take over from answered within {self.ports.grace:g} s"
            )


async def work(worker: Worker, observe: Callable[[Worker], Any] = lambda worker: None):
    """Trains a worker to the end; `observe` is called after every step."""
    running = worker.running
    await worker.enter()
    while True:
        try:
            if not await running.before_step():
                break
            await worker.step()
            await running.after_step()
        except Behind:
            await worker.enter()
            continue
        worker.keep()
        await worker.tell()
        observe(worker)
    return worker


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _to_host(x: Any) -> Any:
    if _is_key(x):
        x = jax.random.key_data(x)
    return np.asarray(x) if isinstance(x, jax.Array) else x


def _to_device(like: Any, x: Any) -> Any:
    if _is_key(like):
        return jax.random.wrap_key_data(x, impl=jax.random.key_impl(like))
    return jnp.asarray(x) if isinstance(like, jax.Array) else x
