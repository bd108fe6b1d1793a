"""anchored: an anchor that an outer optimizer moves by the workers' pseudo-gradients."""

import numbers
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array, lax

from lsgd_jax._src import trees
from lsgd_jax._src.by_value import by_value
from lsgd_jax._src.checks import check_option, check_positive_int
from lsgd_jax._src.exchange.branch import any_of
from lsgd_jax._src.exchange.rule import Rule, fits_in_sums
from lsgd_jax._src.exchange.transaction import with_schedules_of
from lsgd_jax._src.methods.guard import Detector, Guard, weigh
from lsgd_jax._src.methods.merging import MERGES, Merge
from lsgd_jax._src.shared import Axes, Shared
from lsgd_jax._src.trees import Tree, widened
from lsgd_jax._src.wire.group import Group


NEGLIGIBLE = -100  # a power of two, below the rounding of any share


class AnchorState(NamedTuple):
    """The state of `anchored`.

    Attributes:
      anchor: a, where the workers stood together after the last exchange; a tree like the
        parameters, in float32 at least; shared.
      outer: the outer optimizer's state; with a layerwise guard its scalars have one
        element per leaf; shared.
      exchanges: int32 scalar, those that moved the anchor, or () without restarts; shared.
      detector: the guard's `Detector`, or () without one; per worker.
    """

    anchor: Shared[Tree]
    outer: Shared[Any]
    exchanges: Shared[Array] | tuple[()] = ()
    detector: Any = ()


