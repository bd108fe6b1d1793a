"""pull: move a worker towards a target, by so much, every so often."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import optax
from chex import Numeric
from jax import Array, lax

from lsgd_jax._types import Shared, Tree
from lsgd_jax.checks import check_fraction, check_option, check_positive_int
from lsgd_jax.collectives import Axes


NO_PARAMS = "a pull needs the parameters: call `tx.update(grads, state, params, ...)`"

Order = Literal["adapt_then_combine", "combine_then_adapt"]


class Target(NamedTuple):
    """To what a pull pulls: pure functions for one worker, and the group they speak to.

    Attributes:
      axes: the mesh axes of the group.
      init: params -> state.
      observe: (state, value, count) -> (state, healthy), on every step; never
        communicates. value: this step's loss; count: steps so far, this one included;
        healthy: bool scalar, whether the loss lets this worker take part.
      aim: (y, state, healthy) -> (target, found, state), on due steps; the one place
        that communicates. y: a tree of parameters; target: a tree like y; found: bool
        scalar, whether anybody healthy was there to aim at.
      payload: params -> bytes that each worker hands to the collectives of one `aim`;
        called in `init`, where the axes are bound.
    """

    axes: Axes
    init: Callable[[Tree], Any]
    observe: Callable[[Any, Array | None, Array], tuple[Any, Array]]
    aim: Callable[[Tree, Any, Array], tuple[Tree, Array, Any]]
    payload: Callable[[Tree], int]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PullState:
    """The state of a `pull`.

    Attributes:
      count: int32 scalar, local steps taken; shared.
      healed: int32 scalar, how often this worker took the target whole (or, in an
        aggregation of gradients, was left out); per worker.
      target: the target's own state.
      axes: the mesh axes of the group.
      period: the pull's `every`, in steps.
      payload: bytes that each worker hands to the collectives of one exchange.
    """

    count: Shared[Array]
    healed: Array
    target: Any
    axes: Axes = dataclasses.field(metadata={"static": True})
    period: int = dataclasses.field(metadata={"static": True})
    payload: int = dataclasses.field(metadata={"static": True})


def pull(
    target: Target,
    strength: optax.ScalarOrSchedule,
    every: int = 1,
    order: Order = "adapt_then_combine",
) -> optax.GradientTransformationExtraArgs:
    r"""Pulls the worker towards a target on every `every`-th step.

    With x the worker's parameters, u the update that comes from the transformations
    before this one, y = x + u, λ the strength, t = 1, 2, … the step and z the target:

    .. math::
      u \leftarrow u - \lambda(t) \, (y - z(y)) \quad \text{if } t \bmod every = 0,

    or, with ``order='combine_then_adapt'``, the pull is worked out at x:
    :math:`u \leftarrow u - \lambda(t) \, (x - z(x))`. On all other steps u passes
    unchanged and nothing is communicated.

    A worker whose y or loss is not finite is left out of the target and takes the target
    whole: :math:`u \leftarrow z - x`. If nobody in the group is healthy there is no pull.

    The update returned sets where the worker will stand, so a pull comes last in a chain
    (several pulls may follow one another).

    Args:
      target: to what.
      strength: how hard, λ in [0, 1], or a schedule of t.
      every: how often, in steps.
      order: whether the pull starts from y or from x.

    Returns:
      A gradient transformation for one worker, to be used where the target's axes are
      bound. Its state keeps its shapes, dtypes and types from `init` on.

    Raises:
      ValueError: a strength outside [0, 1], a period below 1, an unknown order.

    >>> import jax.numpy as jnp, optax
    >>> import lsgd_jax as lj
    >>> tx = lj.pull(lj.leader("local"), strength=0.5, every=2)
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
    if not callable(strength):
        check_fraction("strength", strength)
    check_positive_int("every", every)
    check_option("order", order, get_args(Order))

    def init(params: Tree) -> Any:
        return PullState(
            count=Shared(jnp.zeros([], jnp.int32)),
            healed=jnp.zeros([], jnp.int32),
            target=target.init(params),
            axes=target.axes,
            period=every,
            payload=target.payload(params),
        )

    def update(updates, state, params=None, *, value=None, **extra_args):
        del extra_args
        if params is None:
            raise ValueError(NO_PARAMS)
        x, u = params, updates
        count = jnp.asarray(optax.safe_increment(state.count.value))
        seen, sound = target.observe(state.target, value, count)

        def exchange(u, target_state):
            y = plus(x, u)
            here = y if order == "adapt_then_combine" else x
            healthy = sound & all_finite(y)
            z, found, target_state = target.aim(here, target_state, healthy)
            pulled = step_towards(u, here, z, rate(strength, count))
            whole = jax.tree.map(lambda x, z: z - finite_part(x), x, z)
            heal = found & ~healthy
            moved = tree_where(heal, whole, tree_where(found, pulled, u))
            return (moved, state.healed + heal), target_state

        def keep(u, target_state):
            return (u, state.healed), target_state

        due = every == 1 or count % every == 0
        (u, healed), seen = communicate_if(due, exchange, keep, (u, seen))
        return u, dataclasses.replace(
            state, count=Shared(count), healed=healed, target=seen
        )

    return optax.GradientTransformationExtraArgs(init, update)


class QuarantineState(NamedTuple):
    """The state of `quarantine`.

    Attributes:
      sick: bool scalar, whether this worker waits to be healed; per worker.
      inner: the state of the pulls inside.
    """

    sick: Array
    inner: Any


