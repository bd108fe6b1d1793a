"""The step of an exchange: three pure functions of one worker, and their state.

With x the worker's parameters before its own step, y its current parameters, z the target:

    local   runs on every step: rules' own steps, tests for finiteness; never communicates
    send    the group agrees on z; the only function that communicates
    land    y ← y + λ (z - y); a worker that is not finite takes the whole of z. A late pull
            may add λ (z - y') instead, with y' the parameters that the group agreed on

An exchange is a transaction: either its target and all that it changes are finite, or
nothing changes and the next exchange begins from where this one did.

Two drivers call them: `exchange` in lock step, inside one program, and
`asynchronous.pulls`, which awaits the messages between `send` and `land`.

In a chain, until a pull moves it, y is the pair (x, u) with y = x + u. An update is
therefore bit-identical after a step on which nothing lands. In an `outer` y is itself.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from lsgd_jax._src import trees
from lsgd_jax._src.by_value import are_equal
from lsgd_jax._src.checks import check_fraction, check_option
from lsgd_jax._src.exchange import parts
from lsgd_jax._src.exchange.agreement import Fingerprints, verified
from lsgd_jax._src.exchange.memory import Memory, check_host, to_device, to_host
from lsgd_jax._src.exchange.rule import NO_EXTRAS, Extras, Rule, silent
from lsgd_jax._src.exchange.schedule import Period, Schedule, check_schedule, taking_turns
from lsgd_jax._src.exchange.skips import Skips
from lsgd_jax._src.exchange.traffic import Traffic
from lsgd_jax._src.exchange.transaction import committed, committed_by_element
from lsgd_jax._src.shared import is_shared
from lsgd_jax._src.trees import Tree
from lsgd_jax._src.wire.encoded import EncodedGroup, WireState
from lsgd_jax._src.wire.group import Channel, Group
from lsgd_jax._src.wire.top_k import TopK
from lsgd_jax._src.wire.wire import Wire, WireFormat


Check = Literal["due", "every_step"]
Late = Literal["replace", "add"]


@dataclasses.dataclass(frozen=True)
class Pull:
    """One pull of an `exchange`: its target, strength, period, delay, and leaves.

    At t ≡ offset - delay (mod every) the group agrees on z; at t ≡ offset (mod every)
    y ← y + λ(t) (z - y). The message of a delayed pull leaves at the start of the step
    after the agreement, before that step's gradient, so that it travels meanwhile.

    Attributes:
      rule: computes the target z.
      strength: λ in [0, 1], or a schedule of t, which is clipped to [0, 1]. An exchange
        whose λ is nan is dropped.
      every: the period in steps, or `Periods`.
      offset: the step of the period on which the target is applied, 0 ≤ offset < every; or
        a tuple of one for each fragment, all different.
      delay: the number of steps from sending the target to applying it, 0 ≤ delay < every.
        A delayed pull keeps a copy of its part in the state. With late='add' it may be the
        period itself, if that is an int.
      after: the number of steps before the first period begins.
      part: the leaves to exchange: a function from a leaf's path ('layers/0/kernel') to
        bool, a list of paths (['head'] includes everything below it), a tree of bools like
        the parameters, or a `fragment`. Defaults to all leaves. Other leaves are frozen:
        they cost no bytes and no state.
      fragments: number of fragments of the part that take turns, F; must divide the period.
        Fragment i acts (i + 1) τ / F steps after `offset`, with a state of its own.
      scan_axis: where fragments cut leaves, see `fragment`.
      skips: the steps without a gradient, on which the rule's `step` moves the worker; None
        if there are none.
      wire: the format in which parameters travel: 'float32' (unchanged), 'bfloat16',
        'int8', 'int4', the last three also with '-stochastic' for stochastic rounding, or a
        `Wire` or a `TopK`. In all but 'float32' the state includes what the rule's
        `keeps` names.
      memory: where anchors, references, quantization errors and targets in flight are kept
        between exchanges: on the 'device', or in the memory of its 'host'. State that a
        rule's `step` reads on every step stays on the device.
      verify: whether the group compares a fingerprint of what must be bit-identical on its
        workers at each exchange, 8 bytes: anchors, centers, references, and the last target
        of a rule that says so (`is_common`). A worker that differs from the majority is
        counted, see `diagnostics`, takes the majority's values, does not contribute to the
        target and takes it whole. The copies on a worker's own devices are compared,
        too, and every device counts for the majority. Of two workers that differ, each
        with equal copies, none is known to be right: the lowest index counts. In lock
        step only.
      late: how a delayed pull moves a worker that has taken d steps since the agreement
        about its y'. 'replace': y ← y + λ (z - y), so that λ = 1 drops these steps. 'add':
        y ← y + λ (z - y'), so that they stay. The state then holds z - y' in place of z; a
        worker that was not finite at the agreement takes z whole, and one that is not
        finite since then takes the next target whole.

    Raises:
      ValueError: no `Rule`, a strength outside [0, 1], a period below 1, an offset or delay
        outside the period, late='add' without a delay, an unknown wire format, or one that
        the rule does not support.
    """

    rule: Rule
    strength: optax.ScalarOrSchedule
    every: Period = 1
    offset: int | tuple[int, ...] = 0
    delay: int = 0
    part: parts.Part | None = None
    wire: Wire | TopK | WireFormat = "float32"
    memory: Memory = "device"
    verify: bool = False
    after: int = 0
    fragments: int = 1
    scan_axis: parts.ScanAxis | None = None
    skips: Skips | None = None
    late: Late = "replace"

    def __post_init__(self):
        if not isinstance(self.rule, Rule):
            raise ValueError(
                "`rule` must be a Rule, such as average() or leader('local'), got "
                f"rule={self.rule!r}; a method such as diloco(...) is an exchange already"
            )
        if not callable(self.strength):
            check_fraction("strength", self.strength)
        check_option("late", self.late, get_args(Late))
        check_schedule(self.every, self.offset, self.delay, self.after, self.adds)
        parts.check_part(self.part)
        parts.check_cut(self.every, self.fragments, self.part, self.scan_axis, self.offset)
        check_option("memory", self.memory, get_args(Memory))
        if not isinstance(self.verify, bool):
            raise ValueError(f"`verify` must be a bool, got verify={self.verify!r}")
        if self.is_narrow and self.rule.keeps is None:
            raise ValueError(
                "`wire` must be 'float32' for a rule whose `keeps` is None (see `Rule`), "
                f"got wire={self.wire!r}"
            )
        across = Wire.of(self.wire).across
        if across:
            _check_across(Group(across).axes, self.rule)
        if Wire.of(self.wire).is_sparse and self.rule.keeps != ("error",):
            raise ValueError(
                "`wire` may be 'top-k' only for a rule that sends differences to an anchor "
                "or center, such as `anchored`, and so keeps the 'error' alone (see "
                f"`Rule`), got keeps={self.rule.keeps}"
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Pull):
            return False
        names = [field.name for field in dataclasses.fields(Pull)]
        return all(are_equal(getattr(self, name), getattr(other, name)) for name in names)

    def __hash__(self) -> int:
        # `part` and `strength` are left out: a list of paths and an array have no hash.
        return hash((self.rule, self.every, self.offset, self.delay, self.wire))

    @property
    def is_narrow(self) -> bool:
        """Whether the parameters are encoded for the wire."""
        return Wire.of(self.wire).is_narrow

    @property
    def adds(self) -> bool:
        """Whether a target is added to the steps that were taken since the agreement."""
        return self.late == "add"

    @functools.cached_property
    def schedule(self) -> Schedule:
        """When it agrees, sends and lands."""
        offsets = taking_turns(self.every, self.offset, self.fragments)
        return Schedule(self.every, offsets, self.delay, self.after)

    @functools.cached_property
    def each(self) -> tuple["Pull", ...]:
        """The pulls of its fragments."""
        if self.fragments == 1:
            return (self,)
        return tuple(map(self.fragment, range(self.fragments)))

    def fragment(self, index: Any) -> "Pull":
        """The pull of a fragment, at an offset of 0 if its index is an array.

        index: None stands for all of them together.
        """
        part = self.part
        if index is not None:
            part = parts.Fragment(index, self.fragments, part, self.scan_axis)
        offset = self.schedule.offsets[index] if isinstance(index, int) else 0
        return dataclasses.replace(
            self, part=part, offset=offset, fragments=1, scan_axis=None
        )

    def weight(self, t: Array) -> Any:
        """λ(t), clipped to [0, 1] so that no pull overshoots its target."""
        if callable(self.strength) or isinstance(self.strength, jax.Array):
            return jnp.clip(trees.value_at(self.strength, t), 0, 1)
        return self.strength


def _check_across(across: tuple[str, ...], rule: Rule) -> None:
    """Raises ValueError unless the rule takes a mean or sum over these axes."""
    axes = Group(rule.axes).axes
    if not set(across) <= set(axes):
        raise ValueError(
            f"`across` must name axes of the rule, which are {axes}, got across={across}"
        )
    if "error" not in (rule.keeps or ()):
        raise ValueError(
            "`across` is only for a rule that takes a mean or a sum, and so keeps the "
            f"'error' (see `Rule`), got keeps={rule.keeps}"
        )


class Target(NamedTuple):
    """The outcome of an agreement.

    Attributes:
      z: a tree like y; per worker.
      found: bool scalar, whether there is one.
      is_huge: bool scalar, see `is_huge`.
    """

    z: Tree
    found: Array
    is_huge: Array


# Stages of a `Pending`
IDLE = 0  # nothing is on its way
RECORDED = 1  # the message has not left
AGREED = 2  # the group has agreed on the target
CORRECTED = 3  # as `AGREED`, and the target less y is there


class Pending(NamedTuple):
    """The message of a delayed pull, between its agreement and its landing; per worker.

    Attributes:
      z: y at the agreement if `stage` is `RECORDED`, the target if it is `AGREED`. If it is
        `CORRECTED`, the target less that y, or the whole target if the worker did not take
        part. A tree like the part, in float32 or wider.
      found: bool scalar, whether there is a target if the group has agreed.
      x: the parameters before the step of the agreement if the rule reads them, a tree
        like the part; otherwise ().
      stage: int32 scalar, `IDLE`, `RECORDED`, `AGREED` or `CORRECTED`. A run that resumes
        with another period or delay may come to a landing or a departure in any stage, and
        one with another `late` finds no target in the first message.
      takes_part: bool scalar, whether this worker takes part in the agreement, or took part
        if `stage` is `CORRECTED`. It is a scalar of its own, because XLA for GPUs would let
        a message wait that depends on several.
    """

    z: Tree
    found: Array
    x: Tree | tuple[()]
    stage: Array
    takes_part: Array

    def target(self, late: Late) -> Target:
        """The target to land on: none unless the group has agreed on one.

        Huge workers are known since the agreement, see `recorded`.
        """
        stage = AGREED if late == "replace" else CORRECTED
        found = self.found & (self.stage == stage)
        return Target(self.z, found, is_huge=jnp.asarray(False))


class PullState(NamedTuple):
    """The state of one pull.

    Attributes:
      rule: the rule's own state.
      pending: a `Pending` if the pull is delayed, otherwise (); per worker.
      restored: int32 scalar, how often this worker took the whole target because it was not
        finite; per worker.
      dropped: int32 scalar, how often an exchange of finite workers gave no target, because
        its result was not finite; per worker.
      traffic: the traffic counters; shared.
      wire: a `WireState`, or () if parameters travel in float32.
      agreement: an `Fingerprints` if the pull has `verify`, otherwise ().
      dropped_in_a_row: int32 scalar, how many exchanges have been dropped since the last
        one with a target; per worker.
      missed: int32 scalar, how many more targets this worker takes whole: when it was huge,
        x + u has missed the target by a rounding of x; per worker.
    """

    rule: Any
    pending: Pending | tuple[()]
    restored: Array
    dropped: Array
    traffic: Traffic
    wire: Any = ()
    agreement: Any = ()
    dropped_in_a_row: Any = 0
    missed: Any = 0

    @property
    def is_elsewhere(self) -> bool:
        """Whether the state of a delayed pull is on the devices beside, see `beside`."""
        return self.traffic.exchanges == ()

    def __lsgd_resized__(self) -> "PullState":
        """For `resize`: discards a message in flight, which belongs to the old workers."""
        if not self.pending:
            return self
        idle = jnp.full_like(self.pending.stage, IDLE)
        nothing = jnp.zeros_like(self.pending.takes_part)
        pending = self.pending._replace(stage=idle, takes_part=nothing)
        return self._replace(pending=pending)


def init(pull: Pull, params: Tree) -> PullState:
    """Returns the state of a pull before the first step."""
    part = parts.select(pull.part, params)
    axes = pull.rule.axes
    if pull.memory == "host":
        check_host()
    group = Group(axes)
    state = PullState(
        rule=pull.rule.init(part),
        pending=pending(pull, part, part, jnp.asarray(False), IDLE) if pull.delay else (),
        restored=jnp.zeros([], jnp.int32),
        dropped=jnp.zeros([], jnp.int32),
        traffic=Traffic.zero(axes, *pull.schedule.message_steps(1)),
        wire=WireState.start(pull.rule.keeps or (), group, part) if pull.is_narrow else (),
        agreement=Fingerprints.start() if pull.verify else (),
        dropped_in_a_row=jnp.zeros([], jnp.int32),
        missed=jnp.zeros([], jnp.int32),
    )
    return placed(pull, state, to_host)


def pending(
    pull: Pull, x: Tree, y: Tree, takes_part: Array, stage: int = RECORDED
) -> Pending:
    """Returns the operands of a delayed agreement; `send_pending` reads them."""
    x = x if pull.rule.reads_x else ()
    nothing = jnp.asarray(False)
    return Pending(trees.widened(y), nothing, x, jnp.int32(stage), takes_part)


def recorded(
    pull: Pull, x: Tree, y: Tree, state: PullState, takes_part: Array
) -> PullState:
    """Returns the state with the operands of a delayed agreement, about x and y.

    takes_part: bool scalar, whether this worker takes part unless y is huge.
    """
    huge = is_huge(pull, _group(pull), y, state)
    # It takes this target whole, and the next one, since it may miss this one.
    takes_part = takes_part & ~huge & (state.missed == 0)
    state = state._replace(
        pending=pending(pull, x, y, takes_part),
        missed=jnp.where(huge, 2, state.missed),
    )
    return placed(pull, state, to_host)


def placed(pull: Pull, state: PullState, to: Callable[[Tree], Tree]) -> PullState:
    """Moves the state `to_host` for the time between exchanges, or `to_device` for one."""
    if pull.memory == "device":
        return state
    is_idle = pull.rule.step is silent
    return state._replace(
        rule=to(state.rule) if is_idle else state.rule,
        pending=to(state.pending),
        wire=to(state.wire),
    )


def local(
    pulls: Sequence[Pull],
    x: Tree,
    u: Tree,
    loss: Any,
    states: Sequence[PullState],
    is_finite: Array,
    t: Array,
    check: Check = "due",
    extras: Extras = NO_EXTRAS,
) -> tuple[Tree, tuple[PullState, ...], tuple[Array, ...], Array]:
    """One step of a worker by itself: y = x + u after the rules' own steps.

    Args:
      pulls: the pulls. Their own steps run in reverse order, the widest level first.
      x, u: the parameters and the update; u in float32 or wider.
      loss: the loss at x, or None.
      states: the pulls' states.
      is_finite: bool scalar, False for a worker that waits to be restored.
      t: int32 scalar, the step.
      check: see `exchange`.
      extras: the further arguments of `update`, for rules that read them.

    Returns:
      (u, states, counts, is_finite). counts: for each pull, whether loss and rule let this
      worker take part.
    """
    u, states, counts = step_rules(pulls, x, u, loss, states, t, extras)
    if check == "every_step":
        is_finite &= trees.all_finite(trees.plus(x, u))
    u = settle(x, u, is_finite_loss(loss) & (check == "due"), is_finite)
    return u, states, counts, is_finite


def step_rules(
    pulls: Sequence[Pull],
    x: Tree,
    u: Tree,
    loss: Any,
    states: Sequence[PullState],
    t: Array,
    extras: Extras = NO_EXTRAS,
) -> tuple[Tree, tuple[PullState, ...], tuple[Array, ...]]:
    """`local` without the treatment of non-finite steps: (u, states, counts)."""
    stepped = []
    counts = []
    has_loss = is_finite_loss(loss)
    for pull, state in reversed(list(zip(pulls, states))):
        rule_state = state.rule
        finite: Any = True
        if pull.rule.step is not silent:
            part = functools.partial(parts.select, pull.part)
            mine = part(u)
            more = {}
            if "grad" in pull.rule.reads:
                more["grad"] = None if extras.grad is None else part(extras.grad)
            after, rule_state, finite = pull.rule.step(
                mine, part(x), state.rule, loss, t, **more
            )
            # Many rules return u itself, and then there is nothing to put back.
            if not trees.is_same(after, mine):
                u = parts.put_back(pull.part, after, u)
        # A loaded checkpoint may be on the device, and of a pull with another period.
        traffic = state.traffic.of(*pull.schedule.message_steps(t))
        state = state._replace(rule=rule_state, traffic=traffic)
        stepped.append(placed(pull, state, to_host))
        counts.append(has_loss & finite)
    return u, tuple(stepped[::-1]), tuple(counts[::-1])


def send(
    pull: Pull,
    channel: Channel | None,
    x: Tree,
    y: Tree,
    state: PullState,
    takes_part: Array,
    t: Array,
    round: int | None = None,
) -> tuple[Target, PullState, float]:
    """Agrees on the target with the group. It is the only function that communicates.

    If the target is not finite in the dtypes of y, such as the mean of 3e38 and 3e38, or a
    state of the rule or of the wire format became not finite, the exchange is dropped: all
    of these states stay as they were, and there is no target.

    Args:
      pull: the pull.
      channel: carries the messages. Defaults to collectives over the rule's axes.
      x, y: the leaves of the pull's part, before the worker's own step and now.
      state: the pull's state.
      takes_part: bool scalar, whether this worker takes part.
      t: int32 scalar, the step.
      round: the round of the rule's graph, or None if t decides.

    Returns:
      (target, state, bytes_sent). bytes_sent is known while tracing.
    """
    state = placed(pull, state, to_device)
    group = _group(pull, channel)
    # Beside a gradient the message would wait for this test; see `recorded`.
    huge = jnp.asarray(False)
    counts = takes_part
    if not group.is_delayed:
        huge = is_huge(pull, group, y, state)
        takes_part = takes_part & ~huge & (state.missed == 0)
    if pull.verify:
        state = verified(group, state)
        # Its y was computed from values that differ, so it must not enter the target.
        takes_part &= ~state.agreement.differs
    if pull.is_narrow:
        wire = Wire.of(pull.wire)
        sent = group.bytes_sent
        group = EncodedGroup(group.axes, channel, wire, state.wire, t, sent)
        group.is_delayed = _is_delayed(pull, group)
    group.exchange_number = pull.schedule.number(t)
    group.round = round
    if not group.is_delayed:
        group.is_sound = jnp.isfinite(pull.weight(t))

    z, found, rule = pull.rule.agree(group, x, y, state.rule, takes_part, t)
    wire_state = ()
    if pull.is_narrow:
        wire_state = group.kept
    before = state.rule, state.wire
    after = _in_the_form_of(state.rule, rule), wire_state
    if group.is_delayed:
        # Whether all of the target is finite is asked when it lands, see `arrived`.
        rule, wire_state = committed_by_element(before, after, found)
        is_whole = False
    else:
        is_tested = pull.rule.commits
        found, rule, wire_state = committed(
            before, after, z, y, found, group.is_sound, is_tested
        )
        is_whole = found
    state = _counted(state, counts & ~found, is_whole)
    state = state._replace(
        rule=rule, wire=wire_state, traffic=state.traffic.sent(group.bytes_sent)
    )
    if pull.verify and pull.rule.is_common:
        state = state._replace(agreement=state.agreement.after(z, found))
    target = Target(z, found, huge)
    return target, placed(pull, state, to_host), group.bytes_sent


def _group(pull: Pull, channel: Channel | None = None) -> Group:
    """Returns the group of a pull, which sends in float32."""
    group = Group(pull.rule.axes, channel)
    group.is_delayed = _is_delayed(pull, group)
    return group


def _is_delayed(pull: Pull, group: Group) -> bool:
    """Whether the messages travel beside a gradient, in one program with it."""
    return pull.delay > 0 and group.channel.transposes


def is_huge(pull: Pull, group: Group, y: Tree, state: PullState) -> Array:
    """Whether y is finite and too large to be added up; the worker counts as not finite.

    y: the leaves of the pull's part.
    """
    fits = pull.rule.summable(group, y, placed(pull, state, to_device))
    if fits is True:
        return jnp.asarray(False)
    return ~fits & trees.all_finite(y)


def arrived(
    pull: Pull, state: PullState, is_finite: Array, t: Array
) -> tuple[Target, PullState]:
    """Returns the target of a delayed pull, and counts it if it is dropped.

    Args:
      pull: a pull with a delay.
      state: the pull's state.
      is_finite, t: see `land`.
    """
    pending: Any = placed(pull, state, to_device).pending
    # No test of y or of an anchor: the gradient would wait for it. A worker that was huge
    # when the message was recorded takes the target whole, see `recorded`.
    target = pending.target(pull.late)
    is_whole = trees.all_finite(target.z) & jnp.isfinite(pull.weight(t))
    is_dropped = is_finite & target.found & ~is_whole
    return target, _counted(state, is_dropped, target.found & is_whole)


def _counted(state: PullState, is_dropped: Array, is_whole: Array | bool) -> PullState:
    """Returns the state after an exchange that was dropped, or had a whole target."""
    one_more = is_dropped.astype(jnp.int32)
    in_a_row = jnp.where(is_whole, 0, state.dropped_in_a_row + one_more)
    return state._replace(dropped=state.dropped + one_more, dropped_in_a_row=in_a_row)


def send_pending(
    pull: Pull,
    like: Tree,
    state: PullState,
    t: Array,
    round: int | None = None,
) -> tuple[PullState, float]:
    """Sends the message of a delayed pull: `send` with what the state has kept.

    The operands stand in the state, so nothing of this step's gradient depends on the
    collectives, and XLA may compute it while they run.

    Args:
      pull: a pull with a delay.
      like: a tree like the pull's part, for its dtypes.
      state: the pull's state after the step of the agreement.
      t: int32 scalar, the step of the agreement.
      round: see `send`.

    Returns:
      (state, bytes_sent): the state with the target in place of what was kept.
    """
    kept: Any = placed(pull, state, to_device).pending
    # It was widened without loss, so this is the y of the agreement, bit for bit.
    y = optax.tree.cast_like(kept.z, like)
    x = kept.x if pull.rule.reads_x else y
    waits = kept.stage == RECORDED
    target, state, bytes_sent = send(pull, None, x, y, state, kept.takes_part, t, round)
    z = trees.widened(target.z)
    if pull.adds:
        took_part = kept.takes_part
        whole = ~took_part | state.agreement.differs if pull.verify else ~took_part
        z = correction(z, kept.z, whole)
        stage = CORRECTED
    else:
        took_part = jnp.zeros_like(kept.takes_part)
        stage = AGREED
    after = kept._replace(
        z=z,
        found=target.found & waits,
        stage=jnp.full_like(kept.stage, stage),
        takes_part=took_part,
    )
    return placed(pull, state._replace(pending=after), to_host), bytes_sent


def correction(z: Tree, y: Tree, whole: Array) -> Tree:
    """Returns z - y, or z itself for a worker that is to take the whole target.

    Args:
      z, y: the target, and the parameters that it was agreed on; in float32 or wider.
      whole: bool scalar.
    """
    (share,) = trees.materialized(jnp.where(whole, 0.0, 1.0))

    def leaf(z: Array, y: Array) -> Array:
        return z - share.astype(z.dtype) * trees.finite_part(y)

    return jax.tree.map(leaf, z, y)


def _in_the_form_of(before: Tree, after: Tree) -> Tree:
    """Returns the state `after`, with `Shared` nodes in the places where `before` has them.

    A state from an `init` outside of mapped functions did not know the number of workers.
    """
    if jax.tree.structure(before) == jax.tree.structure(after):
        return after

    def bare(tree: Tree) -> Any:

        def plain(x: Any) -> Any:
            return x.value if is_shared(x) else x

        return jax.tree.structure(jax.tree.map(plain, tree, is_leaf=is_shared))

    if bare(before) != bare(after):
        return after
    return jax.tree.structure(before).unflatten(jax.tree.leaves(after))


def land(
    pull: Pull,
    x: Tree | None,
    u: Tree,
    target: Target,
    state: PullState,
    is_finite: Array,
    t: Array,
    is_update: bool = True,
) -> tuple[Tree, PullState, Array]:
    """Moves y = x + u towards the target; a worker that is not finite takes it whole.

    What a late pull adds, see `Pull`, moves all elements of y that are finite. Only a
    worker that did not take part in the agreement takes the target whole.

    Args:
      pull: the pull.
      x, u: the worker's parameters and update, as any trees like `target.z`. If x is None,
        u is y itself.
      target: see `send`.
      state: the pull's state.
      is_finite: bool scalar, whether loss, y and the result of the rule's step are finite.
      t: int32 scalar, the step.
      is_update: see `move`.

    Returns:
      (u, state, restored). restored: whether the worker took the whole target because it
      was not finite.
    """
    takes_part = is_finite & ~target.is_huge & (state.missed == 0)
    if pull.adds:
        message: Any = placed(pull, state, to_device).pending
        takes_part = message.takes_part
    keeps = takes_part
    if pull.verify:
        # Such a worker takes the whole target, but it is finite and does not count as
        # restored.
        keeps &= ~state.agreement.differs
    weight = pull.weight(t)
    found = target.found & jnp.isfinite(weight)
    u = move(x, u, target.z, weight, found, keeps, is_update, pull.adds)
    restored = found & ~takes_part
    # Without an x, u is y itself and the target is reached exactly.
    again = target.is_huge & (x is not None)
    missed = jnp.where(again, 1, jnp.maximum(state.missed - 1, 0))
    state = state._replace(
        restored=state.restored + restored.astype(jnp.int32),
        missed=jnp.where(found, missed, state.missed),
    )
    if state.pending:
        idle = jnp.full_like(state.pending.stage, IDLE)
        idle = to_host(idle) if pull.memory == "host" else idle
        state = state._replace(pending=state.pending._replace(stage=idle))
    if pull.delay and state.wire:
        # XLA for GPUs would clear the error where the message is encoded, which would then
        # wait for this step's loss.
        wire = placed(pull, state, to_device).wire
        wire = jax.tree.map(lax.optimization_barrier, wire)
        wire = wire.without_error(restored)
        state = placed(pull, state._replace(wire=wire), to_host)
    return u, state, restored


def is_finite_loss(loss: Any) -> Array:
    """Whether the loss is finite: a bool scalar, True without a loss."""
    return jnp.asarray(True) if loss is None else jnp.isfinite(loss).all()


# The motion of a worker, leaf by leaf: by its own step, and by a pull.
#
# A scalar decision about a worker is a factor, or a value to fill in for elements that are
# not finite. It is not the condition of a `where`: XLA's CPU compiler would split a loop at
# each scalar condition, and compile time would grow several times.


def settle(x: Tree, u: Tree, trusted: Array, is_finite: Array) -> Tree:
    """Returns the u of a worker's own step, or 0 unless the worker is finite.

    If the step is not trusted, elements of u that are not finite become 0. Where x is not
    finite, u becomes nan, so that x stays not finite until an exchange replaces it.
    """
    fill = jnp.where(trusted & is_finite, jnp.nan, 0.0)
    fill, moves = trees.materialized(fill, jnp.where(is_finite, 1.0, 0.0))

    def leaf(x: Array, u: Array) -> Array:
        step = trees.where_finite(u, u, fill.astype(u.dtype)) * moves.astype(u.dtype)
        return trees.where_finite(x, step, jnp.nan)

    return jax.tree.map(leaf, x, u)


def drop_non_finite_steps(x: Tree | None, u: Tree, is_update: bool = True) -> Tree:
    """Returns u, with 0 where u is not finite, or nan where x is not finite either.

    is_update: see `move`. In a y the elements of x stand in place of 0.
    """
    if x is None:
        return u

    def leaf(x: Array, u: Array) -> Array:
        stays = lax.full(x.shape, 0, x.dtype) if is_update else x
        still = trees.where_finite(x, stays, jnp.nan)
        return jnp.where(jnp.isfinite(u), u, still.astype(u.dtype))

    return jax.tree.map(leaf, x, u)


def move(
    x: Tree | None,
    u: Tree,
    z: Tree,
    weight: Any,
    found: Array,
    takes_part: Array,
    is_update: bool = True,
    adds: bool = False,
) -> Tree:
    """Returns the u that moves x to y + λ (z - y), or that y itself without an x.

    is_update: whether u is an update of x; otherwise u is y itself, and with an x the
    result is x + u, rounded as in a chain.
    adds: whether x moves to y + λ z instead, where that and y are finite.

    It moves x to z itself if the worker does not take part, or if λ is 1 and it does not
    add. Elements of z that are not finite are no target. Without a target, and for elements
    that do not move, u is bit-identical. `apply_updates` replaces an x that is not finite.
    """
    takes_all = ~takes_part if adds else ~takes_part | (weight == 1)
    whole = found & takes_all
    weight = jnp.asarray(weight, jnp.result_type(float))
    keep, pull, fill = trees.materialized(
        jnp.where(whole, 0.0, 1.0),
        jnp.where(whole, 1.0, jnp.where(found, weight, 0.0)),
        jnp.where(whole if adds else found, 0.0, jnp.nan),
    )

    def plus_target(y: Array, z: Array) -> Array:
        wide = trees.widened(y)
        near = trees.where_finite(wide, wide, fill.astype(wide.dtype))
        near = near * keep.astype(wide.dtype)
        to = (near + pull.astype(wide.dtype) * z.astype(wide.dtype)).astype(y.dtype)
        return lax.select(lax.is_finite(to), to, y)

    def towards(y: Array, z: Array) -> Array:
        if adds:
            return plus_target(y, z)
        wide = trees.widened(y)
        near = trees.where_finite(wide, wide, fill.astype(wide.dtype))
        z = z.astype(wide.dtype)
        z = lax.select(lax.is_finite(z.astype(y.dtype)), z, near)
        near = near * keep.astype(wide.dtype)
        # Rounded to the dtype of x, so that x + u rounds to the same value on all workers.
        return (near + pull.astype(wide.dtype) * (z - near)).astype(y.dtype)

    def moved(y: Array, z: Array) -> Array:
        to = towards(y, z)
        return jnp.where(to == y, y, to)

    def step_to(to: Array, x: Array) -> Array:
        # x itself may be nan, and then u alone must lead to the target.
        start = trees.widened(x)
        return trees.widened(to) - trees.where_finite(start, start, 0)

    def update(x: Array, u: Array, z: Array) -> Array:
        y = trees.plus(x, u)
        to = towards(y, z)
        return jnp.where(to == y, u, step_to(to, x).astype(u.dtype))

    def added(x: Array, y: Array, z: Array) -> Array:
        to = towards(y, z)
        return jnp.where(to == y, y, trees.apply_updates(x, step_to(to, x)))

    if x is None:
        return jax.tree.map(moved, u, z)
    return jax.tree.map(update if is_update else added, x, u, z)
