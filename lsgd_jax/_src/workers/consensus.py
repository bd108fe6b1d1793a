"""The one model that W workers represent, and the distance between the workers."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.flatten_util import ravel_pytree
from jax.sharding import NamedSharding

from lsgd_jax._src.complex_leaves import in_pairs, joined
from lsgd_jax._src.exchange.diagnostics import states_of
from lsgd_jax._src.exchange.memory import to_device
from lsgd_jax._src.exchange.with_state import WithState
from lsgd_jax._src.explicit import with_automatic_axes
from lsgd_jax._src.norms import norm, squares
from lsgd_jax._src.shared import WORKER_AXES, is_shared, shared_flags
from lsgd_jax._src.trees import Tree, column, finite_part, own_axes, widened
from lsgd_jax._src.wire.collectives import any_bound


def _has_mean(x: Array) -> bool:
    """Whether a leaf holds floats; counts, flags and random keys have no mean."""
    return jnp.issubdtype(x.dtype, jnp.inexact)


def _check_outside(name: str) -> None:
    """Raises ValueError inside a mapped function, where leaves have no axis of workers."""
    if any_bound(WORKER_AXES):
        raise ValueError(
            f"`{name}` takes the rows of all workers: call it outside of `Workers.map`; "
            "inside, `lj.rules.Group(('node', 'local')).masked_mean(x)` is their mean"
        )


@jax.jit
def is_finite(params: Tree) -> Array:
    """Returns which workers have finite parameters. Call it outside of `Workers.map`.

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
    leaves = jax.tree.leaves(params)
    if not leaves:
        return jnp.ones([], bool)  # an empty tree does not tell the number of workers
    floats = filter(_has_mean, leaves)
    rows = [jnp.isfinite(x).all(axis=own_axes(x)) for x in floats]
    # Not stacked: on explicit mesh axes the rows are sharded, unlike an array of ones.
    return functools.reduce(jnp.logical_and, rows, jnp.ones(leaves[0].shape[0], bool))


def _means(leaves: Sequence[Array], finite: Array, packed: bool) -> list[Array]:
    """The mean of each leaf [W, ...] of floats over the finite workers."""
    masked = [jnp.where(column(finite, x), widened(x), 0) for x in leaves]
    if not packed:
        count = finite.sum()
        return [x.sum(axis=0) / count.astype(x.dtype) for x in masked]
    rows = (masked, finite.astype(jnp.float32))
    total = jax.vmap(lambda row: ravel_pytree(row)[0])(rows).sum(axis=0)
    _, unravel = ravel_pytree(jax.tree.map(lambda x: x[0], rows))
    sums, count = unravel(total)
    return [x / count.astype(x.dtype) for x in sums]


def _pack(params: Tree) -> bool:
    """Whether leaves are summed as one array.

    Between processes XLA runs the sums of several leaves side by side. If a process fails,
    some sums continue after others have failed, and gloo aborts on messages that do not
    match. Leaves that are sharded inside a worker stay separate, because flattening would
    gather them.
    """
    shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves(params)]
    inside = (s.spec[1:] for s in shardings if isinstance(s, NamedSharding))
    return jax.process_count() > 1 and not any(map(any, inside))


