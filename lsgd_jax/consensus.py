"""The one model that W workers stand for, and how far they stand apart."""

import jax
import jax.numpy as jnp
from jax import Array

from lsgd_jax.shared import is_shared
from lsgd_jax.trees import Tree, widened


def _has_mean(x: Array) -> bool:
    """Whether a leaf holds floats: counts, flags and random keys have no mean."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _healthy(params: Tree) -> Array:
    """bool [W]: whose parameters are all finite."""
    leaves = jax.tree.leaves(params)
    floats = filter(_has_mean, leaves)
    finite = [jnp.isfinite(x).all(axis=_own_axes(x)) for x in floats]
    return jnp.stack([jnp.ones(leaves[0].shape[0], bool), *finite]).all(axis=0)


def _own_axes(x: Array) -> tuple[int, ...]:
    """All axes but that of the workers. Flattening them would gather what is sharded."""
    return tuple(range(1, x.ndim))


def _rows(where: Array, x: Array) -> Array:
    """The mask [W], shaped to go with x [W, ...]."""
    return where.reshape(-1, *(1,) * (x.ndim - 1))


def _mean(x: Array, healthy: Array) -> Array:
    return jnp.where(_rows(healthy, x), widened(x), 0).sum(axis=0) / healthy.sum()


@jax.jit
def consensus(params: Tree) -> Tree:
    r"""The mean of the workers: x̄ = (1 / |H|) Σ_{i ∈ H} x_i.

    H are the workers whose parameters are finite. For LSGD and most methods this is the
    model to test ("the center"). Works outside of `Workers.map`, on stacked trees.

    Args:
      params: the workers' parameters, leaves [W, ...]. Integers, bools and random keys
        have no mean: those of the first worker in H are taken (of worker 0 if H is empty).

    Returns:
      One tree, leaves [...], in the dtypes of `params`; nan if no worker is finite.

    >>> import lsgd_jax as lj
    >>> import jax.numpy as jnp
    >>> lj.consensus(jnp.array([1.0, 3.0, jnp.nan])).tolist()
    2.0
    """
    healthy = _healthy(params)
    first = jnp.argmax(healthy)

    def leaf(x: Array) -> Array:
        return _mean(x, healthy).astype(x.dtype) if _has_mean(x) else x[first]

    return jax.tree.map(leaf, params)


@jax.jit
def consensus_distance(params: Tree) -> Array:
    r"""How far apart the workers are: mean_{i ∈ H} ‖x_i − x̄‖ / ‖x̄‖.

    x̄ and H as in `consensus`; norms over all leaves of floats together.

    Args:
      params: the workers' parameters, leaves [W, ...].

    Returns:
      float32 scalar; 0 if all are equal.

    >>> import lsgd_jax as lj
    >>> import jax.numpy as jnp
    >>> round(float(lj.consensus_distance(jnp.array([[1.0, 0.0], [3.0, 0.0]]))), 3)
    0.5
    """
    healthy = _healthy(params)
    floats = [x for x in jax.tree.leaves(params) if _has_mean(x)]
    means = [_mean(x, healthy) for x in floats]

    def squares(x: Array, c: Array) -> Array:
        gap = jnp.where(_rows(healthy, x), widened(x) - c[None], 0)
        return jnp.square(gap).sum(axis=_own_axes(x))

    gaps = jnp.sqrt(sum(map(squares, floats, means)))
    norm = jnp.sqrt(sum(jnp.square(c).sum() for c in means))
    distance = gaps.sum() / healthy.sum() / norm
    return jnp.where(gaps.sum() == 0, 0, distance).astype(jnp.float32)


def center(params: Tree, opt_state: Tree) -> Tree:
    """The model to test: the method's own center if it has one, else `consensus`.

    Args:
      params: the workers' parameters, leaves [W, ...].
      opt_state: the optimizer's state over all workers.

    Returns:
      One tree, leaves [...], in the dtypes of `params`.

    >>> import lsgd_jax as lj
    >>> import jax.numpy as jnp
    >>> lj.center(jnp.array([1.0, 3.0]), opt_state=()).tolist()
    2.0
    """
    own = lambda node: hasattr(node, "center")
    for node in filter(own, jax.tree.leaves(opt_state, is_leaf=own)):
        # A group that is not all workers has a center of its own: take their mean.
        tree = node.center.value
        tree = tree if is_shared(node.center) else consensus(tree)
        return jax.tree.map(lambda c, x: c.astype(x.dtype), tree, params)
    return consensus(params)
