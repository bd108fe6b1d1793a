"""Arithmetic on whole pytrees, in float32 or wider."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.sharding import PartitionSpec as Spec
from jax.typing import ArrayLike

from lsgd_jax._src.complex_leaves import is_complex, is_pair, joined, pair
from lsgd_jax._src.explicit import as_automatic, with_automatic_axes
from lsgd_jax._src.layouts import known_axes, shard_by_shard
from lsgd_jax._src.shared import Shared


Tree = Any  # a pytree of arrays
HEADROOM = 256  # see `has_headroom`


def wide(dtype: Any) -> Any:
    """The type of float32 or wider in which leaves of this dtype are summed."""
    # `jnp.promote_types` refuses floats of 8 bits, and with strict promotion bfloat16.
    is_wide = jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize >= 4
    return dtype if is_wide else jnp.dtype(jnp.float32)


def widened(tree: Tree) -> Tree:
    """The tree in the type in which sums are computed, float32 or wider."""
    return jax.tree.map(lambda x: x.astype(wide(x.dtype)), tree)


def arrays(tree: Tree) -> Tree:
    """The tree with arrays in place of Python's numbers."""
    return jax.tree.map(lambda x: x if hasattr(x, "dtype") else jnp.asarray(x), tree)


def with_own_buffers(tree: Tree, *others: Tree) -> Tree:
    """Copies arrays that are also elsewhere in the tree or in others, so that all may be
    donated together."""
    seen = set(map(id, jax.tree.leaves(others)))

    def own(x: Any) -> Any:
        if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
            return x
        mine = jnp.copy(x) if id(x) in seen else x
        seen.add(id(x))
        return mine

    return jax.tree.map(own, tree)


def is_float(x: Any) -> bool:
    """Whether a leaf holds floats of 16 bits or more, which can be summed."""
    return jnp.issubdtype(x.dtype, jnp.floating) and x.dtype.itemsize > 1


def floats(tree: Tree, like: Tree | None = None) -> Tree:
    """The tree with an empty node in place of every leaf that does not hold floats.

    A pair of floats stands in place of a complex leaf.

    like: the tree whose leaves decide. Defaults to the tree itself.
    """

    def keep(x: Any, decides: Any) -> Any:
        if is_complex(decides):
            return pair(x)
        return x if is_float(decides) else optax.MaskedNode()

    return jax.tree.map(keep, tree, tree if like is None else like)


def refill(part: Tree, tree: Tree) -> Tree:
    """Fills the empty nodes of `part` with the leaves of `tree`, and joins pairs."""

    def masked(node):
        return isinstance(node, optax.MaskedNode)

    def fill(mine: Any, other: Any) -> Any:
        return other if masked(mine) else joined(mine)

    return jax.tree.map(fill, part, tree, is_leaf=lambda x: masked(x) or is_pair(x))


def structure_of(fn: Callable[[], Tree]) -> Any:
    """The structure of the tree that fn returns, without computing its leaves.

    `jax.eval_shape` would build the tree of shapes, which a user's node may refuse.
    """
    structure: Any = None

    def traced() -> None:
        nonlocal structure
        structure = jax.tree.structure(fn())

    jax.eval_shape(traced)
    return structure


def in_common(tree: Tree) -> Tree:
    """The tree with an empty node in place of all that no `Shared` holds."""

    def keep(node: Any) -> Any:
        return node if isinstance(node, Shared) else optax.MaskedNode()

    return jax.tree.map(keep, tree, is_leaf=lambda node: isinstance(node, Shared))


def is_same(tree: Tree, other: Tree) -> bool:
    """Whether two trees hold the same array objects, so that nothing was changed."""
    return all(a is b for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other)))


def zeros(tree: Tree) -> Tree:
    """A tree of zeros like the `widened` leaves."""
    return jax.tree.map(lambda x: lax.full(x.shape, 0, wide(x.dtype)), tree)


def plus(x: Tree, u: Tree) -> Tree:
    """y = x + u in the dtypes of x, as the worker will hold it."""

    def leaf(x: Array, u: Array) -> Array:
        dtype = widest(x.dtype, u.dtype)
        return (x.astype(dtype) + u.astype(dtype)).astype(x.dtype)

    return jax.tree.map(leaf, x, u)


def widest(*dtypes: Any) -> Any:
    """The dtype to which jax promotes these, also where strict promotion is set."""
    with jax.numpy_dtype_promotion("standard"):
        return jnp.result_type(*dtypes)


def step_towards(y: Tree, target: Tree, weight: ArrayLike) -> Tree:
    """y + weight · (target - y), computed in float32 or wider, in the dtypes of y."""

    def leaf(y: Array, z: Array) -> Array:
        wide = widened(y)
        gap = z.astype(wide.dtype) - wide
        return (wide + jnp.asarray(weight, wide.dtype) * gap).astype(y.dtype)

    return jax.tree.map(leaf, y, target)


def where(condition: Array, tree: Tree, otherwise: Tree) -> Tree:
    """Applies `jnp.where` to every leaf, in the dtypes of `otherwise`.

    A leaf that both trees hold is returned itself: asynchronous workers see by that which
    leaves an exchange has left alone.
    """

    def chosen(a: Array, b: Array) -> Array:
        return b if a is b else jnp.where(condition, a.astype(b.dtype), b)

    return jax.tree.map(chosen, tree, otherwise)


def column(row: Array, x: Array) -> Array:
    """A vector [W], shaped to go with x [W, ...]."""
    return row.reshape(-1, *(1,) * (x.ndim - 1))


def own_axes(x: Array) -> tuple[int, ...]:
    """The axes of x [W, ...] but the first. To flatten them would gather a sharded x."""
    return tuple(range(1, x.ndim))


