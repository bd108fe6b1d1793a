"""exchange: the kernel in lock step, as an optax transformation; every method composes it.

A due step packs the parameters into a few buffers, and runs the pulls one after the other,
each under a `cond` on the shared step count.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax import Array

from lsgd_jax._src import kernel, parts, trees
from lsgd_jax._src.branch import any_of, cond, the_same_for_all
from lsgd_jax._src.by_value import ByValue, by_value
from lsgd_jax._src.checks import check_option, check_same_tree
from lsgd_jax._src.explicit import with_automatic_axes
from lsgd_jax._src.kernel import Check, Pull, PullState
from lsgd_jax._src.memory import Memory
from lsgd_jax._src.packing import Packing
from lsgd_jax._src.phases import QUIET, Phase, Plan, all_phases, phase_at
from lsgd_jax._src.placement import misplaced, sample_after, unknown
from lsgd_jax._src.rule import NO_EXTRAS, Extras, Rule
from lsgd_jax._src.shared import Shared
from lsgd_jax._src.trees import Tree


NO_PARAMS = "an exchange needs the parameters: call `tx.update(grads, state, params, ...)`"


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


class Exchange(ByValue, optax.GradientTransformationExtraArgs):
    """The transformation that `exchange` returns.

    It keeps its pulls, so that exchanges compose, and its `check`. Equal calls make equal
    exchanges, and an exchange pickles as the call that made it.
    """

    pulls: tuple[Pull, ...] = ()
    check: Check = "due"

    def phase(self, step: int) -> Phase:
        """Returns what the pulls do at this step, counted from 1; for host loops."""
        return phase_at(self.pulls, step)

    def phases(self) -> tuple[Phase, ...]:
        """Returns all phases from the second step on, in the order of their appearance."""
        return all_phases(self.pulls)

    def is_due(self, step: int) -> bool:
        """Whether a pull does anything at this step, counted from 1; for host loops."""
        return self.phase(step) != QUIET


@by_value
def exchange(
    *given: Pull | Exchange, check: Check = "due", memory: Memory | None = None
) -> Exchange:
    r"""Pulls a worker periodically towards a target that a group of workers agrees on.

    With x the worker's parameters, u the update from the transformations before this one,
    t = 1, 2, … the step, and for each pull in turn z its target, λ its strength, τ its
    period `every`, o its offset, d its delay:

    .. math::
      y &\leftarrow x + u \\
      z &\leftarrow \text{agree}(x, y) && \text{if } t \equiv o - d \pmod \tau \\
      y &\leftarrow y + \lambda(t) \, (z - y) && \text{if } t \equiv o \pmod \tau \\
      u &\leftarrow y - x

    On all other steps u passes unchanged and nothing is communicated. The message of a
    delayed pull leaves at the start of step o - d + 1, so that it travels while that step's
    gradient is computed.

    A loop that counts its steps knows what is due: with ``p = tx.phase(t)``, ``tx.update(
    grads, state, params, value=loss, phase=p)`` compiles exactly that, without a
    conditional, once for each of `Exchange.phases`. ``due=False`` is the phase in which
    nothing is due. A phase other than that of the step count is counted as misplaced.

    The update determines the next x, so an exchange stands **last** in its chain. If x
    differs at the next step, `diagnostics` counts it as misplaced.

    A worker whose loss or y is not finite does not contribute to the target and takes the
    whole target, y ← z. Without a target, because no worker of the group is finite, y stays
    as it is, and elements of y that are not finite stay at x. On a step whose loss is not
    finite, only elements that stay finite move.

    Leaves of integers, bools and random keys are never exchanged: their updates pass
    unchanged.

    Args:
      *given: pulls, in this order. An exchange (any method that pulls) stands for its
        pulls, so that ``exchange(lsgd(0.1, 0.0), sgp(axes="node"))`` has two levels.
      check: when a worker checks that all of x + u is finite. 'due': on steps that
        communicate. On other steps a finite loss is enough, and the check costs nothing.
        'every_step': on every step, and a step that is not finite is not taken. Use it if
        ``optax.apply_if_finite`` is not around the base optimizer and updates are applied
        by ``optax.apply_updates``, which cannot restore an x that is nan.
      memory: the `memory` of all pulls. Defaults to that of each pull.

    Returns:
      A gradient transformation for one worker, for functions in which the rules' axes are
      bound. Its state, an `ExchangeState`, keeps its shapes, dtypes and shardings. Updates
      of parameters narrower than float32 are returned in float32, so that x + u rounds to
      the target on all workers. `update` takes the worker's loss as ``value=`` or
      ``loss=``. For the methods that read them it takes the worker's gradient as ``grad=``
      and its loss as a function of the parameters as ``value_fn=``.

    Raises:
      ValueError: an argument that is no pull or exchange; in `init`, a leaf to exchange
        that is complex or narrower than 16 bits; in `update`, no parameters, updates of
        another structure or shape, the state of another method, or no `value_fn` for a
        method that reads it.

    >>> import jax.numpy as jnp
    >>> import lsgd_jax as lj
    >>> tx = lj.exchange(lj.Pull(lj.leader("local"), strength=0.5, every=2))
    >>> workers = lj.Workers(nodes=1, locals=2)
    >>> x, loss = workers.put((jnp.array([0.0, 8.0]), jnp.array([1.0, 2.0])))
    >>> state = workers.map(tx.init)(x)
    >>> step = workers.map(lambda x, s, v: tx.update(jnp.zeros_like(x), s, x, value=v))
    >>> for _ in range(2):
    ...     update, state = step(x, state, loss)
    ...     print(update.tolist())
    [0.0, 0.0]
    [0.0, -4.0]
    """
    check_option("check", check, get_args(Check))
    pulls = tuple(itertools.chain(*map(_pulls_of, given)))
    if memory is not None:
        pulls = tuple(dataclasses.replace(pull, memory=memory) for pull in pulls)

    def init(params: Tree) -> Any:
        _check_dtypes(pulls, params)
        x = trees.floats(params)
        return ExchangeState(
            count=Shared(jnp.zeros([], jnp.int32)),
            is_finite=jnp.asarray(True),
            misplaced=jnp.zeros([], jnp.int32),
            expected=unknown(x),
            pulls=tuple(kernel.init(pull, x) for pull in pulls),
        )

    def update(
        updates,
        state,
        params=None,
        *,
        value=None,
        loss=None,
        grad=None,
        value_fn=None,
        due=None,
        phase=None,
        **extra_args,
    ) -> Any:
        del extra_args
        if params is None:
            raise ValueError(NO_PARAMS)
        check_same_tree("updates", updates, params)
        loss, extras = loss_of(value, loss), extras_of(pulls, params, grad, value_fn)
        plan = Plan.of(pulls, due, phase)
        with naming_the_state(state, lambda: init(params)):
            return step(updates, state, params, loss, extras, plan)

    def step(updates, state, params, loss, extras, plan) -> Any:
        x, u = trees.floats(params), trees.widen(trees.floats(updates, like=params))
        wrong = misplaced(state.expected, x)
        u, after = advance(pulls, x, u, state, loss, plan, check, extras)
        # Elements of u can be read only if u is an array of its own. On a quiet step it is
        # fused with the optimizer and `apply_updates`, and reading it would cost a pass.
        is_fused = plan.phase == QUIET
        return trees.refill(u, updates), after._replace(
            misplaced=jnp.maximum(after.misplaced, state.misplaced + wrong),
            expected=unknown(x) if is_fused else sample_after(x, u),
        )

    transformation = Exchange(with_automatic_axes(init), with_automatic_axes(update))
    transformation.pulls, transformation.check = pulls, check
    return transformation


def advance(
    pulls: Sequence[Pull],
    x: Tree,
    u: Tree,
    state: ExchangeState,
    loss: Any,
    plan: Plan,
    check: Check,
    extras: Extras,
) -> tuple[Tree, ExchangeState]:
    """One step of the kernel: returns u after all due pulls, and the state.

    Args:
      pulls: the pulls, in order.
      x, u: the leaves of floats; u in float32 or wider.
      state: the state before the step.
      loss: the loss at x, or None.
      plan: what is due.
      check: see `exchange`.
      extras: see `extras_of`.
    """
    at = Step(pulls, state, plan, extras)
    states = at.depart(x, state.pulls)
    u, states, counts, is_finite = kernel.local(
        pulls, x, u, loss, states, state.is_finite, at.t, check, extras
    )
    u, states, is_finite = at.arrive(x, x, u, states, counts, is_finite)
    return u, at.after(state, states, is_finite)


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
        self.t = jnp.asarray(optax.safe_increment(count))
        # The same t for branches and what stands in them; see `the_same_for_all`.
        self._common = jnp.asarray(optax.safe_increment(the_same_for_all(count)))
        self._pulls, self._plan, self._extras = pulls, plan, extras
        self._turns = plan.turns(pulls, self._common)
        self._sent: dict[int, float] = {}  # bytes by pull, known while tracing

    def depart(self, x: Tree, states: Sequence[PullState]) -> tuple[PullState, ...]:
        """Sends the messages of delayed pulls, before anything of this step is known.

        x: the leaves of floats.
        """
        delayed = [k for k, pull in enumerate(self._pulls) if pull.delay]
        if not delayed:
            return tuple(states)

        def send(states: list[PullState]) -> list[PullState]:
            return [self._send_pending(k, x, state) for k, state in zip(delayed, states)]

        due = any_of(*(self._turns[k].sends for k in delayed)) if self._plan.skips else True
        # A loaded checkpoint may be on the device.
        kept = [kernel.stored(self._pulls[k], states[k]) for k in delayed]
        sent = cond(due, send, lambda states: states, kept)
        after = dict(zip(delayed, sent))
        return tuple(after.get(k, state) for k, state in enumerate(states))

    def _send_pending(self, k: int, x: Tree, state: PullState) -> PullState:
        pull = self._pulls[k]
        value_fn = _value_of_part(pull, self._extras.value_fn, x)

        def send(state: PullState) -> PullState:
            like = parts.select(pull.part, x)
            state, self._sent[k] = kernel.send_pending(
                pull, like, state, self._common - 1, value_fn
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
        whole, after = _Buffers.of(x, frame), []
        us = whole.packing.pack(u)

        def finite_now(us: list[Array]) -> Array:
            return trees.all_finite(whole.packing.named(kernel.position(whole.xs, us)))

        is_finite &= finite_now(us)
        for k, (pull, state) in enumerate(zip(self._pulls, states)):
            takes_part = counts[k] & is_finite
            if pull.part is None:
                us, state, restored = self._pull(k, whole, us, state, takes_part, None)
                is_finite |= restored
            else:
                # Packing again what was unpacked costs nothing: XLA joins the slices.
                u = whole.packing.unpack(us)
                part = functools.partial(parts.select, pull.part)
                some = _Buffers.of(part(x), None if frame is None else part(frame))
                others = kernel.position(frame, u)
                mine = some.packing.pack(part(u))
                mine, state, _ = self._pull(k, some, mine, state, takes_part, others)
                mine = parts.put_back(pull.part, some.packing.unpack(mine), u)
                us = whole.packing.pack(mine)
                # Restoring a part does not restore the other leaves.
                is_finite |= finite_now(us)
            after.append(state)
        u = whole.packing.unpack(kernel.stay(whole.xs, us), t=self._common)
        return u, tuple(after), is_finite

    def _pull(
        self,
        k: int,
        leaves: "_Buffers",
        us: list[Array],
        state: PullState,
        is_finite: Array,
        others: Tree | None,
    ) -> tuple[list[Array], PullState, Array]:
        """Runs one pull: returns us, its state, and whether it restored the worker.

        others: y of all leaves, if the pull has only some of them.
        """
        pull, turn, (packing, x, xs) = self._pulls[k], self._turns[k], leaves
        value_fn = _value_of_part(pull, self._extras.value_fn, others)
        not_restored = jnp.asarray(False)

        def y_of(us: list[Array]) -> Tree:
            return packing.unpack(kernel.position(xs, us))

        def land(us: list[Array], target: Any, state: PullState) -> Any:
            packed = target._replace(z=packing.pack(target.z))
            return kernel.land(pull, xs, us, packed, state, is_finite, self._common)

        def send_and_land(us: list[Array], state: PullState) -> Any:
            target, state, self._sent[k] = kernel.send(
                pull, None, x, y_of(us), state, is_finite, self._common, value_fn
            )
            return land(us, target, state)

        def land_pending(us: list[Array], state: PullState) -> Any:
            return land(us, kernel.fetched(pull, state).pending, state)

        def record(us: list[Array], state: PullState) -> PullState:
            pending = kernel.pending(pull, x, y_of(us), is_finite)
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


def _value_of_part(
    pull: Pull, value_fn: Callable[[Tree], Array] | None, y: Tree | None
) -> Callable[[Tree], Array] | None:
    """Returns the loss as a function of the pull's leaves; the others are those of y."""
    if value_fn is None or pull.part is None:
        return value_fn
    return lambda part: value_fn(parts.put_back(pull.part, part, y))


