"""The driver of a method: messages travel beside the steps, and their answers land."""

import asyncio
import functools
import math
import operator
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lsgd_jax._src.asynchronous.engine.contents import check_wire, combined, finite
from lsgd_jax._src.asynchronous.engine.errors import UnreachableError
from lsgd_jax._src.asynchronous.engine.sharding import Sharding, constrained, placed
from lsgd_jax._src.asynchronous.engine.worker import Worker
from lsgd_jax._src.checks import (
    check_fraction,
    check_not_negative,
    check_positive_int,
    check_same_tree,
)
from lsgd_jax._src.exchange import kernel
from lsgd_jax._src.trees import (
    Tree,
    all_finite,
    apply_updates,
    floats,
    plus,
    refill,
    widened,
)


MOST = 6  # a peer that never answers is left out of 2^6 choices at a time


class Peers:
    """The workers that one may ask.

    A peer that has not answered is left out of the next 1, 2, 4, … choices, until it
    answers again.

    Args:
      candidates: indices of the peers.
      seed: seed of the choices.

    Attributes:
      random: draws of this worker alone.

    >>> peers = Peers([0, 2], seed=(0, 1))
    >>> peers.heard(2, has_answered=False)
    >>> peers.choose(), peers.is_tried(2)
    (0, True)
    """

    def __init__(self, candidates: Sequence[int], seed: Sequence[int] = ()):
        self._left_out = dict.fromkeys(candidates, 0)  # number of choices from now on
        self._failures = dict.fromkeys(candidates, 0)
        self.random = np.random.default_rng(list(seed))

    def choose(self) -> int | None:
        """Returns a random peer that is not left out, or None without one."""
        tried = [i for i, left in self._left_out.items() if not left]
        self.count_choice()
        return int(self.random.choice(tried)) if tried else None

    def is_tried(self, i: int) -> bool:
        """Returns whether a worker is not left out."""
        return not self._left_out.get(i, 0)

    def count_choice(self) -> None:
        """Counts one more choice."""
        self._left_out = {i: max(0, left - 1) for i, left in self._left_out.items()}

    def heard(self, i: int, has_answered: bool) -> None:
        """Notes whether a peer has answered."""
        failures = self._failures[i]
        self._left_out[i] = 0 if has_answered else 2**failures
        self._failures[i] = 0 if has_answered else min(failures + 1, MOST)

    async def answer(self, i: int | None, call: Awaitable[Any]) -> Any:
        """Waits for the answer of a peer, or of several (None); None if it fails."""
        try:
            answer = await call
        except UnreachableError:
            if i is not None:
                self.heard(i, has_answered=False)
            return None
        if i is not None:
            self.heard(i, has_answered=True)
        return answer


class InFlight(NamedTuple):
    """A request that travels while the worker computes its next steps.

    Attributes:
      answer: the call.
      since: own steps taken when the request left.
      peer: the worker that was asked; None for a request to several.
      sent: own parameters that the request carried, or None.
      error: quantization error y - Q(y) of the worker when it asked for a snapshot; None
        where nothing is rounded.
    """

    answer: asyncio.Task[Any]
    since: int
    peer: int | None = None
    sent: Tree = None
    error: Tree = None


class FreeRunning:
    """A method whose workers never wait for each other, as a frozen dataclass.

    Subclasses name the fields that are checked, and those that may be schedules instead.

    Attributes:
      driver: makes the method in one worker, from the method and the worker.
    """

    driver: Callable[[Any, Worker], "Driver"]
    positive: tuple[str, ...] = ("window",)
    not_negative: tuple[str, ...] = ()
    fractions: tuple[str, ...] = ()
    schedules: tuple[str, ...] = ()

    def __post_init__(self):
        method: Any = self
        check_wire(method.wire)
        checks: dict[Callable[..., None], tuple[str, ...]] = {
            check_positive_int: self.positive,
            check_not_negative: self.not_negative,
            check_fraction: self.fractions,
        }
        for check, names in checks.items():
            for name in names:
                given = getattr(self, name)
                if not (name in self.schedules and callable(given)):
                    check(name, given)

    @property
    def period(self) -> int | None:
        """Steps per worker between barriers of the coordinator, or None."""
        return None

    def bind(self, worker: Worker, steps: int) -> "Driver":
        """Returns the method in one worker."""
        del steps
        return type(self).driver(self, worker)


