"""exchange: the one transformation that talks to others; every method composes it."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax import Array

from lsgd_jax._src import parts, trees
from lsgd_jax._src.branch import any_of, cond, is_due
from lsgd_jax._src.checks import (
    check_fraction,
    check_option,
    check_period,
    check_positive_int,
)
from lsgd_jax._src.collectives import Group
from lsgd_jax._src.due_step import Due, communicate
from lsgd_jax._src.movement import settle
from lsgd_jax._src.narrow import NarrowGroup, WireState
from lsgd_jax._src.placement import misplaced, sample, sample_after
from lsgd_jax._src.rule import Rule
from lsgd_jax._src.shared import Shared
from lsgd_jax._src.traffic import Traffic
from lsgd_jax._src.trees import Tree
from lsgd_jax._src.wire import Wire, WireFormat


NO_PARAMS = "an exchange needs the parameters: call `tx.update(grads, state, params, ...)`"

Check = Literal["due", "every_step"]


@dataclasses.dataclass(frozen=True)
class Pull:
    """One pull of an `exchange`: to what, how hard, how often, which part, how late.

    At t ≡ offset - delay (mod every) the group agrees on z; at t ≡ offset (mod every)
    y ← y + λ(t) (z - y).

    Attributes:
      rule: to what.
      strength: how hard, λ in [0, 1], or a schedule of t, which is clipped to [0, 1].
      every: how often, in steps.
      offset: at which of these steps, 0 ≤ offset < every.
      delay: how many steps after it was sent the target is applied, 0 ≤ delay < every.
        Keeps a copy of the part in the state if it is not 0.
      part: which leaves: a function from a leaf's path ('layers/0/kernel') to bool, or a
        `fragment`; None: all.
      wire: in what form it travels: 'float32' (as it is), 'bfloat16', 'int8', 'int4', the
        last three also with '-stochastic' for rounding at random, or a `Wire`. All but
        'float32' keep what the rule's `keeps` says in the state.

    Raises:
      ValueError: a strength outside [0, 1], a period below 1, an offset or delay outside
        of the period, an unknown wire format or one that the rule cannot travel in.
    """

    rule: Rule
    strength: optax.ScalarOrSchedule
    every: int = 1
    offset: int = 0
    delay: int = 0
    part: parts.Part | None = None
    wire: Wire | WireFormat = "float32"

    def __post_init__(self):
        if not callable(self.strength):
            check_fraction("strength", self.strength)
        check_positive_int("every", self.every)
        check_period("offset", self.offset, self.every)
        check_period("delay", self.delay, self.every)
        if self.is_narrow and self.rule.keeps is None:
            raise ValueError(
                "`wire` must be 'float32' for a rule that does not say what it `keeps` "
                f"(see `Rule`), got wire={self.wire!r}"
            )

    @property
    def is_narrow(self) -> bool:
        """Whether it travels in another form than it has."""
        return Wire.of(self.wire).format != "float32"

    @property
    def sends_at(self) -> int:
        """At which step of its period it communicates."""
        return (self.offset - self.delay) % self.every

    def weight(self, t: Array) -> Any:
        """λ(t), within [0, 1] so that no pull goes beyond its target."""
        if callable(self.strength) or isinstance(self.strength, jax.Array):
            return jnp.clip(trees.value_at(self.strength, t), 0, 1)
        return self.strength


class PullState(NamedTuple):
    """The state of one pull.

    Attributes:
      rule: the rule's own state.
      pending: (target, found) on its way if the pull is delayed, else (); per worker.
      restored: int32 scalar, how often this worker took the target whole; per worker.
      traffic: what was sent, when; shared.
      wire: a `WireState`, or () if all travels in float32.
    """

    rule: Any
    pending: tuple
    restored: Array
    traffic: Traffic
    wire: Any = ()

    def resized(self) -> "PullState":
        """For `resize`: what is in flight was meant for the workers before."""
        if not self.pending:
            return self
        target, found = self.pending
        return self._replace(pending=(target, jnp.zeros_like(found)))


class ExchangeState(NamedTuple):
    """The state of an `exchange`.

    Attributes:
      count: int32 scalar, steps taken; shared.
      sick: bool scalar, whether this worker was not finite when it was last looked at, and
        waits to be restored; per worker.
      misplaced: int32 scalar, at how many steps x was not where the exchange had left it;
        per worker.
      expected: float32 [k], where some elements of x ought to be; per worker.
      pulls: of each pull its state.
    """

    count: Shared[Array]
    sick: Array
    misplaced: Array
    expected: Array
    pulls: tuple[PullState, ...]


class Exchange(optax.GradientTransformationExtraArgs):
    """An `exchange`, which another one can take in: it remembers its pulls."""

    pulls: tuple[Pull, ...] = ()

    def is_due(self, step: int) -> bool:
        """Whether anything is sent or applied at this step: for a loop on the host.

        step: counted from 1, as `ExchangeState.count` is.
        """
        return any(step % pull.every in (pull.sends_at, pull.offset) for pull in self.pulls)


def exchange(*given: Pull | Exchange, check: Check = "due") -> Exchange:
    r"""Pulls a worker towards what it agrees on with others, every so often.

    With x the worker's parameters, u the update that comes from the transformations before
    this one, t = 1, 2, … the step, and for each pull in turn z its target, λ its strength,
    τ its period `every`, o its offset, d its delay:

    .. math::
      y &\leftarrow x + u \\
      z &\leftarrow \text{agree}(x, y) && \text{if } t \equiv o - d \pmod \tau \\
      y &\leftarrow y + \lambda(t) \, (z - y) && \text{if } t \equiv o \pmod \tau \\
      u &\leftarrow y - x

    On all other steps u passes and nothing is communicated. A loop that counts its steps
    may compile these by themselves: ``tx.update(grads, state, params, value=loss,
    due=False)`` leaves the pulls out, where `Exchange.is_due` says that none is due. A pull
    that was left out is counted as misplaced.

    The update sets where the worker will stand, so an exchange stands **last** in its
    chain: if x is not there at the next step, `diagnostics` counts it as misplaced.

    A worker whose loss or y is not finite is left out of the target and takes the target
    whole, y ← z. If there is no target, because no worker of the group is finite, y stays;
    where y is not finite x stays. A step whose loss is not finite moves only what stays
    finite.

    Args:
      *given: what to pull to, in this order; an exchange (any method that pulls) stands for
        its pulls, so that ``exchange(lsgd(0.1, 0.0), sgp(axes="node"))`` has two levels.
      check: when a worker looks whether all of x + u is finite. 'due': where it
        communicates; between these a finite loss is enough, and costs nothing.
        'every_step': always, and a step that is not finite is not taken. Needed without
        ``optax.apply_if_finite`` around the base optimizer if updates are applied by
        ``optax.apply_updates``, which cannot restore an x that is nan.

    Returns:
      A gradient transformation for one worker, for where the rules' axes are bound. Its
      state, an `ExchangeState`, keeps its shapes, dtypes and shardings from `init` on. The
      updates of parameters narrower than float32 come as float32, so that x + u rounds to
      the target on all workers.

    Raises:
      ValueError: in `update`, no parameters.

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
    each = (x.pulls if isinstance(x, Exchange) else (x,) for x in given)
    pulls: tuple[Pull, ...] = tuple(itertools.chain(*each))

    def init(params: Tree) -> Any:
        return ExchangeState(
            count=Shared(jnp.zeros([], jnp.int32)),
            sick=jnp.asarray(False),
            misplaced=jnp.zeros([], jnp.int32),
            expected=jnp.full_like(sample(params), jnp.nan),
            pulls=tuple(_init(pull, params) for pull in pulls),
        )

    def update(updates, state, params=None, *, value=None, due=None, **extra_args) -> Any:
        del extra_args
        if params is None:
            raise ValueError(NO_PARAMS)
        if due is not None and not isinstance(due, bool):
            raise ValueError(f"`due` must be a bool while tracing, or None, got {due!r}")
        x, u = params, trees.widen(updates)
        t = jnp.asarray(optax.safe_increment(state.count.value))
        u, pull_states, fits = step_rules(pulls, u, x, state.pulls, value, t)
        sound, sick = is_sound(value), state.sick
        if check == "every_step":
            sick |= ~trees.all_finite(trees.plus(x, u))
        u = settle(x, u, sound & (check == "due"), sick)

        dues = [
            Due(
                pull,
                group_of(pull, t),
                is_due(t, pull.every, pull.sends_at),
                is_due(t, pull.every, pull.offset),
                sound & fit,
            )
            for pull, fit in zip(pulls, fits)
        ]

        def run_pulls(u, pull_states):
            u, pull_states, healthy = communicate(dues, x, u, pull_states, ~sick, t)
            return u, pull_states, ~healthy

        def keep(u, pull_states):
            return u, pull_states, sick

        any_due = any_of(*(each.sends for each in dues), *(each.lands for each in dues))
        runs = any_due if due is None else due
        u, pull_states, sick = cond(runs, run_pulls, keep, u, pull_states)
        traffic = [before.traffic for before in state.pulls]
        if runs is not False:
            traffic = [
                before.add(
                    each.group.bytes_sent, each.sends, each.pull.every, each.pull.sends_at
                )
                for each, before in zip(dues, traffic)
            ]
        missed = any_due if runs is False else False
        return u, ExchangeState(
            count=Shared(t),
            sick=sick,
            misplaced=state.misplaced + (misplaced(state.expected, x) | missed),
            expected=sample_after(x, u),
            pulls=tuple(
                PullState(rule, pending, restored, sent, wire)
                for (rule, pending, restored, wire), sent in zip(pull_states, traffic)
            ),
        )

    transformation = Exchange(init, update)
    transformation.pulls = pulls
    return transformation