# Checks


def _pulls_of(given: Any) -> tuple[Pull, ...]:
    if isinstance(given, Exchange):
        return given.pulls
    if isinstance(given, Pull):
        return (given,)
    hint = "wrap it in lj.Pull(rule, strength, every=...)"
    if not isinstance(given, Rule):
        hint = "a base optimizer or an aggregation stands before it in `optax.chain`"
    raise ValueError(
        f"`exchange` takes pulls and methods that pull, got {type(given).__name__}: {hint}"
    )


def _check_dtypes(pulls: Sequence[Pull], params: Tree) -> None:
    """Raises ValueError for a leaf that is complex or narrower than 16 bits."""
    for pull in pulls:
        part = parts.select(pull.part, params)
        for path, leaf in jax.tree_util.tree_leaves_with_path(part):
            if jnp.issubdtype(leaf.dtype, jnp.inexact) and not trees.is_float(leaf):
                raise ValueError(
                    "leaves that are exchanged must be of float16, bfloat16, float32 or "
                    f"float64, got {leaf.dtype} at {jax.tree_util.keystr(path)}; exclude "
                    "it with `part=`"
                )


@contextlib.contextmanager
def naming_the_state(state: Any, init: Callable[[], Any]) -> Iterator[None]:
    """Raises ValueError for a state whose structure differs from that of `init`.

    It compares the structures only after another error, because a comparison at every call
    would be slow.
    """
    try:
        yield
    except Exception as error:
        expected = jax.tree.structure(jax.eval_shape(init))
        if jax.tree.structure(state) == expected:
            raise
        raise ValueError(
            "`state` must be what the `init` of this exchange returned for these "
            f"parameters, {expected}, got {jax.tree.structure(state)}"
        ) from error