def consensus(params: Tree) -> Tree:
    r"""Returns the mean of the workers: x̄ = mean_{i ∈ H} x_i.

    H is the set of workers whose parameters are finite. For LSGD and most methods this mean
    is the model to test ("the center"). Call it outside of `Workers.map`, on stacked trees.

    Args:
      params: the workers' parameters, leaves [W, ...]. Integers, bools and random keys have
        no mean and come from the first worker in H (from worker 0 if H is empty).

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
    finite = is_finite(params)
    first = jnp.argmax(finite)
    row = with_automatic_axes(lambda x, i: x[i])
    leaves, treedef = jax.tree.flatten(params)
    means = iter(_means(list(filter(_has_mean, leaves)), finite, packed))
    return treedef.unflatten(
        next(means).astype(x.dtype) if _has_mean(x) else row(x, first) for x in leaves
    )


def consensus_distance(params: Tree) -> Array:
    r"""Returns the relative distance of the workers: mean_{i ∈ H} ‖x_i − x̄‖ / ‖x̄‖.

    x̄ and H are those of `consensus`. A norm is taken over all float leaves together.

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
    finite = is_finite(params)
    floats = [x for x in jax.tree.leaves(params) if _has_mean(x)]
    if not floats:
        return jnp.float32(0)
    means = _means(floats, finite, packed)

    def apart(x: Array, c: Array) -> Array:
        gap = jnp.where(column(finite, x), widened(x) - c[None], 0)
        return squares(jnp.abs(gap), axis=own_axes(x))

    gaps = norm(functools.reduce(jnp.add, map(apart, floats, means)))
    length = norm(functools.reduce(jnp.add, (squares(jnp.abs(c)) for c in means)))
    total, count = jnp.stack([gaps, finite.astype(gaps.dtype)]).sum(axis=1)
    distance = total / count / length
    return jnp.where(total == 0, 0, distance).astype(jnp.float32)


ROUNDINGS = 4  # x + u may round differently on each worker


def check_workers_agree(tree: Tree) -> None:
    """Raises ValueError if workers differ, for a program that keeps one worker's values.

    Call it before ``flax.jax_utils.unreplicate(params)`` or ``params[0]``. Workers agree
    only behind an exchange that pulls with strength 1. Between exchanges a checkpoint of
    one worker loses all others.

    Args:
      tree: leaves [W, ...], such as the workers' parameters; a `Shared` is not looked at.

    Raises:
      ValueError: a leaf of floats whose rows differ by more than rounding, or another leaf
        whose rows differ.

    >>> import lsgd_jax as lj
    >>> import jax.numpy as jnp
    >>> lj.checks.check_workers_agree({"w": jnp.ones([2, 3])})
    >>> lj.checks.check_workers_agree({"w": jnp.array([1.0, 1.5])})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
      ...
    ValueError: workers differ at ['w'], worker 1 from worker 0 by 0.5: ...
    """
    _check_outside("check_workers_agree")
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    for path, leaf, shared in zip(paths, jax.tree.leaves(tree), shared_flags(tree)):
        if shared or not leaf.size:
            continue
        differs, i, gap = map(np.asarray, _first_that_differs(leaf))
        if differs:
            raise ValueError(
                f"workers differ at {jax.tree_util.keystr(path) or 'the top'}, worker {i} "
                f"from worker 0 by {gap:g}: between exchanges every worker has its own "
                "values, so keep the rows of all workers, or, for a model only, "
                "`lj.center(params, opt_state)`"
            )


@jax.jit
@with_automatic_axes
def _first_that_differs(x: Array) -> tuple[Array, Array, Array]:
    """Whether workers differ from worker 0 by more than rounding, the first one, its gap.

    Scalars, which every process can read.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    same = (x == x[:1]) | ((x != x) & (x[:1] != x[:1]))  # nan agrees with nan
    if _has_mean(x):
        apart = jnp.where(same, 0, jnp.abs(widened(x) - widened(x[:1])))
        largest = jnp.abs(finite_part(widened(x))).max()
        slack = ROUNDINGS * jnp.finfo(x.dtype).eps * largest
    else:
        apart = (~same).astype(jnp.float32)
        slack = jnp.float32(0)
    gaps = apart.max(axis=own_axes(x))
    wrong = ~(gaps <= slack)
    i = jnp.argmax(wrong)
    return wrong.any(), i, jnp.where(jnp.arange(len(gaps)) == i, gaps, 0).sum()


def center(params: Tree, opt_state: Tree) -> Tree:
    """Returns the model to test: the method's own center, or else the `consensus`.

    A method keeps the center of the parameters that it exchanges. Any other tree, known by
    its structure and shapes, has its `consensus`: batch statistics, for example. An average
    of the parameters over time has their shapes, so call `consensus` for it.

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
    return joined(_center(in_pairs(params), opt_state))


