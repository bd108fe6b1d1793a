"""One step of an exchange in lock step: messages that depart before it, pulls that arrive.

    depart   sends the messages of delayed pulls; nothing of this step's gradient enters
    arrive   after the worker's own step: all other pulls agree, and what is due lands

A due step packs the parameters into a few buffers, and runs the pulls one after the other.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jax import Array, lax

from lsgd_jax._src import trees
from lsgd_jax._src.by_value import are_equal
from lsgd_jax._src.checks import check_step_count
from lsgd_jax._src.exchange import kernel, parts
from lsgd_jax._src.exchange.branch import any_of, cond, unbatched
from lsgd_jax._src.exchange.kernel import Pull, PullState
from lsgd_jax._src.exchange.phases import Plan
from lsgd_jax._src.exchange.rule import Extras
from lsgd_jax._src.shared import Shared
from lsgd_jax._src.trees import Tree
from lsgd_jax._src.wire.packing import Packing
from lsgd_jax._src.wire.shares import beside_a_gradient


class ExchangeState(NamedTuple):
    """The state of an `exchange`.

    Attributes:
      count: int32 scalar, steps taken; shared.
      is_finite: bool scalar, whether this worker was finite at the last check; otherwise it
        waits to be restored; per worker.
      misplaced: int32 scalar, the number of steps at which x was not where the exchange had
        left it; per worker.
      expected: float32 [k], the expected values of some elements of x; per worker; () in an
        `outer`.
      pulls: the state of each pull.
    """

    count: Shared[Array]
    is_finite: Array
    misplaced: Array
    expected: Array
    pulls: tuple[PullState, ...]


class Step:
    """One step of the pulls, while it is traced.

    Args:
      pulls: the pulls, in order.
      state: the state before the step.
      plan: what is due.
      extras: see `extras_of`.

    Attributes:
      t: int32 scalar, the number of this step, counted from 1.
    """

    def __init__(
        self, pulls: Sequence[Pull], state: ExchangeState, plan: Plan, extras: Extras
    ):
        count = state.count.value
        check_step_count(count)
        self.t = jnp.asarray(optax.safe_increment(count))
        # The same t for branches and what stands in them; see `unbatched`.
        self._common = jnp.asarray(optax.safe_increment(unbatched(count)))
        self._pulls, self._plan, self._extras = pulls, plan, extras
        self._turns = plan.turns(pulls, self._common)
        self._sent: dict[int, float] = {}  # bytes by pull, known while tracing

    def depart(
        self, x: Tree, states: Sequence[PullState], loss: Array | None
    ) -> tuple[PullState, ...]:
        """Sends the messages of delayed pulls, before anything of this step is known.

        Args:
          x: the leaves of floats.
          states: the pulls' states.
          loss: see `beside_a_gradient`.
        """
        delayed = [k for k, pull in enumerate(self._pulls) if pull.delay]
        if not delayed:
            return tuple(states)

        def send(states: list[PullState]) -> list[PullState]:
            return [self._send_pending(k, x, state) for k, state in zip(delayed, states)]

        due = any_of(*(self._turns[k].sends for k in delayed)) if self._plan.skips else True
        # A loaded checkpoint may be on the device.
        kept = [kernel.stored(self._pulls[k], states[k]) for k in delayed]
        with beside_a_gradient(loss):
            sent = cond(due, send, lambda states: states, kept)
        after = dict(zip(delayed, sent))
        return tuple(after.get(k, state) for k, state in enumerate(states))

    def _send_pending(self, k: int, x: Tree, state: PullState) -> PullState:
        pull = self._pulls[k]

        def send(state: PullState) -> PullState:
            like = parts.select(pull.part, x)
            state, self._sent[k] = kernel.send_pending(
                pull, like, state, self._common - 1, self._turns[k].round
            )
            return state

        return cond(self._turns[k].sends, send, lambda state: state, state)

    def arrive(
        self,
        x: Tree,
        frame: Tree | None,
        u: Tree,
        states: Sequence[PullState],
        counts: Sequence[Array],
        is_finite: Array,
    ) -> tuple[Tree, tuple[PullState, ...], Array]:
        """Runs the pulls that are due after the worker's own step.

        Args:
          x: the parameters before the step, for the rules that read them.
          frame: x if u is an update of it, or None if u is y itself.
          u, states, counts, is_finite: see `kernel.local`.

        Returns:
          (u, states, is_finite).
        """
        run = lambda u, states: self._run(x, frame, u, states, counts, is_finite)
        keep = lambda u, states: (u, states, is_finite)
        due = any_of(*(turn.arrives for turn in self._turns))
        due = due if self._plan.skips else True
        return cond(due, run, keep, u, tuple(states))

    def after(
        self, state: ExchangeState, states: Sequence[PullState], is_finite: Array
    ) -> ExchangeState:
        """Returns the state after this step."""
        states = tuple(
            each._replace(traffic=each.traffic.each(self._sent[k]))
            if k in self._sent
            else each
            for k, each in enumerate(states)
        )
        missed = self._plan.differs(self._pulls, self.t)
        return ExchangeState(
            count=Shared(self.t),
            is_finite=is_finite,
            misplaced=state.misplaced + jnp.asarray(missed, jnp.int32),
            expected=state.expected,
            pulls=states,
        )

    def _run(
        self,
        x: Tree,
        frame: Tree | None,
        u: Tree,
        states: Sequence[PullState],
        counts: Sequence[Array],
        is_finite: Array,
    ) -> tuple[Tree, tuple[PullState, ...], Array]:
        every, after = _Buffers.of(x, frame), []
        us = every.packing.pack(u)

        def finite_now(us: list[Array]) -> Array:
            return trees.all_finite(every.packing.named(kernel.position(every.xs, us)))

        is_finite &= finite_now(us)
        for k, (pull, state) in enumerate(zip(self._pulls, states)):
            takes_part = counts[k] & is_finite
            if self._follows(k):
                # Otherwise XLA fuses the pulls, and the targets of all of them stay alive.
                us = lax.optimization_barrier(us)
            if pull.part is None:
                us, state, restored = self._pull(k, every, us, state, takes_part, None)
                is_finite |= restored
            else:
                # Packing again what was unpacked costs nothing: XLA joins the slices.
                u = every.packing.unpack(us)
                part = functools.partial(parts.select, pull.part)
                some = _Buffers.of(part(x), None if frame is None else part(frame))
                others = kernel.position(frame, u)
                mine = some.packing.pack(part(u))
                mine, state, _ = self._pull(k, some, mine, state, takes_part, others)
                mine = parts.put_back(pull.part, some.packing.unpack(mine), u)
                us = every.packing.pack(mine)
                # Restoring a part does not restore the other leaves.
                is_finite |= finite_now(us)
            after.append(state)
        u = every.packing.unpack(kernel.drop_non_finite_steps(every.xs, us), t=self._common)
        return u, tuple(after), is_finite

    def _follows(self, k: int) -> bool:
        """Whether it is known that a pull lands, and an earlier one on the same leaves."""
        lands = lambda j: self._turns[j].lands is True
        is_same = lambda j: are_equal(self._pulls[j].part, self._pulls[k].part)
        return lands(k) and any(lands(j) and is_same(j) for j in range(k))

    def _pull(
        self,
        k: int,
        leaves: "_Buffers",
        us: list[Array],
        state: PullState,
        takes_part: Array,
        others: Tree | None,
    ) -> tuple[list[Array], PullState, Array]:
        """Runs one pull: returns us, its state, and whether it restored the worker.

        others: y of all leaves, if the pull has only some of them.
        """
        pull, turn, (packing, x, xs) = self._pulls[k], self._turns[k], leaves
        not_restored = jnp.asarray(False)

        def y_of(us: list[Array]) -> Tree:
            return packing.unpack(kernel.position(xs, us))

        def land(us: list[Array], target: Any, state: PullState) -> Any:
            packed = target._replace(z=packing.pack(target.z))
            return kernel.land(pull, xs, us, packed, state, takes_part, self._common)

        def send_and_land(us: list[Array], state: PullState) -> Any:
            target, state, self._sent[k] = kernel.send(
                pull, None, x, y_of(us), state, takes_part, self._common, turn.round
            )
            return land(us, target, state)

        def land_pending(us: list[Array], state: PullState) -> Any:
            return land(us, kernel.fetched(pull, state).pending, state)

        def record(us: list[Array], state: PullState) -> PullState:
            pending = kernel.pending(pull, x, y_of(us), takes_part)
            return kernel.stored(pull, state._replace(pending=pending))

        arrive = land_pending if pull.delay else send_and_land
        keep = lambda us, state: (us, state, not_restored)
        us, state, restored = cond(turn.lands, arrive, keep, us, state)
        if pull.delay:
            state = cond(turn.records, record, lambda us, state: state, us, state)
        return us, state, restored


class _Buffers(NamedTuple):
    """The leaves that a pull exchanges.

    Attributes:
      packing: the buffers that they lie in.
      x: the leaves, before the step.
      xs: x in the buffers, or None if y is held itself.
    """

    packing: Packing
    x: Tree
    xs: list[Array] | None

    @classmethod
    def of(cls, x: Tree, frame: Tree | None) -> "_Buffers":
        packing = Packing(x)
        return cls(packing, x, None if frame is None else packing.pack(frame))