def quarantine(
    inner: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformationExtraArgs:
    r"""Keeps a worker whose step is not finite where it is until a pull has healed it.

    With x the worker's parameters and u' = inner(u) the update that comes out:

    .. math::
      u' \leftarrow 0 \quad \text{if } x + u' \text{ is not finite,}

    and from then on u is nan for the `inner` pulls, so that no target takes the worker
    in, until one of them returns something finite: the target, taken whole. All named
    methods are wrapped in it; parameters that start finite stay finite.

    Args:
      inner: one pull, or a chain of pulls.

    Returns:
      A gradient transformation for one worker. Its state is a `QuarantineState`.
    """

    def init(params: Tree) -> Any:
        return QuarantineState(sick=jnp.asarray(False), inner=inner.init(params))

    def update(updates, state, params=None, **extra_args):
        if params is None:
            raise ValueError(NO_PARAMS)
        ill = lambda x: state.sick | ~jnp.isfinite(x)
        u = jax.tree.map(lambda x, u: jnp.where(ill(x), jnp.nan, u), params, updates)
        u, inner_state = inner.update(u, state.inner, params, **extra_args)
        healthy = all_finite(apply_updates(params, u))
        # What is nan in x itself must not pass for 0 in `apply_updates`: it stays nan.
        stay = jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), 0, jnp.nan), params)
        stay = optax.tree.cast_like(stay, u)
        return tree_where(healthy, u, stay), QuarantineState(~healthy, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def apply_updates(params: Tree, updates: Tree) -> Tree:
    """Adds updates to parameters, and lets a pull replace parameters that are not finite.

    x ← x + u where x is finite, x ← u elsewhere; `optax.apply_updates` gives nan + u = nan
    there. The two agree on finite parameters. Use it behind a chain that ends in a pull
    if the parameters you start from may already hold nan or inf.

    Args:
      params: parameters x, any shapes and dtypes.
      updates: updates u, a tree like `params`.

    Returns:
      A tree like `params`, of the same dtypes.

    >>> import jax.numpy as jnp
    >>> apply_updates(jnp.array([1.0, jnp.nan]), jnp.array([0.5, 2.0])).tolist()
    [1.5, 2.0]
    """
    return jax.tree.map(lambda x, u: (finite_part(x) + u).astype(x.dtype), params, updates)


def observe(state: Any, value: Array | None, count: Array) -> tuple[Any, Array]:
    """`Target.observe` for targets that need neither the loss nor the step."""
    del count
    return state, sound(value)


def observe_step(state: Any, value: Array | None, count: Array) -> tuple[Any, Array]:
    """`Target.observe` for targets whose state has a field `step`: the step, shared."""
    return state._replace(step=Shared(count)), sound(value)


def sound(value: Array | None) -> Array:
    """Whether the loss lets a worker take part: a bool scalar, True without a loss."""
    return jnp.asarray(True) if value is None else jnp.isfinite(value).all()


def all_finite(tree: Tree) -> Array:
    """Whether every number of the tree is finite: a bool scalar."""
    finite = jnp.asarray(True)
    for leaf in jax.tree.leaves(tree):
        finite &= jnp.isfinite(leaf).all()
    return finite


def step_towards(u: Tree, here: Tree, target: Tree, weight: Numeric) -> Tree:
    """u + weight * (target - here), in float32 at least, back in the dtypes of u."""

    def leaf(u: Array, h: Array, z: Array) -> Array:
        wide = jnp.promote_types(u.dtype, jnp.float32)
        gap = z.astype(wide) - h.astype(wide)
        return (u.astype(wide) + weight * gap).astype(u.dtype)

    return jax.tree.map(leaf, u, here, target)


def communicate_if(
    due: Array | bool, exchange: Callable, keep: Callable, operands: tuple
) -> Any:
    """exchange(*operands) if due, otherwise keep(*operands).

    Where `due` is an array it must come from a shared count, so that all workers take the
    same branch and meet in its collectives.
    """

    if due is True:
        return exchange(*operands)

    def typed(branch, other):
        return lambda *operands: _typed_alike(branch(*operands), other(*operands))

    return lax.cond(due, typed(exchange, keep), typed(keep, exchange), *operands)


def _typed_alike(tree, like):
    """The same values, typed as varying over the axes over which `like` varies too."""

    def cast(x, y):
        varying = lambda a: jax.typeof(a).manual_axis_type.varying
        missing = tuple(varying(y) - varying(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree, like)


def plus(x: Tree, u: Tree) -> Tree:
    """y = x + u as the worker will hold it: in the dtypes of x."""
    return jax.tree.map(lambda x, u: (x + u).astype(x.dtype), x, u)


def nbytes(tree: Tree) -> int:
    """The size of all leaves together, in bytes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def sum_nbytes(tree: Tree) -> int:
    """The bytes of a sum over the tree: float32 at least, and a count (see `total`)."""
    sizes = [leaf.size * max(leaf.dtype.itemsize, 4) for leaf in jax.tree.leaves(tree)]
    return sum(sizes) + 4


def mean_of(sums: Tree, count: Array) -> Tree:
    """sums / count, in the dtypes of the sums."""
    return jax.tree.map(lambda s: s / count.astype(s.dtype), sums)


def rate(strength: optax.ScalarOrSchedule, count: Array) -> Any:
    """The strength at this step: a number, or a schedule's value."""
    return strength(count) if callable(strength) else strength


def finite_part(x: Array) -> Array:
    """x, with zeros in place of what is not finite."""
    return jnp.where(jnp.isfinite(x), x, 0)


def tree_where(condition: Array, tree: Tree, otherwise: Tree) -> Tree:
    """`jnp.where` leaf by leaf, in the dtypes of `otherwise`."""
    return jax.tree.map(
        lambda a, b: jnp.where(condition, a.astype(b.dtype), b), tree, otherwise
    )