def mean_of(sums: Tree, count: Array) -> Tree:
    """sums / count, in the dtypes of the sums."""
    return jax.tree.map(lambda s: s / count.astype(s.dtype), sums)


# These run on every leaf, so they use `lax.select`: `jnp.where` is a jitted function and
# takes several times as long to trace, lower and partition. They use `lax.full`, because
# `jnp.full_like` fails on an array that a user has constrained to a `NamedSharding`.


def where_finite(tested: Array, x: Array, other: Array | float) -> Array:
    """x where `tested` is finite, the scalar `other` elsewhere, in the dtype of x."""
    if not jnp.issubdtype(tested.dtype, jnp.inexact):
        return x
    is_finite = jnp.isfinite(tested) if is_complex(tested) else lax.is_finite(tested)
    return lax.select(is_finite, x, lax.full(x.shape, other, x.dtype))


def finite_part(x: Array) -> Array:
    """x, with zeros in place of the elements that are not finite."""
    return where_finite(x, x, 0)


@with_automatic_axes
def apply_updates(params: Tree, updates: Tree) -> Tree:
    """Adds updates to parameters, and lets an exchange replace those that are not finite.

    x ← x + u where x is finite, and x ← u elsewhere. On finite parameters this agrees with
    `optax.apply_updates`, which elsewhere gives nan + u = nan. Leaves of integers are added
    as integers, so that an update of 0.0 leaves each of them bit-identical; optax adds them
    as floats, of which float32 holds integers up to 2²⁴ only. Random keys do not change.

    Args:
      params: parameters x, any shapes and dtypes.
      updates: updates u, a tree like `params`.

    Returns:
      A tree like `params`, of the same dtypes.

    >>> import lsgd_jax as lj
    >>> import jax.numpy as jnp
    >>> lj.apply_updates(jnp.array([1.0, jnp.nan]), jnp.array([0.5, 2.0])).tolist()
    [1.5, 2.0]
    """
    return jax.tree.map(_updated, arrays(params), arrays(updates))


def _updated(x: Array, u: Array) -> Array:
    """x + u in the dtype of x, or u where x is not finite."""
    if jnp.issubdtype(x.dtype, jax.dtypes.extended) or u.dtype == jax.dtypes.float0:
        return x  # keys have no sum, and `jax.grad` gives integers no gradient
    if is_complex(x):
        return joined(jax.tree.map(_updated, pair(x), pair(u)))
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return (x + finite_part(u).astype(x.dtype)).astype(x.dtype)
    if jnp.issubdtype(x.dtype, jnp.floating) and not is_float(x):
        # jax promotes no float of 8 bits by itself.
        return (finite_part(x).astype(u.dtype) + u).astype(x.dtype)
    return plus(finite_part(x), u)


def all_finite(tree: Tree) -> Array:
    """Whether all elements are finite, on all of a worker's devices: a bool scalar."""
    axes = known_axes()

    def everywhere(tree: Tree) -> Array:
        leaves = jax.tree.leaves(tree)
        inexact = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.inexact)]
        if not inexact:
            return jnp.int8(1)
        finite = lax.platform_dependent(inexact, cpu=_finite_in_one_pass, default=_finite)
        # A sort finds the minimum, because XLA fuses nothing across it; see `materialized`.
        lowest = lax.sort(jnp.stack(finite).astype(jnp.int8))[0]
        return lax.pmin(lowest, axes) if axes else lowest

    return shard_by_shard(everywhere, tree, out=lambda _: Spec()) == 1


def _finite(leaves: list[Array]) -> list[Array]:
    """Whether all elements of each leaf are finite."""
    return [jnp.isfinite(x).all() for x in leaves]


def _finite_in_one_pass(leaves: list[Array]) -> list[Array]:
    """The same, by two equal reductions at once.

    XLA for CPUs compiles one reduction to three kernels, but two at once to one. That takes
    half the time to compile and to run.
    """

    def test(x: Array) -> Array:
        fails = (~jnp.isfinite(x)).astype(jnp.int32)
        none = jnp.zeros([], jnp.int32)
        first, second = lax.reduce(
            (fails, fails), (none, none), _larger, tuple(range(x.ndim))
        )
        return first + second == 0

    return [test(x) for x in leaves]


def _larger(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
    return lax.max(a[0], b[0]), lax.max(a[1], b[1])


def has_headroom(tree: Tree) -> Array:
    """Whether all elements are finite, and 256 times as large ones would be: a bool scalar.

    Sums of finite numbers may overflow. A center or an anchor moves only by sums that have
    headroom, so that it and its momentum stay finite.
    """
    return all_finite(jax.tree.map(lambda x: HEADROOM * x, tree))


def materialized(*scalars: Any) -> list[Array]:
    """Returns the same scalars, computed only once.

    XLA fuses the computation of a scalar into every consumer. If a scalar depends on n
    leaves and is used on n leaves, compile time grows with n². XLA fuses nothing across a
    sort. (An optimization barrier does not help: XLA removes it before fusion.)
    """
    each = [jnp.asarray(scalar) for scalar in scalars]
    dtype = widest(*(scalar.dtype for scalar in each))
    values = jnp.stack([scalar.astype(dtype) for scalar in each])
    return list(lax.sort((jnp.arange(len(scalars)), values), num_keys=1)[1])


def nbytes(tree: Tree) -> int:
    """The size of all leaves together, in bytes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def value_at(schedule: optax.ScalarOrSchedule, t: Array) -> Any:
    """A number, or a schedule's value at step t."""
    return schedule(t) if callable(schedule) else as_automatic(schedule)