def has_center(params: Tree, opt_state: Tree) -> bool:
    """Whether the method keeps one center of all parameters, which all workers have.

    `center` then communicates nothing.

    Args:
      params, opt_state: as for `center`.

    >>> import lsgd_jax as lj
    >>> import jax.numpy as jnp
    >>> lj.has_center(jnp.array([1.0, 3.0]), opt_state=())
    False
    """
    _check_outside("has_center")

    def keeps(node: Any) -> bool:
        return hasattr(type(node), "__lsgd_center__")

    nodes = filter(keeps, jax.tree.leaves(opt_state, is_leaf=keeps))
    centers = [node.__lsgd_center__() for node in nodes]
    is_one = all(map(is_shared, centers))
    return is_one and all(_pieces(in_pairs(params), [x.value for x in centers]))


def _center(params: Tree, opt_state: Tree) -> Tree:
    """The center of parameters of which complex leaves are pairs, as in the state."""
    leaves, treedef = jax.tree.flatten(params)
    pieces = _pieces(params, list(_centers(opt_state)))
    if not any(pieces):
        return consensus(params)
    # A method moves no center of leaves that it does not exchange.
    rest = leaves if all(pieces) else jax.tree.leaves(consensus(params))
    return treedef.unflatten(
        _joined(own, x.shape[1:]).astype(x.dtype) if own else mean
        for own, x, mean in zip(pieces, leaves, rest)
    )


def _pieces(params: Tree, centers: Sequence[Tree]) -> list[list[Array]]:
    """The centers of each leaf [W, ...]: fragments may have cut it, and it may have none.

    No leaf has a center if the centers are those of another tree.
    """
    leaves, treedef = jax.tree.flatten(params)
    nothing: list[list[Array]] = [[] for _ in leaves]
    found = [list(own) for own in nothing]
    for tree in centers:
        try:
            each = treedef.flatten_up_to(tree)
        except (ValueError, TypeError):
            return nothing
        for own, c in zip(found, each):
            if isinstance(c, optax.MaskedNode):
                continue
            if not hasattr(c, "shape"):
                return nothing
            own.append(c)
    fits = all(_fit(own, x.shape[1:]) for own, x in zip(found, leaves) if own)
    return found if fits else nothing


def _centers(opt_state: Tree) -> Iterator[Tree]:
    """Yields the center of each pull that has one, with empty nodes for other leaves."""

    def own(node):
        return hasattr(type(node), "__lsgd_center__") or isinstance(node, WithState)

    # A user's own vmap has stacked values that are equal on all workers.
    is_stacked = any(jnp.ndim(node.count.value) for node in states_of(opt_state))
    for node in filter(own, jax.tree.leaves(opt_state, is_leaf=own)):
        if isinstance(node, WithState):  # of the parameters and fields of the base's state
            yield from (params for params, _ in _centers(node.exchange))
            continue
        shared = node.__lsgd_center__()
        value = to_device(shared.value)
        # Each group of workers has its own center: return their mean.
        if not is_shared(shared):
            yield consensus(value)
        else:
            yield jax.tree.map(lambda x: x[0], value) if is_stacked else value


def _fit(pieces: Sequence[Array], shape: tuple[int, ...]) -> bool:
    """Whether the pieces of a leaf, cut along one axis at most, have its shape together."""
    first = pieces[0].shape
    if first == shape:
        return True
    cut = [d for d, (n, m) in enumerate(zip(first, shape)) if n != m]
    if len(first) != len(shape) or len(cut) != 1:
        return False
    (axis,) = cut
    lengths = [c.shape[axis] for c in pieces]
    whole = [(*shape[:axis], n, *shape[axis + 1 :]) for n in lengths]
    return [c.shape for c in pieces] == whole and sum(lengths) == shape[axis]


def _joined(pieces: Sequence[Array], shape: tuple[int, ...]) -> Array:
    """The center of a leaf of a shape that its pieces `_fit`."""
    first, *others = pieces
    cut = [d for d, (n, m) in enumerate(zip(first.shape, shape)) if n != m]
    return jnp.concatenate([first, *others], axis=cut[0]) if cut else first
