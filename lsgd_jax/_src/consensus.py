"""The one model that W workers stand for, and how far they stand apart."""

import functools
import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding

from lsgd_jax._src.collectives import any_bound
from lsgd_jax._src.diagnostics import states_of
from lsgd_jax._src.memory import to_device
from lsgd_jax._src.shared import WORKER_AXES, is_shared
from lsgd_jax._src.trees import Tree, widened


def _has_mean(x: Array) -> bool:
    """Whether a leaf holds floats: counts, flags and random keys have no mean."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _check_outside(name: str) -> None:
    """Raises ValueError inside of a mapped function, where there is no axis of workers."""
    if any_bound(WORKER_AXES):
        raise ValueError(
            f"`{name}` takes all workers' rows, so call it outside of `Workers.map`; the "
            "mean of the workers inside is `lj.Group(('node', 'local')).masked_mean(x)`"
        )


def is_finite(params: Tree) -> Array:
    """Returns which workers have finite parameters. Works outside of `Workers.map`.

    Args:
      params: the workers' parameters, leaves [W, ...].

    Returns:
      bool [W].

    >>> import lsgd_jax as lj
    >>> import jax.numpy as jnp
    >>> lj.is_finite(jnp.array([1.0, 3.0, jnp.nan])).tolist()
    [True, True, False]
    """
    _check_outside("is_finite")
    return _is_finite(params)


@jax.jit
def _is_finite(params: Tree) -> Array:
    leaves = jax.tree.leaves(params)
    if not leaves:
        return jnp.ones([], bool)  # for the workers of an empty tree, however many
    floats = filter(_has_mean, leaves)
    rows = [jnp.isfinite(x).all(axis=_own_axes(x)) for x in floats]
    return jnp.stack([jnp.ones(leaves[0].shape[0], bool), *rows]).all(axis=0)


def _own_axes(x: Array) -> tuple[int, ...]:
    """All axes but that of the workers. Flattening them would gather what is sharded."""
    return tuple(range(1, x.ndim))


def _rows(where: Array, x: Array) -> Array:
    """The mask [W], shaped to go with x [W, ...]."""
    return where.reshape(-1, *(1,) * (x.ndim - 1))


def _means(leaves: Sequence[Array], finite: Array, packed: bool) -> list[Array]:
    """The mean of each leaf [W, ...] of floats over the finite workers."""
    masked = [jnp.where(_rows(finite, x), widened(x), 0) for x in leaves]
    if not packed:
        return [x.sum(axis=0) / finite.sum() for x in masked]
    rows = [x.reshape(x.shape[0], -1) for x in masked]
    dtype = jnp.result_type(*rows, jnp.float32)
    together = jnp.concatenate([*rows, finite[:, None]], axis=1, dtype=dtype).sum(axis=0)
    ends = list(itertools.accumulate(row.shape[1] for row in rows))
    parts = jnp.split(together[:-1] / together[-1], ends[:-1])
    return [m.reshape(x.shape[1:]).astype(x.dtype) for m, x in zip(parts, masked)]


def _pack(params: Tree) -> bool:
    """Whether leaves are to be added up as one array.

    Between processes XLA runs the sums of several leaves side by side. If a process is
    lost, some go on after others have failed, and gloo aborts on what does not match. What
    is sharded inside a worker stays as it is: flattening would gather it.
    """
    shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves(params)]
    inside = (s.spec[1:] for s in shardings if isinstance(s, NamedSharding))
    return jax.process_count() > 1 and not any(map(any, inside))


def consensus(params: Tree) -> Tree:
    r"""The mean of the workers: x̄ = mean_{i ∈ H} x_i.

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
    _check_outside("consensus")
    return _consensus(params, _pack(params))


@functools.partial(jax.jit, static_argnames="packed")
def _consensus(params: Tree, packed: bool) -> Tree:
    finite = _is_finite(params)
    first = jnp.argmax(finite)
    leaves, treedef = jax.tree.flatten(params)
    means = iter(_means(list(filter(_has_mean, leaves)), finite, packed))
    return treedef.unflatten(
        next(means).astype(x.dtype) if _has_mean(x) else x[first] for x in leaves
    )


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
    _check_outside("consensus_distance")
    return _consensus_distance(params, _pack(params))


@functools.partial(jax.jit, static_argnames="packed")
def _consensus_distance(params: Tree, packed: bool) -> Array:
    finite = _is_finite(params)
    floats = [x for x in jax.tree.leaves(params) if _has_mean(x)]
    if not floats:
        return jnp.float32(0)
    means = _means(floats, finite, packed)

    def squares(x: Array, c: Array) -> Array:
        gap = jnp.where(_rows(finite, x), widened(x) - c[None], 0)
        return jnp.square(gap).sum(axis=_own_axes(x))

    gaps = jnp.sqrt(sum(map(squares, floats, means)))
    norm = jnp.sqrt(sum(jnp.square(c).sum() for c in means))
    total, count = jnp.stack([gaps, finite.astype(gaps.dtype)]).sum(axis=1)
    distance = total / count / norm
    return jnp.where(total == 0, 0, distance).astype(jnp.float32)


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
    _check_outside("center")
    if states_of(params):
        raise ValueError(
            "`center` takes (params, opt_state), got an optimizer's state as `params`"
        )
    own = lambda node: hasattr(type(node), "__lsgd_center__")
    for node in filter(own, jax.tree.leaves(opt_state, is_leaf=own)):
        # A group that is not all workers has a center of its own: take their mean.
        shared = node.__lsgd_center__()
        value = to_device(shared.value)
        tree = value if is_shared(shared) else consensus(value)
        # A vmap of one's own has made rows of what is equal on all workers.
        row = lambda c, x: (c[0] if c.ndim == x.ndim else c).astype(x.dtype)
        return jax.tree.map(row, tree, params)
    return consensus(params)