class Driver:
    """A method in one worker, which takes steps until all have taken W · steps together.

    A method is a policy: whom it asks before a step (`ask`) or after it (`stepped`,
    `done`), how answers move the worker (`landed`), and which attributes a restarted worker
    needs (`kept`). Requests in flight are in `in_flight`, one per slot.

    Args:
      worker: the worker.
      peers: workers that it may ask.
      seed: seed of the choice among them.
      ahead: see `Worker.granted`.
      steps: own steps after which the worker ends, in a method whose workers stay
        together. Defaults to as many as the coordinator grants.

    Attributes:
      has_diverged: whether an anchor that all follow is not finite.
      patience: own steps after which the worker waits for an answer in flight.
      weight: the push-sum weight, by which updates are divided; None for 1.
    """

    kept: tuple[str, ...] = ()
    has_diverged = False
    patience: float = math.inf
    weight: Any = None

    def __init__(
        self,
        worker: Worker,
        peers: Iterable[int] = (),
        seed: Sequence[int] = (),
        ahead: bool = True,
        steps: int | None = None,
    ):
        self.worker = worker
        self.transport = worker.transport
        self.peers = Peers(list(peers), seed)
        self.in_flight: dict[int, InFlight] = {}
        self._ahead = ahead
        self._steps = steps

    # The policy

    def ask(self) -> None:
        """Sends requests before a step."""

    def stepped(self) -> None:
        """Counts a step, and sends requests after it, before answers land."""

    async def done(self) -> None:
        """Sends requests after a step, after answers have landed."""

    def landed(self, slot: int, request: InFlight, answer: Any) -> bool:
        """Moves the worker by an answer; returns whether it was mixed with the sender."""
        return False

    async def join(self, number: int) -> None:
        """Takes part in barrier `number` of the coordinator, in methods that have any."""

    async def finish(self) -> None:
        """Settles what is in flight after the last step."""

    # On every step

    @property
    def is_finite(self) -> bool:
        """Whether the last loss and the parameters after that step are finite."""
        return bool(self.worker.is_finite)

    def step(self, x: Tree, u: Tree, loss: Any, t: int) -> Tree:
        """Returns the parameters after the worker's own step."""
        del t
        y, is_finite = _own_step(self.worker.sharding, x, u, self.weight, loss)
        self.worker.is_finite = False if self.has_diverged else is_finite
        return y

    async def before_step(self) -> bool:
        """Returns whether there is another step to take, after any barrier that is due."""
        if self._steps is None:
            has_next = await self.worker.granted(self.join, self._ahead)
        else:
            has_next = self.worker.count < self._steps
        if not has_next:
            await self.finish()
            self.worker.publish()
            return False
        self.ask()
        return True

    async def after_step(self) -> None:
        """Moves the worker by the answers that have arrived, and publishes it."""
        self.stepped()
        await self.land_arrived()
        await self.done()
        self.worker.publish()

    async def receive(self) -> None:
        """Lands answers and asks again, for a program that takes the steps, see `Peer`."""
        await self.land_arrived()
        self.ask()

    # The state that passes to a restarted worker

    def state(self) -> Any:
        """Returns the attributes that a restarted worker needs."""
        return {name: getattr(self, name) for name in self.kept}

    def take_over(self, state: Any) -> None:
        """Continues from another worker's state; discards what is in flight."""
        for name in self.kept:
            own = getattr(self, name)
            setattr(self, name, jax.tree.map(_in_type_of, own, state[name]))
        for request in self.in_flight.values():
            request.answer.cancel()  # a turn would go on to post the old state
        self.in_flight.clear()

    # Requests

    def ask_snapshot(self, peer: int, slot: int = 0) -> None:
        """Asks for a peer's latest snapshot.

        The worker's own quantization error of that moment is added to the snapshot. Equal
        workers then do not move, whereas Q(y) alone would draw them towards itself and take
        small steps back.
        """
        worker = self.worker
        error = None
        if self.transport.mailbox.wire.is_narrow and self.is_finite:
            _, _, error = self.transport.mailbox.encoded(worker.on_host())
        answer = self.transport.ask(peer, "latest")
        self.in_flight[slot] = InFlight(answer, worker.count, peer, error=error)

    async def answer(self, slot: int = 0) -> Any:
        """Waits for an answer; returns None if the peer has not answered in time."""
        request = self.in_flight.pop(slot)
        answer = await self.peers.answer(request.peer, self.worker.wait(request.answer))
        if answer is not None and request.error is not None:
            params = combined(operator.add, answer.params, request.error)
            answer = answer._replace(params=params)
        return answer

    async def land(self, slot: int = 0) -> None:
        """Waits for an answer and moves the worker by it."""
        request = self.in_flight[slot]
        answer = await self.answer(slot)
        if answer is not None and self.landed(slot, request, answer):
            self.worker.report.staleness = self.worker.count - request.since

    async def land_arrived(self) -> None:
        """Lands all answers that have arrived, and those for which the worker waits."""
        for slot, request in sorted(self.in_flight.items()):
            must_wait = self.worker.count - request.since >= self.patience
            if request.answer.done() or must_wait:
                await self.land(slot)

    # Moving the worker

    def pull(self, z: Tree, weight: Any, is_finite: bool) -> bool:
        """Pulls y to y + λ (z - y), or to z itself if `is_finite` is False.

        Args:
          z: the tree to move towards.
          weight: λ.
          is_finite: whether the worker is finite.

        Returns:
          Whether z is finite. Otherwise the worker stays where it is.

        Raises:
          ValueError: z has another structure or other shapes than the parameters.
        """
        worker = self.worker
        sharding = worker.sharding
        check_same_tree("params", z, floats(worker.params))
        if not finite(z):
            return False
        worker.params = _pulled(
            sharding,
            worker.params,
            placed(z, sharding),
            jnp.float32(weight),
            np.bool_(is_finite),
        )
        return True

    def shift(self, by: Tree) -> None:
        """Adds a tree to the parameters, which keeps steps taken in the meantime."""
        worker = self.worker
        sharding = worker.sharding
        worker.params = _shifted(sharding, worker.params, placed(by, sharding))


