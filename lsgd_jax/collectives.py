"""What workers say to each other: elect, take_from, mean, shift, push, on whole pytrees.

Every function is written for ONE worker and names the group it speaks to by its mesh
axes. Trees are packed into one buffer per dtype before anything travels, because the
cost of a collective is per call.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax

from lsgd_jax.shared import Shared, shared
from lsgd_jax.trees import Tree


Axes = str | tuple[str, ...]

# With several workers on a device, `Workers` may split an axis in two: the devices
# along it, and the slots of one device (a vmapped axis).
DEVICE, SLOT = "{}_device", "{}_slot"
WORKER_AXES = ("node", "local")


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
    devices, slots = _devices_and_slots(axes)
    # One axis at a time, the innermost first: vmapped axes know no other way.
    stacked = x
    for name in reversed(slots):
        stacked = lax.all_gather(stacked, name)
    if devices:
        stacked = lax.all_gather(stacked, devices)
    return stacked.reshape(size(axes), *x.shape)


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


def total(tree: Tree, axes: Axes, where: jax.Array | bool = True) -> tuple[Tree, jax.Array]:
    """The sum of the group's trees over the workers `where` (bool, varying) holds.

    Args:
      tree: what to add up; varying per worker. What is not taken in may be nan or inf.
      axes: the mesh axes of the group.
      where: whether this worker takes part.

    Returns:
      (sums, count): a tree in float32 at least, and how many took part (float32 scalar).
      Both are the same for the whole group, and travel together.
    """
    where = jnp.asarray(where)
    wide = jax.tree.map(lambda x: jnp.where(where, widened(x), 0), tree)
    taking_part = where.astype(jnp.float32)
    return _packed(lambda x: lax.psum(x, names(axes)), (wide, taking_part))


def mean(tree: Tree, axes: Axes, where: jax.Array | bool = True) -> Tree:
    """The mean of the group's trees over the workers `where` (bool, varying) holds.

    Sums run in float32 at least and come back in each leaf's dtype. If nobody takes
    part the mean is nan.
    """
    sums, count = total(tree, axes, where)
    divide = lambda s, x: (s / count.astype(s.dtype)).astype(x.dtype)
    return jax.tree.map(divide, sums, tree)


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
    devices, slots = _devices_and_slots(axes)
    return _packed(lambda x: _permute(x, permutation, devices, slots), tree)


def push(
    tree: Tree,
    weight: jax.Array,
    rounds: Sequence[Sequence[Sequence[tuple[int, int]]]],
    r: jax.Array,
    axes: Axes,
) -> tuple[Tree, jax.Array]:
    """Each worker's tree and weight sent to its out-neighbors in one round of a graph.

    Args:
      tree: what to send, finite; varying per worker.
      weight: float32 scalar; varying per worker.
      rounds: of each round the permutations it is made of, as for `shift`.
      r: int32 scalar, the round; the same for the whole group.
      axes: the mesh axes of the group.

    Returns:
      (sums, mass): with the sum over this worker's in-neighbors j, Σ weight_j · tree_j (in
      float32 at least) and Σ weight_j; zeros where nobody sends.
    """

    def send_along(permutations):
        def send(message):
            sums = jax.tree.map(lambda x: jnp.zeros_like(widened(x)), message[0])
            mass = jnp.zeros_like(message[1])
            for permutation in permutations:
                arrived, m = shift(message, permutation, axes)
                weighed = jax.tree.map(lambda x, m=m: m * widened(x), arrived)
                sums, mass = jax.tree.map(jnp.add, (sums, mass), (weighed, m))
            return sums, mass

        return send

    branches = [send_along(permutations) for permutations in rounds]
    if len(branches) == 1:
        return branches[0]((tree, weight))
    return lax.switch(r, branches, (tree, weight))


def coordinatewise(rule: Callable[[jax.Array], jax.Array], tree: Tree, axes: Axes) -> Tree:
    """A rule [W, n] -> [n] over the group's W values, applied to every coordinate.

    The rule sees float32 at least; the result is in the dtypes of the tree.
    """
    apply = lambda x: rule(widened(gather(x, axes))).astype(x.dtype)
    return _packed(apply, tree)


def drawn(
    probability: jax.Array | float, seed: int, step: jax.Array, axes: Axes
) -> jax.Array:
    """Whether this worker's coin fell at this step: a bool scalar, varying."""
    key = jax.random.fold_in(jax.random.key(seed), step)
    coin = jax.random.uniform(jax.random.fold_in(key, index(axes)))
    return coin < probability


def everybody(axes: Axes) -> bool:
    """Whether the group is all workers of the node × local grid, where we are traced."""
    named = (axes,) if isinstance(axes, str) else tuple(axes)
    others = [axis for axis in WORKER_AXES if axis not in named]
    parts = lambda axis: (axis, SLOT.format(axis), DEVICE.format(axis))
    return all(
        lax.axis_size(part) == 1 for axis in others for part in parts(axis) if bound(part)
    )


def equal(tree: Tree, axes: Axes) -> Shared:
    """Marks what is equal in the group."""
    return shared(tree, axes, everybody(axes))


def widened(x: jax.Array) -> jax.Array:
    """x in float32 at least: what sums run in."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


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


def _devices_and_slots(axes: Axes) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the axes across devices, and of those inside a device."""
    slots = tuple(name for name in names(axes) if _is_slot(name))
    return tuple(name for name in names(axes) if name not in slots), slots


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