@by_value
def anchored(
    outer: optax.GradientTransformation,
    axes: Axes = ("node", "local"),
    guard: Guard | None = None,
    restart: int | None = None,
    merge: Merge = "mean",
    weights: Sequence[float] | None = None,
) -> Rule:
    r"""An anchor that an outer optimizer moves by the pseudo-gradient, as a rule of a pull.

    .. math::
      \Delta = a - \frac{1}{|H|} \sum_{i \in H} y_i, \qquad
      a \leftarrow a + \text{outer}(\Delta), \qquad z = a

    with H the workers of the group whose y and loss are finite, and outer(Δ) the update
    that optax returns, -η Δ for SGD with rate η. The anchor starts as the mean of the
    workers' starts.

    With `weights` or a `guard` Δ is the weighted mean of :math:`\Delta_i = a - y_i`. With
    ``merge="radial"`` it has, leaf by leaf, the mean norm and the mean direction of the
    workers' Δ_i, so that its norm does not shrink with the number of workers:

    .. math::
      \Delta = \Bigl( \sum_i w_i |\Delta_i| \Bigr) \, \text{dir} \Bigl( \sum_i w_i \,
      \text{dir}(\Delta_i) \Bigr), \qquad \sum_i w_i = 1,

    with :math:`\text{dir}(v) = v / |v|` and dir(0) = 0. A leaf whose directions cancel
    takes the weighted mean. The radial merge travels in float32 only.

    Args:
      outer: any optax transformation; its learning rate counts exchanges, not steps.
      axes: the mesh axes of the group.
      guard: weighs pseudo-gradients by their norms and drops anomalous ones, see `Guard`.
      restart: S; every S-th exchange sets the outer momentum to 0 before it moves the
        anchor. The outer state starts anew, but for the step counts of schedules. Defaults
        to never.
      merge: 'mean', or 'radial' as in Decoupled DiLoCo.
      weights: w ≥ 0 of every worker of the group, in any unit, such as its tokens² / steps.
        Defaults to equal weights.

    Raises:
      ValueError: no optax transformation, a restart below 1, an unknown merge, weights
        that are negative or all 0, weights beside a guard; in `update`, another number of
        weights than workers.

    Reference: Decoupled DiLoCo, 2026, arXiv:2604.21428 (radial merge and weights), and the
    restart of the outer momentum, 2026, arXiv:2605.28585.

    >>> import optax
    >>> import lsgd_jax as lj
    >>> lj.rules.anchored(optax.sgd(0.7)).axes
    ('node', 'local')
    """
    _check(outer, guard, restart, merge, weights)
    outer = optax.with_extra_args_support(outer)
    layerwise = guard is not None and guard.layerwise

    def init(params: Tree) -> AnchorState:
        anchor = Group(axes).start(params)

        def like_anchor(tree):
            return anchor._replace(value=tree)

        states = map(outer.init, _blocks(anchor.value, layerwise))
        return AnchorState(
            anchor,
            like_anchor(_joined(outer.init(anchor.value), states)),
            like_anchor(jnp.int32(0)) if restart else (),
            Detector.start(guard, params) if guard else (),
        )

    def begun(anchor, outer_state, begins_anew):
        """A block's outer state before its step."""
        if not restart:
            return outer_state
        fresh = with_schedules_of(outer_state, outer.init(anchor))
        return trees.where(begins_anew, fresh, outer_state)

    def stepped(delta, before, anchor):
        """A block's anchor and outer state after a step."""
        step, after = outer.update(delta, before, anchor)
        return optax.apply_updates(anchor, step), after

    def moved(block, outer_state, found, is_sound):
        """A block's anchor and outer state, as they were without a pseudo-gradient."""
        _, _, anchor = block
        renewed = stepped(*block)
        stays = anchor, with_schedules_of(renewed[1], outer_state)
        after = trees.where(is_sound, renewed, stays)
        return trees.where(found, after, (anchor, outer_state))

    def agree(group, x, y, state, takes_part, t):
        anchor = state.anchor.value
        outer_state = state.outer.value
        delta, found, detector = _pseudo_gradient(
            group, y, state, takes_part, guard, merge, weights
        )
        count = jnp.int32(0)
        begins_anew = False
        if restart:
            count = state.exchanges.value + any_of(*found).astype(jnp.int32)
            begins_anew = count % restart == 0
        deltas = _blocks(delta, layerwise)
        anchors = _blocks(anchor, layerwise)
        starts = [jax.eval_shape(outer.init, block) for block in anchors]
        states = [_of_block(i, outer_state, start) for i, start in enumerate(starts)]
        before = [begun(a, s, begins_anew) for a, s in zip(anchors, states)]
        blocks = list(zip(deltas, before, anchors))
        is_sound = group.is_sound
        if not group.is_delayed:
            # The step is computed twice, to test it and to take it. Otherwise both versions
            # of the anchor and of the outer state would be alive until all are tested.
            steps = [stepped(*block) for block in blocks]
            # Workers must be able to hold the anchor in their dtypes.
            own = _blocks(y, layerwise)
            held = [optax.tree.cast_like(a, b) for (a, _), b in zip(steps, own)]
            is_sound &= trees.all_finite((held, [after for _, after in steps]))
            blocks, is_sound = lax.optimization_barrier((blocks, is_sound))
        after = [moved(*of, is_sound) for of in zip(blocks, states, found)]
        leaves = [leaf for a, _ in after for leaf in jax.tree.leaves(a)]
        anchor = jax.tree.unflatten(jax.tree.structure(anchor), leaves)
        exchanges = ()
        if restart:
            exchanges = group.shared(jnp.where(is_sound, count, state.exchanges.value))
        state = AnchorState(
            group.shared(anchor),
            group.shared(_joined(outer_state, [s for _, s in after])),
            exchanges,
            detector,
        )
        # The anchor is there to be pulled to even if no worker is finite.
        is_found = is_sound | ~any_of(*found)
        return anchor, is_found, state

    keeps = None if merge == "radial" else ("error",)
    return Rule(
        axes,
        init,
        agree,
        keeps=keeps,
        reads_x=False,
        summable=_squares_fit,
        commits=True,
    )


def _squares_fit(group: Group, y: Tree, state: Any) -> Array:
    """Whether sums over the group are far from overflow, and squares where it matters.

    Outer optimizers such as Adam square the pseudo-gradient. If that overflows, the
    exchange is dropped. At the next one a worker whose own part of it would overflow again
    counts as not finite. Where a result is not tested as a whole, such a worker never takes
    part.
    """
    anchor = state.rule.anchor.value
    gaps = jax.tree.map(lambda a, y: group.size * (a - widened(y)), anchor, y)
    squares_fit = trees.has_headroom(jax.tree.map(jnp.square, gaps))
    matters = group.is_delayed | (state.dropped_in_a_row > 0)
    return fits_in_sums(group, y, state) & (squares_fit | ~matters)


