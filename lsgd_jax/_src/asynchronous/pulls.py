"""The kernel's pulls at a worker's own pace: on a budget of steps, or overlapped."""

import dataclasses
import functools
import math
from collections.abc import Coroutine
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lsgd_jax._src import parts
from lsgd_jax._src.asynchronous.collective import Conversation
from lsgd_jax._src.asynchronous.errors import Behind, Unreachable
from lsgd_jax._src.asynchronous.free_running import Claims
from lsgd_jax._src.asynchronous.group import Agreement, alone
from lsgd_jax._src.asynchronous.ports import Pending
from lsgd_jax._src.asynchronous.worker import Worker
from lsgd_jax._src.exchange import Exchange, Pull, PullState, step_rules
from lsgd_jax._src.movement import move, settle
from lsgd_jax._src.shared import is_shared
from lsgd_jax._src.trees import Tree, all_finite, apply_updates, widen


@dataclasses.dataclass(frozen=True)
class Pulls:
    """An exchange of the kernel among workers that step at their own pace.

    Without a budget the pulls are due by each worker's own step, as in lock step, and the
    numbers are those of lock step: what a delayed pull sends travels in the background, and
    a worker waits only if it is not there when it is due. With a budget they are due once
    all workers together have taken W · τ steps since the last time; the fast take more of
    these, and with equal speeds the numbers are those of lock step, too.

    Args:
      exchange: any method of the kernel, such as ``lsgd(...)`` or ``diloco(delay=5)``.
      budget: whether periods are budgets of steps that all workers share.
      window: losses in a worker's score, as others are told it.

    Raises:
      ValueError: no exchange, a wire format other than float32, an offset, delay or
        part on a budget.

    Reference for the budget: Teng et al., NeurIPS 2019, section 4 and the released code.

    >>> import lsgd_jax as lj
    >>> Pulls(lj.lsgd(local_period=16, global_period=64), budget=True).period
    16
    """

    exchange: Exchange
    budget: bool = False
    window: int = 10

    def __post_init__(self):
        if not isinstance(self.exchange, Exchange) or not self.exchange.pulls:
            raise ValueError(
                "`exchange` must be a method that pulls, such as lsgd(...) or diloco(...), "
                f"got {self.exchange!r}"
            )
        for pull in self.exchange.pulls:
            if pull.is_narrow:
                raise ValueError(
                    f"`wire` must be 'float32' for asynchronous workers, got {pull.wire!r}"
                )
            if self.budget and (pull.offset or pull.delay):
                raise ValueError(
                    "pulls on a budget must have no offset and no delay, got "
                    f"offset={pull.offset}, delay={pull.delay}"
                )

    @property
    def period(self) -> int | None:
        """Steps per worker between the rounds of a budget."""
        if not self.budget:
            return None
        return math.gcd(*(pull.every for pull in self.exchange.pulls))

    def bind(self, worker: Worker, steps: int) -> "Pulling":
        """These pulls in one worker."""
        return Pulling(self, worker, steps)


