"""exchange: the kernel in lock step as an optax transformation; all methods compose it."""

import contextlib
import itertools
from collections.abc import Callable, Generator, Sequence
from typing import Any, Unpack

import jax
import jax.numpy as jnp
import optax

from lsgd_jax._src import trees
from lsgd_jax._src.by_value import ByValue, by_value
from lsgd_jax._src.checks import check_same_tree
from lsgd_jax._src.complex_leaves import in_pairs
from lsgd_jax._src.exchange import fragments, parts
from lsgd_jax._src.exchange.kernel import Check, Pull
from lsgd_jax._src.exchange.noted import note
from lsgd_jax._src.exchange.options import PullOptions, with_options
from lsgd_jax._src.exchange.own_step import Chained, Counts, Stepped
from lsgd_jax._src.exchange.phases import (
    QUIET,
    Known,
    Phase,
    Sizes,
    all_phases,
    phase_at,
    skips_of,
)
from lsgd_jax._src.exchange.placement import misplaced, sample_after, sample_of, unknown
from lsgd_jax._src.exchange.rule import NO_EXTRAS, Extras, Rule
from lsgd_jax._src.exchange.step import ExchangeState, Step
from lsgd_jax._src.explicit import with_automatic_axes
from lsgd_jax._src.shared import Shared
from lsgd_jax._src.trees import Tree


NO_PARAMS = "an exchange needs the parameters: call `tx.update(grads, state, params, ...)`"


class InPhases(ByValue):
    """A method that pulls: what it does at each step is known before the step is traced."""

    pulls: tuple[Pull, ...] = ()

    def phase(self, step: int, sizes: Sizes | None = None) -> Phase:
        """Returns what the pulls do at this step, counted from 1; for host loops.

        Args:
          step: t.
          sizes: the sizes of the workers' axes by name, such as `Workers.sizes`. With them
            the phases of a method on a graph that changes with the exchange (`sgp`,
            `wagma`, …) name its round, so that a program holds that round alone. Without
            them it holds all of about log2 W rounds as branches.

        Raises:
          ValueError: sizes without an axis of the method.
        """
        return phase_at(self.pulls, step, sizes)

    def phases(self, sizes: Sizes | None = None) -> tuple[Phase, ...]:
        """Returns all phases from the second step on, in the order of their appearance."""
        return all_phases(self.pulls, sizes)

    def pull_of(self, number: int) -> Pull:
        """Returns the pull, or that of the fragment, that phases name by this number.

        Raises:
          ValueError: no pull has it.
        """
        for slot in fragments.slots_of(self.pulls):
            if slot.number == number:
                return slot.pull
        raise ValueError(f"`number` must be that of a pull in a phase, got {number=}")

    def is_due(self, step: int) -> bool:
        """Whether a pull does anything at this step, counted from 1; for host loops."""
        return self.phase(step) != QUIET


