"""The kernel among asynchronous workers: messages travel between `send` and `land`."""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lsgd_jax._src import trees
from lsgd_jax._src.asynchronous.engine.errors import StaleWorkerError, UnreachableError
from lsgd_jax._src.asynchronous.engine.sharding import Sharding, constrained, placed
from lsgd_jax._src.asynchronous.engine.worker import Worker
from lsgd_jax._src.asynchronous.methods.driver import Driver, InFlight
from lsgd_jax._src.asynchronous.methods.messages import Conversation, alone
from lsgd_jax._src.exchange import kernel, parts
from lsgd_jax._src.exchange.exchange import Exchange
from lsgd_jax._src.exchange.kernel import Pull, PullState, Target
from lsgd_jax._src.shared import is_shared
from lsgd_jax._src.trees import Tree
from lsgd_jax._src.wire.group import Group


@dataclasses.dataclass(frozen=True)
class Pulls:
    """An exchange of the kernel among asynchronous workers.

    Without a budget the pulls are due by each worker's own step, and the numbers are those
    of lock step. A delayed pull travels in the background: a worker waits only if its
    target has not arrived when it is due. With a budget the pulls are due whenever all
    workers together have taken W · τ more steps, of which fast workers take more. With
    equal speeds these numbers, too, are those of lock step.

    Args:
      exchange: any method of the kernel, such as ``lsgd(...)`` or ``diloco(delay=5)``.
      budget: whether periods are budgets of steps that all workers share.
      window: number of losses in a worker's score.

    Raises:
      ValueError: no exchange, an offset or a delay with a budget, late='add', workers
        judged by their peers, or a rule that reads the gradient, as `grawa` does.

    Reference for the budget: Teng et al., NeurIPS 2019, section 4 and the released code.

    >>> import lsgd_jax as lj
    >>> Pulls(lj.lsgd(local_period=16, global_period=64), budget=True).period
    16
    """

    exchange: Exchange
    budget: bool = False
    window: int = 10

    wire = "float32"  # of whole parameters; each pull has its own format

    def __post_init__(self):
        if not isinstance(self.exchange, Exchange) or not self.exchange.pulls:
            raise ValueError(
                "`exchange` must be a method that pulls, such as lsgd(...) or diloco(...), "
                f"got {self.exchange!r}"
            )
        for pull in self.exchange.pulls:
            if pull.adds:
                raise ValueError(
                    "`late` must be 'replace' for asynchronous workers, got late='add'"
                )
            if self.budget and (pull.offset or pull.fragments > 1 or pull.delay):
                raise ValueError(
                    "pulls with a budget must have no offset, no fragments and no delay, "
                    f"got offset={pull.offset}, fragments={pull.fragments}, "
                    f"delay={pull.delay}"
                )
            if pull.skips is not None:
                raise ValueError(
                    "asynchronous workers compute a gradient at every step: `exchange` "
                    "must have no steps without one, as palsgd does; use diloco(...), or "
                    "palsgd in lock step"
                )
            if "grad" in pull.rule.reads:
                raise ValueError(
                    "asynchronous workers pass no gradient: `exchange` must have no rule "
                    "that reads it, as grawa does; use lsgd(...), or grawa in lock step"
                )

    @property
    def period(self) -> int | None:
        """Steps per worker between the rounds of a budget."""
        if not self.budget:
            return None
        schedules = [pull.schedule for pull in self.exchange.pulls]
        return math.gcd(*(steps for each in schedules for steps in each.intervals))

    def bind(self, worker: Worker, steps: int) -> "PullsWorker":
        """Returns these pulls in one worker."""
        return PullsWorker(self, worker, steps)