class Pulling:
    """The pulls of one worker as they run."""

    def __init__(self, method: Pulls, worker: Worker, steps: int):
        self._pulls, self._worker, self._steps = method.exchange.pulls, worker, steps
        self._period, self._rounds, self._sick = method.period, 0, False
        # A step that is claimed ahead would have all others wait for it at the next round.
        self._claims = Claims(worker, ahead=False)
        place = worker.ports.place
        groups = [place.group(pull.rule.axes) for pull in self._pulls]
        self._agreements = [
            Agreement(pull.rule, group, place, worker.ports.mailbox.wire.is_narrow)
            for pull, group in zip(self._pulls, groups)
        ]
        self._conversations = [
            Conversation(worker.ports, group, (k, group[0]))
            for k, group in enumerate(groups)
        ]
        self._states = [
            alone(lambda p=pull: p.rule.init(parts.select(p.part, worker.params)))
            for pull in self._pulls
        ]
        self._fits: Any = [True] * len(self._pulls)  # before the first step
        self._in_flight: dict[int, Pending] = {}
        self._compiled = _compiled(self._pulls, place.nodes, place.locals)

    # On every step

    def step(self, x: Tree, u: Tree, loss: Any, t: int) -> Tree:
        """Where the worker stands after its own step."""
        y, self._states, self._fits = self._compiled.step(
            x, u, self._states, loss, np.int32(t), np.bool_(self._sick)
        )
        return y

    async def before_step(self) -> bool:
        """Whether there is another step to take; joins the rounds that are called."""
        worker = self._worker
        if self._period is None:
            return worker.count < self._steps
        while (claim := await self._claims.next()).go == "join":
            await self._join(claim.number)
        return claim.go == "step"

    async def after_step(self) -> None:
        """What is due by the worker's own count."""
        if self._period is None:
            t = self._worker.count
            sends = [t % pull.every == pull.sends_at for pull in self._pulls]
            lands = [t % pull.every == pull.offset for pull in self._pulls]
            here = set(range(self._worker.ports.place.workers))
            await self._communicate(t, here, sends, lands)
        self._worker.publish()

    async def _join(self, number: int) -> None:
        worker, everyone = self._worker, list(range(self._worker.ports.place.workers))
        if number != self._rounds and any(map(_holds_shared, self._states)):
            raise Behind(f"worker {worker.index} has missed a round of all")
        came = await worker.wait(worker.ports.round(("join", number), None, everyone))
        self._rounds = number + 1
        if worker.index not in came:
            return
        taken = (number + 1) * (self._period or 1)
        due = [taken % pull.every == 0 for pull in self._pulls]
        await self._communicate(number, set(came), due, due)
        worker.publish()

    # When due

    async def _communicate(
        self, number: int, here: set[int], sends: list[bool], lands: list[bool]
    ) -> None:
        """All that is due, in order, among those who are here.

        number: of the communication, and so of the rounds of its groups.
        """
        if not any(sends) and not any(lands):
            return
        worker = self._worker
        fits = [bool(fit) for fit in self._fits]
        healthy = not self._sick and bool(self._compiled.finite(worker.params))
        for k, pull in enumerate(self._pulls):
            fit = fits[k] and healthy
            if pull.delay and lands[k] and k in self._in_flight:
                healthy |= await self._land(k, self._in_flight.pop(k), fit)
            if sends[k]:
                among = set(here) if pull.delay else here  # beside this, it is by itself
                coming = worker.ports.start(self._agree(k, number, among, fit))
                if pull.delay:
                    self._in_flight[k] = coming
                else:
                    healthy |= await self._land(k, coming, fit)
            if pull.part is not None:  # a part that was restored does not restore the rest
                healthy = not self._sick and bool(self._compiled.finite(worker.params))
        self._sick = not healthy

    def _agree(
        self, k: int, number: int, here: set[int], fit: bool
    ) -> Coroutine[Any, Any, Any]:
        """What the group agrees on about the worker as it is now, whenever that travels."""
        pull, worker = self._pulls[k], self._worker
        x, y = (parts.select(pull.part, tree) for tree in (worker.x, worker.params))
        send = functools.partial(self._conversations[k].send, number, here)
        t, state = np.int32(worker.count), self._states[k]
        return self._agreements[k].run(send, x, y, state, np.bool_(fit), t)

    async def _land(self, k: int, coming: Pending, fit: bool) -> bool:
        """Pulls the worker to a target; whether it was restored."""
        worker = self._worker
        try:
            z, found, renew = await worker.wait(coming)
        except Unreachable:
            return False  # whoever would have sent it is lost: no pull this time
        self._states[k] = renew(self._states[k])
        t = np.int32(worker.count)
        worker.params = self._compiled.land[k](worker.params, z, found, np.bool_(fit), t)
        return bool(found) and not fit

    # What passes to a worker that starts again

    def state(self) -> Any:
        """The rules' states, and how many rounds there were."""
        return {"rules": self._states, "rounds": self._rounds}

    def take_over(self, state: Any) -> None:
        """Goes on from another worker's; what was in flight was meant for another step."""
        self._states, self._rounds = state["rules"], int(state["rounds"])
        self._in_flight, self._sick = {}, False
        for conversation in self._conversations:
            conversation.forget()


class _Compiled:
    """What a worker computes, compiled once for all workers of a process."""

    def __init__(self, pulls: tuple[Pull, ...], nodes: int, locals: int):
        self._pulls, self._sizes = pulls, (nodes, locals)
        self.step, self.finite = jax.jit(self._step), jax.jit(all_finite)
        self.land = [jax.jit(functools.partial(self._land, pull)) for pull in pulls]

    def _step(self, x, u, states, loss, t, sick):
        nothing: Any = ()
        kept = [PullState(state, (), jnp.int32(0), nothing) for state in states]
        u, stepped, fits = step_rules(self._pulls, widen(u), x, kept, loss, t)
        sound = jnp.isfinite(loss)
        y = apply_updates(x, settle(x, u, sound, jnp.asarray(sick)))
        return y, [state for state, *_ in stepped], [sound & fit for fit in fits]

    def _land(self, pull: Pull, y: Tree, z: Tree, found, fit, t) -> Tree:
        weight = alone(lambda: jnp.asarray(pull.weight(t)), *self._sizes)
        mine = parts.select(pull.part, y)
        still = jax.tree.map(jnp.zeros_like, widen(mine))
        moved = apply_updates(mine, move(mine, still, z, weight, found, fit))
        return parts.merge(moved, y)


@functools.lru_cache(maxsize=32)
def _compiled(pulls: tuple[Pull, ...], nodes: int, locals: int) -> _Compiled:
    return _Compiled(pulls, nodes, locals)


def _holds_shared(state: Any) -> bool:
    return any(map(is_shared, jax.tree.leaves(state, is_leaf=is_shared)))