def _check(
    outer: Any, guard: Any, restart: Any, merge: Any, weights: Sequence[float] | None
) -> None:
    """Raises ValueError for arguments of `anchored` that are not valid."""
    if not isinstance(outer, optax.GradientTransformation):
        raise ValueError(
            "`outer` must be an optax transformation such as optax.sgd(0.7), got "
            f"outer={outer!r}"
        )
    if guard is not None and not isinstance(guard, Guard):
        raise ValueError(f"`guard` must be a Guard or None, got guard={guard!r}")
    if restart is not None:
        check_positive_int("restart", restart)
    check_option("merge", merge, get_args(Merge))
    if weights is None:
        return
    if guard is not None:
        raise ValueError("`weights` must be None with a guard, which weighs by itself")
    most = sys.float_info.max
    valid = all(isinstance(w, numbers.Real) and 0 <= w <= most for w in weights)
    if not valid or not any(float(w) > 0 for w in weights):
        raise ValueError(
            "`weights` must be finite numbers of at least 0, not all 0, got "
            f"weights={weights!r}"
        )


def _pseudo_gradient(
    group: Group,
    y: Tree,
    state: AnchorState,
    takes_part: Array,
    guard: Guard | None,
    merge: Merge,
    weights: Sequence[float] | None,
) -> tuple[Tree, list[Array], Any]:
    """Returns (delta, found, detector).

    found: for each block of leaves, whether it has a pseudo-gradient.
    """
    anchor = state.anchor.value
    if guard is None and weights is None and merge == "mean":
        mean, count = group.masked_mean(y, takes_part, reference=anchor)
        mean = group.movable(mean, anchor)
        delta = jax.tree.map(jnp.subtract, anchor, mean)
        return delta, [count > 0], ()
    deltas = jax.tree.map(lambda a, y: a - widened(y), anchor, y)
    if guard is None:
        shares = _shares(group, weights, takes_part)
        detector = ()
    else:
        shares, detector = weigh(guard, group, deltas, state.detector, takes_part)
    delta = MERGES[merge](group, deltas, shares, takes_part)
    delta = group.movable(delta, trees.zeros(delta))
    found = [total > 0 for total in trees.materialized(*shares.sum(axis=0))]
    return guard.clipped(delta) if guard else delta, found, detector


def _shares(group: Group, weights: Sequence[float] | None, takes_part: Array) -> Array:
    """The weights of the finite workers, which sum to 1: float [W, 1], equal on all."""
    given = [1.0] * group.size if weights is None else weights
    if len(given) != group.size:
        raise ValueError(
            f"`weights` must have one number per worker ({group.size}), got {len(given)}"
        )
    takes_part = group.gather(takes_part.astype(jnp.float32)) == 1
    # w = m 2^e, and shares are computed from 2^(e - largest e of those that take part): in
    # float32, weights or their sum may overflow or be 0.
    mantissas, exponents = np.frexp(np.asarray(given, np.float64))
    counts = takes_part & jnp.asarray(mantissas > 0)
    largest = jnp.where(counts, exponents, exponents.min()).max()
    lower = jnp.maximum(exponents - largest, NEGLIGIBLE)
    mine = jnp.where(counts, jnp.ldexp(jnp.asarray(mantissas, float), lower), 0)
    total = mine.sum()
    return jnp.where(total > 0, mine / jnp.where(total > 0, total, 1), 0)[:, None]


def _blocks(tree: Tree, layerwise: bool) -> list[Tree]:
    """The tree, or for each leaf the tree with nothing else in it: its path is the same."""
    if not layerwise:
        return [tree]
    leaves, treedef = jax.tree.flatten(tree)
    nothing = optax.MaskedNode()

    def only(i):
        return [leaf if i == j else nothing for j, leaf in enumerate(leaves)]

    return [treedef.unflatten(only(i)) for i in range(len(leaves))]


# The outer states of all blocks as one, in which `optax.tree_map_params` finds the trees
# like the parameters.


def _joined(whole: Any, states: Iterable[Any]) -> Any:
    """The outer state of all blocks, a tree like `whole`; their scalars are stacked."""

    def join(x: Array, *blocks: Any) -> Array:
        own = [each for each in blocks if not _is_masked(each)]
        return jnp.stack(own) if len(own) > 1 else (*own, x)[0]

    return jax.tree.map(join, whole, *states)


def _of_block(i: int, whole: Any, like: Any) -> Any:
    """The outer state of block i, a tree like `like`: the inverse of `_joined`."""

    def take(own: Any, x: Array) -> Any:
        if _is_masked(own):
            return own
        return x if x.ndim == own.ndim else x[i]

    return jax.tree.map(take, like, whole, is_leaf=_is_masked)


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedNode)