def extras_of(
    pulls: Sequence[Pull],
    params: Tree,
    grad: Tree | None,
    value_fn: Callable[[Tree], Any] | None,
) -> Extras:
    """The further arguments of `update`, on the leaves of floats, that a rule reads.

    Raises:
      ValueError: a gradient that is no tree like the parameters; no function for a rule
        that reads `value_fn`, or, once called, one that returns no scalar.
    """
    extras = NO_EXTRAS
    if grad is not None and any(pull.rule.reads_gradient for pull in pulls):
        check_same_tree("grad", grad, params)
        extras = extras._replace(grad=trees.floats(grad, like=params))
    if any(pull.rule.reads_value_fn for pull in pulls):
        if not callable(value_fn):
            raise ValueError(
                "workers judged by peers need `value_fn`, a function from parameters to "
                "the loss on this worker's batch: call `tx.update(grads, state, params, "
                f"value=loss, value_fn=f)`, got value_fn={value_fn!r}"
            )
        extras = extras._replace(value_fn=lambda y: _measured(value_fn, y, params))
    return extras


def _measured(value_fn: Callable[[Tree], Any], y: Tree, params: Tree) -> Array:
    """The loss at y, the leaves of floats, with the other leaves of the parameters."""
    loss = loss_of(value_fn(trees.refill(y, params)), None)
    if jnp.shape(loss) != ():
        raise ValueError(f"`value_fn` must return the loss, a scalar, got {loss}")
    return loss


def loss_of(value: Any, loss: Any) -> Any:
    """Returns the worker's loss, passed by either of its names."""
    if value is not None and loss is not None and value is not loss:
        raise ValueError("pass the loss as `value=` or as `loss=`, got both")
    loss = value if loss is None else loss
    if loss is None:
        return None
    try:
        array = jnp.asarray(loss)
        is_real = jnp.issubdtype(array.dtype, jnp.floating)
        return array if is_real else array.astype(jnp.result_type(float))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"`value` must be the worker's loss, a scalar, got value={loss!r}"
        ) from error
