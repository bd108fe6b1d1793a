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
from lsgd_jax._src.exchange import kernel, parts, rotation
from lsgd_jax._src.exchange.branch import any_of, cond, unbatched
from lsgd_jax._src.exchange.kernel import PullState
from lsgd_jax._src.exchange.memory import to_host
from lsgd_jax._src.exchange.phases import Plan, Turn
from lsgd_jax._src.exchange.rotation import InTurn, Pulls, PullStates, Rotation
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
      pulls: the state of each pull, or of each `Rotation` of pulls.
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

    Attributes:
      pulls: for each state its pull or `Rotation`.
      t: int32 scalar, the number of this step, counted from 1.
    """

    def __init__(self, pulls: Pulls, state: ExchangeState, plan: Plan):
        count = state.count.value
        check_step_count(count)
        self.t = jnp.asarray(optax.safe_increment(count))
        # The same t for branches and what stands in them; see `unbatched`.
        self._common = jnp.asarray(optax.safe_increment(unbatched(count)))
        slots = dict(enumerate(pulls))
        is_one = [isinstance(each, PullStates) for each in state.pulls]
        if any(is_one):
            slots = pulls.slots(lambda i, _: is_one[i])
        self._method, self._plan, self._state = pulls, plan, state
        self.pulls = tuple(slots.values())
        self._turns = plan.turns(pulls, slots, self._common)
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
        delayed = [k for k, pull in enumerate(self.pulls) if pull.delay]
        if not delayed:
            return tuple(states)

        def send(states: list[PullState]) -> list[PullState]:
            return [self._send_pending(k, x, state) for k, state in zip(delayed, states)]

        due = any_of(*(self._turns[k].sends for k in delayed)) if self._plan.skips else True
        # A loaded checkpoint may be on the device.
        kept = [kernel.placed(self.pulls[k], states[k], to_host) for k in delayed]
        with beside_a_gradient(loss):
            sent = cond(due, send, lambda states: states, kept)
        after = dict(zip(delayed, sent))
        return tuple(after.get(k, state) for k, state in enumerate(states))

    def _send_pending(self, k: int, x: Tree, state: PullState) -> PullState:
        pull = self.pulls[k]

        def send(states: PullState) -> PullState:
            turn = rotation.turn_of(pull, pull.sends_at, self._common, x)
            like, state = parts.select(turn.pull.part, x), turn.take(states)
            after, self._sent[k] = kernel.send_pending(
                turn.pull, like, state, self._common - 1, self._turns[k].round
            )
            return turn.put(states, state, after)

        return cond(self._turns[k].sends, send, lambda state: state, state)

    def arrive(
        self,
        x: Tree,
        frame: Tree | None,
        u: Tree,
        states: Sequence[PullState],
        counts: Sequence[Array],
        is_finite: Array,
    ) -> tuple[Tree, ExchangeState]:
        """Runs the pulls that are due after the worker's own step.

        Args:
          x: the parameters before the step, for the rules that read them.
          frame: x if u is an update of it, or None if u is y itself.
          u, states, counts, is_finite: see `kernel.local`.

        Returns:
          (u, state): both after this step.
        """
        run = functools.partial(self._run, x, frame, counts, is_finite)
        keep = lambda u, states: (u, states, is_finite)
        due = any_of(*(turn.arrives for turn in self._turns))
        due = due if self._plan.skips else True
        u, states, is_finite = cond(due, run, keep, u, tuple(states))
        # The bytes of an exchange are known while tracing, also on steps that send nothing.
        states = tuple(
            each._replace(traffic=each.traffic.each(self._sent[k]))
            if k in self._sent
            else each
            for k, each in enumerate(states)
        )
        missed = self._plan.differs(self._method, self.t)
        return u, self._state._replace(
            count=Shared(self.t),
            is_finite=is_finite,
            misplaced=self._state.misplaced + jnp.asarray(missed, jnp.int32),
            pulls=states,
        )

    def _run(
        self,
        x: Tree,
        frame: Tree | None,
        counts: Sequence[Array],
        is_finite: Array,
        u: Tree,
        states: Sequence[PullState],
    ) -> tuple[Tree, tuple[PullState, ...], Array]:
        every, after = _Buffers.of(x, frame), []
        if frame is not None:
            # Otherwise XLA repeats the optimizer's step wherever u is read, and copies the
            # optimizer's state, whose old and new values are both alive then.
            u = lax.optimization_barrier(u)
        us, not_restored = every.packing.pack(u), jnp.asarray(False)
        is_finite &= every.all_finite(us)
        for k, (pull, state) in enumerate(zip(self.pulls, states)):
            for at, acts in self._acts(k):
                turn = rotation.turn_of(pull, at, self._common, x)
                if turn.fragment is not None:
                    # A pull for each fragment has found this at the fragments before it.
                    is_finite |= every.all_finite(us) & (turn.fragment > 0)
                own, takes_part = every, counts[k] & is_finite
                if k and self._follows(k):
                    # Otherwise XLA fuses the pulls, and all their targets stay alive.
                    us = lax.optimization_barrier(us)
                mine, part = us, turn.pull.part
                if part is not None:
                    # Packing again what was unpacked costs nothing: XLA joins the slices.
                    u = every.packing.unpack(us)
                    of_part = functools.partial(parts.select, part)
                    own = _Buffers.of(of_part(x), None if frame is None else of_part(frame))
                    mine = own.packing.pack(of_part(u))
                land = functools.partial(self._land, k, turn, own, takes_part)
                keep = lambda us, states: (us, states, not_restored)
                mine, state, restored = cond(acts.lands, land, keep, mine, state)
                if pull.delay:
                    record = functools.partial(self._record, turn, own, takes_part)
                    keep = lambda us, states: states
                    state = cond(acts.records, record, keep, mine, state)
                if part is None:
                    us, is_finite = mine, is_finite | restored
                else:
                    mine = parts.put_back(part, own.packing.unpack(mine), u)
                    us = every.packing.pack(mine)
                    # Restoring a part does not restore the other leaves.
                    is_finite |= every.all_finite(us)
            after.append(state)
        u = every.packing.unpack(kernel.drop_non_finite_steps(every.xs, us), t=self._common)
        return u, tuple(after), is_finite

    def _acts(self, k: int) -> list[tuple[Any, Turn]]:
        """Returns what a pull does at this step, and the step of its period.

        A rotation lands one fragment, and records another one.
        """
        pull, turn = self.pulls[k], self._turns[k]
        if not isinstance(pull, Rotation):
            return [(pull.offset, turn)]
        lands = pull.offset, turn._replace(records=False)
        records = pull.agrees_at, turn._replace(lands=False)
        return [act for act in (lands, records) if act[1].arrives is not False]

    def _follows(self, k: int) -> bool:
        """Whether it is known that a pull lands, and an earlier one on the same leaves."""
        lands = lambda j: self._turns[j].lands is True
        is_same = lambda j: are_equal(self.pulls[j].part, self.pulls[k].part)
        return lands(k) and any(lands(j) and is_same(j) for j in range(k))

    def _land(
        self,
        k: int,
        turn: InTurn,
        own: "_Buffers",
        takes_part: Array,
        us: list[Array],
        states: PullState,
    ) -> tuple[list[Array], PullState, Array]:
        """`kernel.land`, after `kernel.send` if the pull has no delay."""
        pull = turn.pull
        before = turn.take(states)
        state = before
        if pull.delay:
            target, state = kernel.arrived(pull, state, takes_part, self._common)
        else:
            y = own.packing.unpack(own.position(us))
            round = self._turns[k].round
            target, state, self._sent[k] = kernel.send(
                pull, None, own.x, y, state, takes_part, self._common, round
            )
        target = target._replace(z=own.packing.pack(target.z))
        us, state, restored = kernel.land(
            pull, own.xs, us, target, state, takes_part, self._common
        )
        return us, turn.put(states, before, state), restored

    def _record(
        self,
        turn: InTurn,
        own: "_Buffers",
        takes_part: Array,
        us: list[Array],
        states: PullState,
    ) -> PullState:
        """Keeps the operands of a delayed pull, which `depart` sends at the next step."""
        state = turn.take(states)
        y = own.packing.unpack(own.position(us))
        after = kernel.recorded(turn.pull, own.x, y, state, takes_part)
        return turn.put(states, state, after)


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

    def position(self, us: list[Array]) -> list[Array]:
        """y in the buffers: x + u in the dtypes of x, or u itself without an x."""
        return us if self.xs is None else trees.plus(self.xs, us)

    def all_finite(self, us: list[Array]) -> Array:
        """Whether y is finite."""
        y = self.position(us)
        # Leaves that keep their shapes may be sharded, as their paths tell.
        return trees.all_finite(self.packing.unpack(y) if self.packing.keeps_shapes else y)