class Exchange(InPhases, optax.GradientTransformationExtraArgs):
    """The transformation that `exchange` returns.

    It keeps its pulls, so that exchanges compose, and its `check`. Equal calls make equal
    exchanges, and an exchange pickles as the call that made it.
    """

    check: Check = "due"

    def skip(self, params: Tree, state: Any, *, phase: Phase | None = None) -> Any:
        """Returns the parameters and this exchange's state after a step without a gradient.

        In a chain the states of the transformations before it stay as they are.

        Args:
          params: x.
          state: the state of this exchange, the last one in its chain.
          phase: see `exchange`.
        """
        still = trees.zeros(params)
        update, state = self.update(still, state, params, phase=phase)
        return trees.apply_updates(params, update), state

    @property
    def reads_x(self) -> bool:
        """Whether a step depends on x: by a rule, or because it may be undone."""
        return self.check == "every_step" or any(pull.rule.reads_x for pull in self.pulls)

    @property
    def is_separable(self) -> bool:
        """Whether what arrives may be a program of its own, see `defer`.

        It may not if a rule depends on x, if messages are to travel while the next gradient
        is computed, if a step that is not finite is undone, or if steps have no gradient.
        """
        if self.reads_x or skips_of(self.pulls):
            return False
        return not any(pull.delay for pull in self.pulls)

    @with_automatic_axes
    def defer(
        self,
        updates: Tree,
        state: Any,
        params: Tree,
        *,
        loss: Any = None,
        grad: Tree | None = None,
    ) -> Any:
        """`update` and `apply_updates` without what arrives at the step.

        For any step of a method that is separable. It communicates nothing.

        Args:
          updates, state, params, loss, grad: as for `update`.

        Returns:
          (params, state, counts): counts: for each pull, whether loss and rule let this
          worker take part. `arrive` takes them if a pull is due at this step.
        """
        updates, params = trees.arrays((updates, params))
        check_same_tree("updates", updates, params)
        loss = loss_of(None, loss)
        extras = extras_of(self.pulls, params, grad)
        note((pull.rule.axes for pull in self.pulls), params, is_silent=True)
        with naming_the_state(state, lambda: self.init(params)):
            x = trees.floats(params)
            u = trees.widened(trees.floats(updates, like=params))
            wrong = misplaced(state.expected, x)
            at = Step(self.pulls, state, Known())
            stepped = at.move(Chained(x, u, self.check), state.pulls, loss, extras)
            after = at.defer(stepped.states)
            params = trees.apply_updates(params, trees.refill(stepped.u, updates))
            after = after._replace(
                misplaced=jnp.maximum(after.misplaced, state.misplaced + wrong),
                # To read elements of the sum would cost a copy of x, see `update`.
                expected=unknown(x),
            )
            return params, after, stepped.counts

    @with_automatic_axes
    def arrive(
        self, before: Tree, params: Tree, state: Any, counts: Counts, *, phase: Phase
    ) -> tuple[Tree, Any]:
        """What `defer` has left out: afterwards all is as after `update`.

        Args:
          before: the parameters before the step, to which the chain adds.
          params, state, counts: the results of `defer`.
          phase: what `phase(t)` returned for the step.
        """
        known = Known.of(self.pulls, None, phase)
        note((pull.rule.axes for pull in self.pulls), params, known.phase == QUIET)
        with naming_the_state(state, lambda: self.init(params)):
            stepped = Stepped(
                x=trees.floats(before),
                u=trees.floats(params),
                is_update=False,
                states=state.pulls,
                counts=counts,
                is_finite=state.is_finite,
                adds=True,
            )
            y, after = Step(self.pulls, state, known, is_deferred=True).arrive(stepped)
            return trees.refill(y, params), after._replace(expected=sample_of(y))