class PullsWorker(Driver):
    """The pulls of one worker.

    Attributes:
      pulls: their states.
      rounds: rounds of the budget that it knows of.
    """

    kept = ("pulls", "rounds")

    def __init__(self, method: Pulls, worker: Worker, steps: int):
        # A step claimed ahead would keep all other workers waiting at the next round.
        own_steps = None if method.budget else steps
        super().__init__(worker, ahead=False, steps=own_steps)

        # Asynchronous workers are never bit-identical, so there is nothing to verify.
        def unverified(pull: Pull) -> Pull:
            return dataclasses.replace(pull, verify=False)

        each = (one for pull in method.exchange.pulls for one in pull.each)
        self._pulls = tuple(map(unverified, each))
        self._period = method.period
        position = worker.transport.position
        self._everyone = list(range(position.workers))
        self._conversations = [
            Conversation(worker.transport, pull, k) for k, pull in enumerate(self._pulls)
        ]
        grid = position.nodes, position.locals
        self._compiled = _compiled(self._pulls, grid, worker.sharding)
        self.pulls: tuple[PullState, ...] = self._compiled.init(worker.params)
        self.rounds = 0
        self._counts: Any = [True] * len(self._pulls)  # before the first step
        self._has_stayed_finite: Any = np.bool_(True)

    # On every step

    def step(self, x: Tree, u: Tree, loss: Any, t: int) -> Tree:
        """Returns the parameters after the worker's own step."""
        y, self.pulls, self._counts = self._compiled.local(
            x, u, self.pulls, loss, np.int32(t), self._has_stayed_finite
        )
        return y

    async def land_arrived(self) -> None:
        """Sends and lands the pulls that are due by the worker's own count."""
        if self._period is None:
            t = self.worker.count
            sends = [pull.schedule.agrees(t) for pull in self._pulls]
            lands = [pull.schedule.lands(t) for pull in self._pulls]
            await self._communicate(t, set(self._everyone), sends, lands)

    async def join(self, number: int) -> None:
        """Takes part in a round of the budget."""
        worker = self.worker
        # Anchors, centers, and references of a wire format: a round moves all of them.
        kept = [(state.rule, state.wire) for state in self.pulls]
        has_shared = any(map(is_shared, jax.tree.leaves(kept, is_leaf=is_shared)))
        if number != self.rounds and has_shared:
            raise StaleWorkerError(f"worker {worker.index} has missed a round")
        joined = worker.transport.round(("join", number), None, self._everyone)
        came = await worker.wait(joined)
        self.rounds = number + 1
        if worker.index not in came:
            return
        taken = self.rounds * (self._period or 1)
        due = [pull.schedule.lands(taken) for pull in self._pulls]
        await self._communicate(number, set(came), due, due)
        worker.publish()

    # When due

    async def _communicate(
        self, number: int, here: set[int], sends: list[bool], lands: list[bool]
    ) -> None:
        """Sends and lands all pulls that are due, in order.

        Args:
          number: of this communication; keys of its messages are made of it.
          here: the workers that take part.
          sends, lands: for each pull whether it is due.
        """
        if not any(sends) and not any(lands):
            return
        worker = self.worker
        is_finite = self._check()
        for k, pull in enumerate(self._pulls):
            counts = bool(self._counts[k]) and is_finite
            if pull.delay and lands[k] and k in self.in_flight:
                is_finite |= await self._land(k, self.in_flight.pop(k), counts)
            if sends[k]:
                agreement = self._conversations[k].agree(
                    number,
                    set(here) if pull.delay else here,  # with a delay, in the background
                    parts.select(pull.part, trees.floats(worker.x)),
                    parts.select(pull.part, trees.floats(worker.params)),
                    self.pulls[k],
                    np.bool_(counts),
                    np.int32(worker.count),
                )
                coming = InFlight(self.transport.start(agreement), worker.count)
                if pull.delay:
                    self.in_flight[k] = coming
                else:
                    is_finite |= await self._land(k, coming, counts)
            if pull.part is not None:  # restoring a part does not restore the rest
                is_finite = self._check()
        self._has_stayed_finite = np.bool_(is_finite)

    def _check(self) -> bool:
        """Returns whether the worker was finite, and all its parameters are."""
        was_finite = bool(self._has_stayed_finite)
        return was_finite and bool(self._compiled.all_finite(self.worker.params))

    async def _land(self, k: int, coming: InFlight, is_finite: bool) -> bool:
        """Runs `kernel.land`; returns whether the worker was restored."""
        worker = self.worker
        states = list(self.pulls)
        try:
            target, renew = await worker.wait(coming.answer)
        except UnreachableError:
            return False  # its sender has failed: no pull this time
        state = renew(states[k])
        t = np.int32(worker.count)
        worker.params, states[k], restored = self._compiled.land[k](
            worker.params, target, state, np.bool_(is_finite), t
        )
        self.pulls = tuple(states)
        return bool(restored)

    def take_over(self, state: Any) -> None:
        """Continues from another worker's state; discards what is in flight."""
        super().take_over(state)
        clear = jnp.asarray(True)
        self.pulls = tuple(
            s._replace(wire=s.wire.without_error(clear) if s.wire else ())
            for s in placed(self.pulls, self.worker.sharding)
        )
        self._has_stayed_finite = np.bool_(True)


class _Compiled:
    """The kernel of one worker, compiled once for all workers of a process."""

    def __init__(
        self,
        pulls: tuple[Pull, ...],
        grid: tuple[int, int],
        sharding: Sharding | None,
    ):
        self._pulls = pulls
        self._grid = grid
        self._sharding = sharding
        self.init: Any = jax.jit(self._init)
        self.local = jax.jit(self._local)
        self.all_finite = jax.jit(lambda params: trees.all_finite(trees.floats(params)))
        self.land = [jax.jit(functools.partial(self._land, pull)) for pull in pulls]

    def _init(self, params: Tree) -> tuple[PullState, ...]:
        x = trees.floats(params)

        def begin():
            return tuple(kernel.init(pull, x) for pull in self._pulls)

        # A target in flight is a task of the driver, not a part of the state.
        states = (state._replace(pending=()) for state in alone(begin))
        return tuple(map(self._kept, self._pulls, states))

    def _local(self, x, u, states, loss, t, is_finite):
        own = trees.floats(x)
        step = trees.widened(trees.floats(u))
        step, states, counts, _ = kernel.local(
            self._pulls, own, step, loss, states, is_finite, t
        )
        y = trees.apply_updates(x, trees.refill(step, u))
        states = tuple(map(self._kept, self._pulls, states))
        return constrained(y, self._sharding), states, counts

    def _land(
        self, pull: Pull, y: Tree, target: Target, state: PullState, is_finite, t
    ) -> Any:
        mine = parts.select(pull.part, trees.floats(y))
        still = trees.zeros(mine)

        def land() -> Any:
            here = target
            if pull.delay:  # y has moved since
                group = Group(pull.rule.axes)
                huge = kernel.is_huge(pull, group, mine, state)
                here = target._replace(is_huge=huge)
            return kernel.land(pull, mine, still, here, state, is_finite, t)

        u, state, restored = alone(land, *self._grid)
        moved = trees.apply_updates(mine, u)
        moved = parts.put_back(pull.part, moved, trees.floats(y))
        moved = constrained(trees.refill(moved, y), self._sharding)
        return moved, self._kept(pull, state), restored

    def _kept(self, pull: Pull, state: PullState) -> PullState:
        """The state in the worker's layout, unless it lies in the host's memory."""
        return state if pull.memory == "host" else constrained(state, self._sharding)


_compiled = functools.lru_cache(maxsize=32)(_Compiled)