def _in_type_of(own: Any, new: Any) -> Any:
    if isinstance(own, jax.Array):
        return jnp.asarray(new)
    return np.asarray(new) if isinstance(own, np.ndarray) else type(own)(new)


@functools.partial(jax.jit, static_argnums=0)
def _own_step(
    sharding: Sharding | None, x: Tree, u: Tree, weight: Any, loss: Any
) -> tuple[Tree, Any]:
    """Returns x + u / w, and whether it and the loss are finite, see `kernel.settle`."""
    if weight is not None:
        scaled = jax.tree.map(lambda u: u / weight.astype(u.dtype), floats(u))
        u = refill(scaled, u)
    is_trusted = jnp.isfinite(loss)
    step = kernel.settle(floats(x), widened(floats(u, x)), is_trusted, jnp.asarray(True))
    y = apply_updates(x, refill(step, u))
    return constrained(y, sharding), is_trusted & all_finite(floats(y))


@functools.partial(jax.jit, static_argnums=0)
def _pulled(
    sharding: Sharding | None, y: Tree, z: Tree, weight: Any, is_finite: Any
) -> Tree:
    moved = kernel.move(None, floats(y), z, weight, jnp.asarray(True), is_finite)
    return constrained(refill(moved, y), sharding)


@functools.partial(jax.jit, static_argnums=0)
def _shifted(sharding: Sharding | None, y: Tree, by: Tree) -> Tree:
    return constrained(refill(plus(floats(y), by), y), sharding)