@by_value
def exchange(*given: Pull | Exchange, **options: Unpack[PullOptions]) -> Exchange:
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
    gradient is computed. With late='add' it moves y by what the agreement has moved it by,
    λ(t) (z - y) with the y of the agreement, and the d steps since then stay.

    A loop that counts its steps knows what is due: with ``p = tx.phase(t)``, ``tx.update(
    grads, state, params, loss=loss, phase=p)`` compiles exactly that, without a
    conditional, once for each of `Exchange.phases`. ``due=False`` is the phase in which
    nothing is due. A phase other than that of the step count is counted as misplaced.

    The update determines the next x, so an exchange stands **last** in its chain. If x
    differs at the next step, `diagnostics` counts it as misplaced.

    A worker whose loss or y is not finite does not contribute to the target and takes the
    whole target, y ← z. Without a target, because no worker of the group is finite, y stays
    as it is, and elements of y that are not finite stay at x. On a step whose loss is not
    finite, only elements that stay finite move.

    With ``check="due"`` a worker checks that all of x + u is finite on steps that
    communicate. On other steps a finite loss is enough, and the check costs nothing. With
    'every_step' a step that is not finite is not taken. Use it if
    ``optax.apply_if_finite`` is not around the base optimizer and updates are applied by
    ``optax.apply_updates``, which cannot restore an x that is nan.

    Leaves of integers, bools and random keys are never exchanged: their updates pass
    unchanged. A complex leaf is exchanged as two real ones, exactly.

    Args:
      *given: pulls, in this order. An exchange (any method that pulls) stands for its
        pulls, so that ``exchange(lsgd(0.1, 0.0), sgp(axes="node"))`` has two levels.
      **options: replace those of all pulls, see `PullOptions`. By default each pull keeps
        its own, and `check` is 'every_step' if it is for one of the exchanges.

    Returns:
      A gradient transformation for one worker, for functions in which the rules' axes are
      bound. Its state, an `ExchangeState`, keeps its shapes, dtypes and shardings. Updates
      of parameters narrower than float32 are returned in float32, so that x + u rounds to
      the target on all workers. `update` takes the worker's loss as ``loss=`` or
      ``value=``, and for the methods that read it the worker's gradient as ``grad=``.

    Raises:
      ValueError: an argument that is no pull or exchange; in `init`, a leaf to exchange
        that is narrower than 16 bits; in `update`, no parameters, updates of
        another structure or shape, or the state of another method.

    >>> import jax.numpy as jnp
    >>> import lsgd_jax as lj
    >>> tx = lj.exchange(lj.Pull(lj.rules.leader("local"), strength=0.5, every=2))
    >>> workers = lj.Workers(nodes=1, locals=2)
    >>> x, loss = workers.put((jnp.array([0.0, 8.0]), jnp.array([1.0, 2.0])))
    >>> state = workers.map(tx.init)(x)
    >>> step = workers.map(lambda x, s, v: tx.update(jnp.zeros_like(x), s, x, loss=v))
    >>> for _ in range(2):
    ...     update, state = step(x, state, loss)
    ...     print(update.tolist())
    [0.0, 0.0]
    [0.0, -4.0]
    """
    pulls = tuple(with_options([*itertools.chain(*map(_pulls_of, given))], options))
    is_strict = any(getattr(each, "check", "due") == "every_step" for each in given)
    check = options.get("check", "every_step" if is_strict else "due")

    def init(params: Tree) -> Any:
        params = trees.arrays(params)
        _check_dtypes(pulls, params)
        x = trees.floats(params)
        state = ExchangeState(
            count=Shared(jnp.zeros([], jnp.int32)),
            is_finite=jnp.asarray(True),
            misplaced=jnp.zeros([], jnp.int32),
            expected=unknown(x),
            pulls=fragments.init(pulls, x),
        )
        # A program may donate parameters and state together, so they share no buffers.
        return trees.with_own_buffers(state, params)

    def update(
        updates,
        state,
        params=None,
        *,
        value=None,
        loss=None,
        grad=None,
        due=None,
        phase=None,
        **extra_args,
    ) -> Any:
        del extra_args
        if params is None:
            raise ValueError(NO_PARAMS)
        updates, params = trees.arrays((updates, params))
        check_same_tree("updates", updates, params)
        loss = loss_of(value, loss)
        extras = extras_of(pulls, params, grad)
        known = Known.of(pulls, due, phase)
        note((pull.rule.axes for pull in pulls), params, known.phase == QUIET)
        with naming_the_state(state, lambda: init(params)):
            x = trees.floats(params)
            u = trees.widened(trees.floats(updates, like=params))
            # Before anything moves: x must be where the last step has left it.
            wrong = misplaced(state.expected, x)
            own = Chained(x, u, check)
            u, after = Step(pulls, state, known).take(own, loss, extras)
            # Elements of u can be read only if u is an array of its own. On a quiet step it
            # is fused with the optimizer and `apply_updates`, and reading it would cost a
            # pass.
            is_fused = known.phase == QUIET or not pulls
            return trees.refill(u, updates), after._replace(
                # A step that is misplaced in both ways counts once.
                misplaced=jnp.maximum(after.misplaced, state.misplaced + wrong),
                expected=unknown(x) if is_fused else sample_after(x, u),
            )

    transformation = Exchange(with_automatic_axes(init), with_automatic_axes(update))
    transformation.pulls = pulls
    transformation.check = check
    return transformation


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
    """Raises ValueError for a leaf that is narrower than 16 bits."""
    params = in_pairs(params)
    for pull in pulls:
        part = parts.select(pull.part, params)
        for path, leaf in jax.tree_util.tree_leaves_with_path(part):
            if jnp.issubdtype(leaf.dtype, jnp.inexact) and not trees.is_float(leaf):
                raise ValueError(
                    "leaves that are exchanged must be of float16, bfloat16, float32, "
                    f"float64 or complex, got {leaf.dtype} at "
                    f"{jax.tree_util.keystr(path)}; exclude it with `part=`"
                )


@contextlib.contextmanager
def naming_the_state(state: Any, init: Callable[[], Any]) -> Generator[None]:
    """Raises ValueError for a state whose structure differs from that of `init`.

    It compares the structures only after another error, because a comparison at every call
    would be slow.
    """
    try:
        yield
    except Exception as error:
        expected = trees.structure_of(init)
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
) -> Extras:
    """The further arguments of `update`, on the leaves of floats, that a rule reads.

    Raises:
      ValueError: a gradient that is no tree like the parameters.
    """
    extras = NO_EXTRAS
    if grad is not None and any("grad" in pull.rule.reads for pull in pulls):
        check_same_tree("grad", grad, params)
        extras = extras._replace(grad=trees.floats(grad, like=params))
    return extras


def loss_of(value: Any, loss: Any) -> Any:
    """Returns the worker's loss, passed by either of its names."""
    if value is not None and loss is not None and value is not loss:
        raise ValueError("pass the loss as `value=` or as `loss=`, got both")
    loss = value if loss is None else loss
    if loss is None:
        return None
    try:
        array = jnp.asarray(loss)
        # A loss may be an int, such as a number of errors, and int has no inf.
        is_real = jnp.issubdtype(array.dtype, jnp.floating)
        return array if is_real else array.astype(jnp.result_type(float))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"`value` must be the worker's loss, a scalar, got value={loss!r}"
        ) from error
