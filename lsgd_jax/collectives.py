"""What workers say to each other: elect, take_from, mean, shift, on whole pytrees.

Every function is written for ONE worker and names the group it speaks to by its mesh
axes. Trees are packed into one buffer per dtype before anything travels, because the
cost of a collective is per call.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from lsgd_jax._types import Tree


Axes = str | tuple[str, ...]

# With several workers on a device, `Workers` may split an axis in two: the devices
# along it, and the slots of one device (a vmapped axis).
DEVICE, SLOT = "{}_device", "{}_slot"


def bound(axis: str) -> bool:
    """Whether the axis has a meaning where we are traced."""
    try:
        lax.axis_size(axis)
    except NameError:
        return False
    return True


def names(axes: Axes) -> tuple[str, ...]:
    """The names under which JAX knows the axes here, without those of size 1."""
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    found = []
    for axis in axes:
        parts = [SLOT.format(axis), DEVICE.format(axis)]
        parts = [axis] if bound(axis) else [part for part in parts if bound(part)]
        if not parts:
            raise NameError(
                f"no axis {axis!r} here: call this inside `Workers.map` (or "
                f"`jax.shard_map`), on a mesh that has an axis {axis!r}"
            )
        found += reversed(parts)
    return tuple(name for name in found if lax.axis_size(name) > 1)


def size(axes: Axes) -> int:
    """The number of workers in the group."""
    return math.prod(lax.axis_size(name) for name in names(axes))


def index(axes: Axes) -> jax.Array:
    """This worker's number in the group, row-major over the axes: int32, varying."""
    position = jnp.int32(0)
    for name in names(axes):
        position = position * lax.axis_size(name) + lax.axis_index(name)
    return position


def gather(x: jax.Array, axes: Axes) -> jax.Array:
    """Everybody's x, stacked in the order of `index`: shape (size, *x.shape)."""
    group = size(axes)
    # One axis at a time, the innermost first: vmapped axes know no other way.
    stacked = x
    for name in reversed(names(axes)):
        stacked = lax.all_gather(stacked, name)
    return stacked.reshape(group, *x.shape)


def elect(score: jax.Array, axes: Axes) -> tuple[jax.Array, jax.Array]:
    """The worker with the lowest score of the group, ties to the lowest index.

    Args:
      score: float scalar, varying per worker. What is not finite is never elected.
      axes: the mesh axes of the group.

    Returns:
      (leader, found): its index in the group (int32), and whether anybody had a finite
      score (bool). Both are the same for the whole group.
    """
    scores = gather(jnp.where(jnp.isfinite(score), score, jnp.inf), axes)
    return jnp.argmin(scores).astype(jnp.int32), jnp.isfinite(scores).any()


def take_from(tree: Tree, source: jax.Array, axes: Axes) -> Tree:
    """The tree of worker `source` (an index in the group), handed to the whole group."""
    mine = index(axes) == source
    # `where` and not a product: 0 * nan would leak the others' nan into the sum.
    return _packed(lambda x: lax.psum(jnp.where(mine, x, 0), names(axes)), tree)


def mean(tree: Tree, axes: Axes, where: jax.Array | bool = True) -> Tree:
    """The mean of the group's trees over the workers `where` (bool, varying) holds.

    Sums run in float32 at least and come back in each leaf's dtype. If nobody takes
    part the mean is nan.
    """
    where = jnp.asarray(where)
    count = lax.psum(where.astype(jnp.float32), names(axes))

    def buffer_mean(x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        total = lax.psum(jnp.where(where, wide, 0), names(axes))
        return (total / count.astype(total.dtype)).astype(x.dtype)

    return _packed(buffer_mean, tree)


def shift(tree: Tree, permutation: Sequence[tuple[int, int]], axes: Axes) -> Tree:
    """Each worker's tree sent along a permutation of the group.

    Args:
      tree: what to send; varying per worker.
      permutation: pairs (source, destination) of indices in the group, every source and
        every destination at most once.
      axes: the mesh axes of the group.

    Returns:
      The tree of this worker's source; zeros for a worker that is nobody's destination.

    Raises:
      ValueError: two pairs share a source or a destination, or an index is outside.
    """
    group = size(axes)
    for side, indices in zip(("source", "destination"), zip(*permutation)):
        if len(set(indices)) < len(indices):
            raise ValueError(f"every {side} may occur once, got {permutation=}")
        if not all(0 <= i < group for i in indices):
            raise ValueError(
                f"indices must lie in 0..{group - 1} for a group of {group} workers, "
                f"got {permutation=}"
            )
    slots = tuple(name for name in names(axes) if _is_slot(name))
    devices = tuple(name for name in names(axes) if not _is_slot(name))
    return _packed(lambda x: _permute(x, permutation, devices, slots), tree)


def _permute(
    x: jax.Array,
    permutation: Sequence[tuple[int, int]],
    devices: tuple[str, ...],
    slots: tuple[str, ...],
) -> jax.Array:
    """`ppermute` over a group of devices with several workers (slots) each."""
    if not slots:
        return lax.ppermute(x, devices, permutation) if devices else x
    per_device = math.prod(lax.axis_size(name) for name in slots)
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for source, target in permutation:
        (d, s), (e, t) = divmod(source, per_device), divmod(target, per_device)
        lanes.setdefault((s, t), []).append((d, e))
    rows = gather(x, slots)  # every slot of this device
    arrived = jnp.zeros_like(rows)
    for (s, t), pairs in lanes.items():
        row = lax.ppermute(rows[s], devices, pairs) if devices else rows[s]
        arrived = arrived.at[t].add(row)
    return arrived[index(slots)]


def _is_slot(name: str) -> bool:
    """Whether the axis lies inside a device (vmapped) rather than across devices."""
    return name not in jax.sharding.get_abstract_mesh().axis_names


def _packed(collective: Callable[[jax.Array], jax.Array], tree: Tree) -> Tree:
    """The collective applied to one flat buffer per dtype instead of to every leaf."""
    leaves, treedef = jax.tree.flatten(tree)
    results = list(leaves)
    for dtype in dict.fromkeys(leaf.dtype for leaf in leaves):
        chosen = [i for i, leaf in enumerate(leaves) if leaf.dtype == dtype]
        sizes = [leaves[i].size for i in chosen]
        buffer = collective(jnp.concatenate([leaves[i].ravel() for i in chosen]))
        ends = [sum(sizes[: k + 1]) for k in range(len(sizes) - 1)]
        for i, part in zip(chosen, jnp.split(buffer, ends)):
            results[i] = part.reshape(leaves[i].shape)
    return jax.tree.unflatten(treedef, results)
