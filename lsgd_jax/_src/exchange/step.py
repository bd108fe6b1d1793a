"""One step of an exchange in lock step, which `exchange` and `outer` take alike.

    depart   sends the messages of delayed pulls; nothing of this step's gradient enters
    move     the worker's own step; communicates nothing
    arrive   all other pulls agree, and what is due lands

A program of its own may run what arrives, after that of the worker's step (see `loop`). The
step then leaves its number as a negative count, until the exchange has run: `defer`.

A due step packs the parameters into a few buffers, and runs the pulls one after the other.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jax import Array, lax

from lsgd_jax._src.by_value import are_equal
from lsgd_jax._src.checks import check_step_count
from lsgd_jax._src.exchange import kernel, parts
from lsgd_jax._src.exchange.branch import any_of, cond, unbatched
from lsgd_jax._src.exchange.fragments import Acting, slots_of
from lsgd_jax._src.exchange.kernel import Pull, PullState
from lsgd_jax._src.exchange.memory import to_host
from lsgd_jax._src.exchange.own_step import Before, OwnStep, Stepped
from lsgd_jax._src.exchange.phases import Known
from lsgd_jax._src.exchange.rule import Extras
from lsgd_jax._src.exchange.schedule import Acts
from lsgd_jax._src.exchange.view import View
from lsgd_jax._src.shared import Shared
from lsgd_jax._src.trees import Tree
from lsgd_jax._src.wire.shares import beside_a_gradient


class ExchangeState(NamedTuple):
    """The state of an `exchange`.

    Attributes:
      count: int32 scalar, steps taken; shared. It is negative while the exchange of the
        last step has not run, which only a `Loop` sees.
      is_finite: bool scalar, whether this worker was finite at the last check; otherwise it
        waits to be restored; per worker.
      misplaced: int32 scalar, the number of steps at which x was not where the exchange had
        left it; per worker.
      expected: float32 [k], the expected values of some elements of x; per worker; () in an
        `outer`.
      pulls: the states of the pulls, of each fragment or of all fragments stacked.
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
      known: what is known of what is due.
      is_deferred: whether the worker's own step is over and its exchange was deferred.

    Attributes:
      pulls: the pull of each state.
      t: int32 scalar, the number of this step, counted from 1.
    """

    def __init__(
        self,
        pulls: Sequence[Pull],
        state: ExchangeState,
        known: Known,
        is_deferred: bool = False,
    ):
        count = state.count.value
        check_step_count(count)
        self.t = _number(count, is_deferred)
        # The same t for branches and what stands in them; see `unbatched`.
        self._common = _number(unbatched(count), is_deferred)
        # An exchange that was omitted, or one without its step.
        self._is_wrong = (count >= 0) if is_deferred else (count < 0)
        self._method = pulls
        self._known = known
        self._state = state
        self._slots = slots_of(pulls, state.pulls)
        self.pulls = tuple(slot.pull for slot in self._slots)
        self._acts = known.acts(self._slots, self._common)
        self._sent: dict[int, float] = {}  # bytes by pull, known while tracing

    def take(self, own: OwnStep, loss: Any, extras: Extras) -> tuple[Tree, ExchangeState]:
        """Takes the whole step.

        Args:
          own: the worker's own step.
          loss: the loss of the step, or None.
          extras: the further arguments of `update`, for rules that read them.

        Returns:
          (u, state): both after the step; y in place of u unless the own step is an update.
        """
        departed = self.depart(own.x, loss)
        stepped = self.move(own, departed, loss, extras)
        return self.arrive(stepped)

    def depart(self, x: Tree, loss: Any) -> tuple[PullState, ...]:
        """Sends the messages of delayed pulls, before anything of this step is known.

        Args:
          x: the leaves of floats, for their shapes and dtypes.
          loss: see `beside_a_gradient`.

        Returns:
          The pulls' states.
        """
        states = self._state.pulls
        delayed = [k for k, pull in enumerate(self.pulls) if pull.delay]
        if not delayed:
            return tuple(states)

        def send(states: list[PullState]) -> list[PullState]:
            return [self._send_pending(k, x, state) for k, state in zip(delayed, states)]

        due = self._due(self._acts[k].sends for k in delayed)
        # A loaded checkpoint may be on the device.
        kept = [kernel.placed(self.pulls[k], states[k], to_host) for k in delayed]
        with beside_a_gradient(loss):
            sent = cond(due, send, lambda states: states, kept)
        after = dict(zip(delayed, sent))
        return tuple(after.get(k, state) for k, state in enumerate(states))

    def _due(self, acts: Iterable[Any]) -> Any:
        """Whether one of these holds; True where steps without any have no branch."""
        return any_of(*acts) if self._known.branches else True

    def _send_pending(self, k: int, x: Tree, state: PullState) -> PullState:
        slot = self._slots[k]

        def send(states: PullState) -> PullState:
            acting = slot.acting(slot.pull.schedule.fragment_sending, self._common, x)
            like = parts.select(acting.pull.part, x)
            state = acting.take(states)
            after, self._sent[k] = kernel.send_pending(
                acting.pull, like, state, self._common - 1, self._acts[k].round
            )
            return acting.put(states, state, after)

        return cond(self._acts[k].sends, send, lambda state: state, state)

    def move(
        self, own: OwnStep, states: Sequence[PullState], loss: Any, extras: Extras
    ) -> Stepped:
        """Returns the worker after its own step and those of the rules.

        Args:
          own, loss, extras: see `take`.
          states: the pulls' states.
        """
        is_finite = self._state.is_finite
        return own.stepped(Before(self.pulls, states, is_finite, self.t, loss, extras))

    def arrive(self, stepped: Stepped) -> tuple[Tree, ExchangeState]:
        """Runs the pulls that are due after the worker's own step.

        Returns:
          (u, state): see `take`.
        """

        def run(u: Tree, states: tuple[PullState, ...]) -> Any:
            return self._run(stepped._replace(u=u, states=states))

        def keep(u: Tree, states: tuple[PullState, ...]) -> Any:
            return u, states, stepped.is_finite

        due = self._due(acts.arrives for acts in self._acts)
        u, states, is_finite = cond(due, run, keep, stepped.u, stepped.states)
        # The bytes of an exchange are known while tracing, also on steps that send nothing.
        states = tuple(
            each._replace(traffic=each.traffic.each(self._sent[k]))
            if k in self._sent
            else each
            for k, each in enumerate(states)
        )
        missed = any_of(self._known.differs(self._method, self.t), self._is_wrong)
        return u, self._state._replace(
            count=Shared(self.t),
            is_finite=is_finite,
            misplaced=self._state.misplaced + jnp.asarray(missed, jnp.int32),
            pulls=states,
        )

    def defer(self, states: Sequence[PullState]) -> ExchangeState:
        """Returns the state after the worker's own step, without what arrives.

        If that is anything, the count is negative until another `Step` lets it arrive.

        Args:
          states: the pulls' states after `move`.
        """
        # From t itself: a program without branches must not read another worker's count.
        acts = self._known.acts(self._slots, self.t)
        is_due = any_of(*(each.arrives for each in acts))
        return self._state._replace(
            count=Shared(jnp.where(is_due, -self.t, self.t)),
            misplaced=self._state.misplaced + self._is_wrong.astype(jnp.int32),
            pulls=tuple(states),
        )

    def _run(self, stepped: Stepped) -> tuple[Tree, tuple[PullState, ...], Array]:
        """The pulls, one after the other, on a worker that is packed once."""
        whole = View.of(stepped.x, stepped.is_update, stepped.adds)
        u = stepped.u
        if stepped.is_update:
            # Otherwise XLA repeats the optimizer's step wherever u is read, and copies the
            # optimizer's state, whose old and new values are both alive then.
            u = lax.optimization_barrier(u)
        worker = whole.packing.pack(u)
        is_finite = stepped.is_finite & whole.all_finite(worker)
        after = []
        for k, state in enumerate(stepped.states):
            for index, acts in self._acts_after_the_step(k):
                acting = self._slots[k].acting(index, self._common, stepped.x)
                if acting.fragment is not None:
                    # A pull for each fragment has found this at the fragments before it.
                    is_finite |= whole.all_finite(worker) & (acting.fragment > 0)
                if k and self._follows(k):
                    # Otherwise XLA fuses the pulls, and all their targets stay alive.
                    worker = lax.optimization_barrier(worker)
                view = whole.of_part(acting.pull.part)
                takes_part = stepped.counts[k] & is_finite
                moved, state, restored = self._arrived(
                    k, acting, acts, view, takes_part, view.get(worker), state
                )
                worker = view.put(worker, moved)
                # Restoring a part does not restore the other leaves.
                is_finite |= restored if view.is_whole else whole.all_finite(worker)
            after.append(state)
        worker = kernel.drop_non_finite_steps(whole.xs, worker, whole.is_update)
        return whole.packing.unpack(worker, t=self._common), tuple(after), is_finite

    def _arrived(
        self,
        k: int,
        acting: Acting,
        acts: Acts,
        view: View,
        takes_part: Array,
        u: list[Array],
        state: PullState,
    ) -> tuple[list[Array], PullState, Array]:
        """What a pull does after the worker's own step: it lands, then it records."""
        not_restored = jnp.asarray(False)

        def land(u: list[Array], state: PullState) -> Any:
            return self._land(k, acting, view, takes_part, u, state)

        def keep(u: list[Array], state: PullState) -> Any:
            return u, state, not_restored

        u, state, restored = cond(acts.lands, land, keep, u, state)
        if acting.pull.delay:

            def record(u: list[Array], state: PullState) -> PullState:
                return self._record(acting, view, takes_part, u, state)

            state = cond(acts.records, record, lambda u, state: state, u, state)
        return u, state, restored

    def _acts_after_the_step(self, k: int) -> list[tuple[Callable[[Any], Any], Acts]]:
        """Returns what a pull does, and which fragment does it if they are stacked.

        One of them may land and another one record at the same step.
        """
        acts = self._acts[k]
        schedule = self.pulls[k].schedule
        if not self._slots[k].is_stacked:
            return [(schedule.fragment_landing, acts)]
        lands = schedule.fragment_landing, acts._replace(records=False)
        records = schedule.fragment_agreeing, acts._replace(lands=False)
        return [(index, act) for index, act in (lands, records) if act.arrives is not False]

    def _follows(self, k: int) -> bool:
        """Whether it is known that a pull lands, and an earlier one on the same leaves."""

        def lands(j: int) -> bool:
            return self._acts[j].lands is True

        def leaves(j: int) -> tuple[Any, ...]:
            return self.pulls[j].part, self.pulls[j].fragments

        return lands(k) and any(
            lands(j) and are_equal(leaves(j), leaves(k)) for j in range(k)
        )

    def _land(
        self,
        k: int,
        acting: Acting,
        view: View,
        takes_part: Array,
        u: list[Array],
        states: PullState,
    ) -> tuple[list[Array], PullState, Array]:
        """`kernel.land`, after `kernel.send` if the pull has no delay."""
        pull = acting.pull
        before = acting.take(states)
        state = before
        if pull.delay:
            target, state = kernel.arrived(pull, state, takes_part, self._common)
        else:
            round = self._acts[k].round
            target, state, self._sent[k] = kernel.send(
                pull, None, view.x, view.y(u), state, takes_part, self._common, round
            )
        target = target._replace(z=view.packing.pack(target.z))
        u, state, restored = kernel.land(
            pull,
            view.xs,
            u,
            target,
            state,
            takes_part,
            self._common,
            is_update=view.is_update,
        )
        return u, acting.put(states, before, state), restored

    def _record(
        self,
        acting: Acting,
        view: View,
        takes_part: Array,
        u: list[Array],
        states: PullState,
    ) -> PullState:
        """Keeps the operands of a delayed pull, which `depart` sends at the next step."""
        if states.is_elsewhere:
            message = kernel.pending(acting.pull, view.x, view.y(u), takes_part)
            return states._replace(pending=message._replace(z=view.y(u)))
        state = acting.take(states)
        after = kernel.recorded(acting.pull, view.x, view.y(u), state, takes_part)
        return acting.put(states, state, after)


def _number(count: Array, is_deferred: bool) -> Array:
    """The number of the step after a count, or of that whose exchange was deferred."""
    taken = jnp.abs(count)
    return taken if is_deferred else jnp.asarray(optax.safe_increment(taken))