def _init(pull: Pull, params: Tree) -> PullState:
    part = parts.select(pull.part, params)
    pending = (trees.widen(part), jnp.asarray(False)) if pull.delay else ()
    keeps, axes = pull.rule.keeps or (), pull.rule.axes
    return PullState(
        rule=pull.rule.init(part),
        pending=pending,
        restored=jnp.zeros([], jnp.int32),
        traffic=Traffic.zero(axes, pull.every, pull.sends_at),
        wire=WireState.zero(keeps, axes, part) if pull.is_narrow else (),
    )


def group_of(pull: Pull, t: Array) -> Group:
    """Whom a pull speaks to at step t."""
    axes, wire = pull.rule.axes, Wire.of(pull.wire)
    return NarrowGroup(axes, wire, t) if pull.is_narrow else Group(axes)


def step_rules(
    pulls: Sequence[Pull],
    u: Tree,
    x: Tree,
    states: Sequence[PullState],
    loss: Any,
    t: Array,
) -> tuple[Tree, tuple, list[Any]]:
    """What the rules do on every step, the last one (of the widest level) first."""
    stepped, fits = [], []
    for pull, state in reversed(list(zip(pulls, states))):
        mine, own = parts.select(pull.part, u), parts.select(pull.part, x)
        mine, rule_state, fit = pull.rule.step(mine, own, state.rule, loss, t)
        u = parts.merge(mine, u)
        stepped.append((rule_state, state.pending, state.restored, state.wire))
        fits.append(fit)
    return u, tuple(reversed(stepped)), fits[::-1]


def is_sound(value: Any) -> Array:
    """Whether the loss lets a worker take part: a bool scalar, True without a loss."""
    if value is None:
        return jnp.asarray(True)
    try:
        return jnp.isfinite(value).all()
    except TypeError as error:
        raise ValueError(
            f"`value` must be the worker's loss, a scalar, got value={value!r}"
        ) from error
