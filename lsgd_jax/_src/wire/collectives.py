"""MeshChannel: a group's messages as collectives of one compiled program.

All code is written for ONE worker, which names its group by mesh axes. The leaves of a tree
travel together, because each collective call has a fixed cost; see `carried`.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as Spec

from lsgd_jax._src.explicit import by_shards
from lsgd_jax._src.layouts import may_be_sharded, shard_by_shard
from lsgd_jax._src.shared import NAMES, SLOTS, WORKER_AXES, known_equal
from lsgd_jax._src.trees import Tree, widened
from lsgd_jax._src.wire.carried import carried
from lsgd_jax._src.wire.packing import Cut


Permutation = Sequence[tuple[int, int]] | Array

# With several workers on a device, `Workers` may split an axis in two: the devices along
# it, and the slots of one device (a vmapped axis).
DEVICE = "{}_device"
SLOT = "{}_slot"


@dataclasses.dataclass(frozen=True)
class MeshChannel:
    """Collectives over mesh axes; see `group.Channel`.

    Attributes:
      axes: the names of the axes.
    """

    axes: tuple[str, ...]
    transposes = True

    @property
    def _names(self) -> tuple[str, ...]:
        """The names of the axes in jax here, without axes of size 1."""
        found = []
        for axis in self.axes:
            known = list(filter(is_bound, parts_of(axis)))
            if not known and axis in WORKER_AXES and any_bound(WORKER_AXES):
                continue  # under a vmap over 'node' alone, 'local' has one worker
            if not known:
                raise NameError(_not_bound(axis))
            _check_is_of_the_workers(axis, known)
            found += known
        return tuple(name for name in found if lax.axis_size(name) > 1)

    @property
    def size(self) -> int:
        """The number of workers."""
        return math.prod(lax.axis_size(name) for name in self._names)

    @property
    def index(self) -> Array:
        """This worker's index, row-major over the axes: int32, varying."""
        position = jnp.int32(0)
        for name in self._names:
            position = position * lax.axis_size(name) + lax.axis_index(name)
        return position

    @property
    def is_all(self) -> bool:
        """Whether the group is all workers of the node × local grid.

        Outside of mapped functions, where no axis is bound, only a group along 'local' is
        known to be a part of the workers.
        """
        if not any_bound((*WORKER_AXES, *self.axes)):
            return self.axes != WORKER_AXES[1:]
        own = set(map(parts_of, self.axes))
        parts = itertools.chain(*({*map(parts_of, WORKER_AXES)} - own))
        return math.prod(lax.axis_size(part) for part in parts if is_bound(part)) == 1

    def gather(self, tree: Tree) -> Tree:
        """All workers' trees, leaves stacked in the order of `index`: [size, ...]."""
        devices, slots = self._devices_and_slots()
        # Vmapped axes can only be gathered one at a time: the innermost comes first.
        names = [*reversed(slots), *([devices] if devices else [])]

        def stacked(x):
            rows = functools.reduce(lax.all_gather, names, x)
            return rows.reshape(self.size, *x.shape)

        return carried(stacked, tree, joins_on_tpus=False)

    def transpose(self, tree: Tree) -> Tree:
        """Row i of worker j becomes row j of worker i: leaves [size, ...] in and out."""
        devices, slots = self._devices_and_slots()
        sizes = [math.prod(map(lax.axis_size, devices)), *map(lax.axis_size, slots)]

        def transposed(x):
            rows = x.reshape(*sizes, *x.shape[1:])
            # Vmapped axes can only be exchanged one at a time.
            for d, names in enumerate([devices, *slots]):
                if names:
                    rows = lax.all_to_all(rows, names, d, d, tiled=True)
            return rows.reshape(x.shape)

        return carried(transposed, tree, leading=1, joins_on_tpus=False)

    def scatter(self, tree: Tree) -> Tree:
        """This worker's row of the sum of all trees: leaves [size, ...] to [...]."""
        devices, slots = self._devices_and_slots()

        def scattered(x):
            for names in [devices, *slots]:
                x = lax.psum_scatter(x, names, tiled=True) if names else x
            return x

        rows = carried(scattered, tree, leading=1, adds=True, joins_on_tpus=False)
        return jax.tree.map(lambda x: x[0], rows)

    def add(self, tree: Tree) -> Tree:
        """The sum of all workers' trees."""
        if not self._names:
            return tree
        return carried(lambda x: lax.psum(x, self._names), tree, adds=True)

    def known_equal(self, tree: Tree) -> Tree:
        """The tree, which is equal in the group; see `shared.known_equal`."""
        return jax.tree.map(lambda x: known_equal(x, self._names), tree)

    @by_shards(out=lambda specs, *_: specs)
    def broadcast(self, tree: Tree, source: Array) -> Tree:
        """The tree of worker `source`, sent to the whole group."""
        mine = self.index == source

        # With a product instead of `where`, 0 * nan would leak other workers' nan.
        def mask(x):
            return jnp.where(mine, x, 0)

        def add_up(x):
            return lax.psum(mask(x), self._names).astype(x.dtype)

        return carried(lambda x: _in_whole_words(add_up, x), tree)

    @by_shards(out=lambda specs, *_: (specs, Spec()))
    def sum(self, tree: Tree, where: Array, *, mean: bool) -> tuple[Tree, Array]:
        """The sum or mean of the trees of the workers for which `where` holds."""
        # The count lies in the buffer of the small leaves, and needs no message.
        summed = (widened(tree), where.astype(jnp.float32))

        def add_up(x):
            return lax.psum(jnp.where(where, x, 0), self._names)

        total, count = carried(add_up, summed, adds=True)
        if mean:
            total = jax.tree.map(lambda s: s / count.astype(s.dtype), total)
        return total, count

    def permute(self, tree: Tree, permutation: Permutation) -> Tree:
        """Each worker's tree sent along a permutation of the group.

        A permutation that depends on the step is an array [size] of sources, -1 for none.
        Such a tree travels twice: its i-th part goes to worker i, and on to where it
        belongs. Both times every worker sends to every other, so one program serves all
        permutations.
        """
        if isinstance(permutation, Array):

            def along(x):
                return self._through_all(x, permutation)

        else:
            size = self.size
            for side, indices in zip(("source", "destination"), zip(*permutation)):
                if len(set(indices)) < len(indices):
                    raise ValueError(f"every {side} may occur once, got {permutation=}")
                if not all(0 <= i < size for i in indices):
                    raise ValueError(
                        f"indices must lie in 0..{size - 1} for a group of {size} "
                        f"workers, got {permutation=}"
                    )
            devices, slots = self._devices_and_slots()

            def along(x):
                return _send_along(x, permutation, devices, MeshChannel(slots))

        return shard_by_shard(lambda tree: carried(along, tree), tree)

    def _through_all(self, x: Array, sources: Array) -> Array:
        if not x.size:
            return x
        cut = Cut.of(x.shape, self.size)
        parts = self.transpose(cut.rows(x))
        has_source = sources.reshape(-1, *(1,) * (parts.ndim - 1)) >= 0
        # Index -1 would be the last row, so workers without a source are masked.
        onward = jnp.where(has_source, parts[sources], 0)
        return cut.array(self.transpose(onward))

    def _devices_and_slots(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The names of the axes across devices, and of the vmapped axes inside a device."""
        across = jax.sharding.get_abstract_mesh().axis_names
        names = self._names
        return (
            tuple(name for name in names if name in across),
            tuple(name for name in names if name not in across),
        )


def _in_whole_words(collective: Callable[[Array], Array], x: Array) -> Array:
    """Applies an element-wise collective to uint16 as pairs in words of 32 bits.

    GPUs add no integers of 16 bits: XLA would send each in 32.
    """
    if x.dtype != jnp.uint16 or may_be_sharded():
        return collective(x)
    half = -(-x.size // 2)
    first, second = jnp.pad(x.ravel(), (0, 2 * half - x.size)).reshape(2, half)
    words = collective(first.astype(jnp.uint32) | second.astype(jnp.uint32) << 16)
    halves = words.astype(jnp.uint16), (words >> 16).astype(jnp.uint16)
    return jnp.concatenate(halves)[: x.size].reshape(x.shape)


# The names of axes


def parts_of(axis: str) -> tuple[str, str, str]:
    """The name of an axis, and its two names if it is split."""
    axis = NAMES.get({}).get(axis, axis)
    return axis, DEVICE.format(axis), SLOT.format(axis)


def unsplit(name: str) -> str:
    """The name of the axis of which a bound name may be a part."""
    return name.removesuffix(DEVICE.format("")).removesuffix(SLOT.format(""))


def is_bound(name: str) -> bool:
    """Whether an axis name is bound in the function that is being traced."""
    try:
        lax.axis_size(name)
    except NameError:
        return False
    return True


def any_bound(axes: Sequence[str]) -> bool:
    """Whether at least one of the axes is bound here, split or not."""
    return any(map(is_bound, itertools.chain(*map(parts_of, axes))))


def _check_is_of_the_workers(axis: str, bound: Sequence[str]) -> None:
    """Raises ValueError if a `jax.vmap` inside a worker has bound the axis again.

    A collective would then meet the rows of that vmap in place of the workers.

    Args:
      axis: the name of the axis.
      bound: those of its names that are bound here.
    """
    by_a_mesh = {*SLOTS.get(()), *jax.sharding.get_abstract_mesh().manual_axes}
    vmaps = [name for name in _vmapped_axes() if name in bound]
    if len(vmaps) + any(name in by_a_mesh for name in bound) > 1:
        raise ValueError(
            f"the axis {axis!r} of the workers is bound again inside a worker, by a "
            f"`jax.vmap(..., axis_name={vmaps[0]!r})`, and an exchange along it would mix "
            "the rows of that vmap: give the vmap another `axis_name`, or none"
        )


def _vmapped_axes() -> list[str]:
    """The names of the axes of all `jax.vmap`s around this place, innermost first."""
    try:  # jax has no public function for them
        from jax._src.core import trace_ctx

        trace = trace_ctx.trace
    except (ImportError, AttributeError):
        return []
    names = []
    while trace is not None:
        axis = getattr(trace, "axis_data", None)
        names.append(getattr(axis, "name", None))
        trace = getattr(trace, "parent_trace", None)
    return [name for name in names if isinstance(name, str)]


def _not_bound(axis: str) -> str:
    """The message about an axis that is not bound here: the axes that are, and the way."""
    try:  # jax has no public function for the names of all bound axes
        from jax._src.core import get_axis_env

        names = [name for name in get_axis_env().axis_names() if isinstance(name, str)]
    except (ImportError, AttributeError):
        names = []
    if names:
        bound = " and ".join(map(repr, names))
        return (
            f"no axis {axis!r} here, where {bound} {'are' if names[1:] else 'is'} bound: "
            f"name the axes of the workers in the method's `axes=`, such as "
            f"axes={names[0]!r}"
        )
    return (
        f"no axis {axis!r} here, because no axis is bound: a `jax.jit` binds none, with or "
        "without shardings; run the function of one worker under `lj.Workers(...).map`, on "
        "a mesh of your own under `lj.Workers(mesh=mesh, axes=...).map`, or in a "
        f"`jax.shard_map`, `jax.vmap` or `jax.pmap` with an axis of the name {axis!r}"
    )


def _send_along(
    x: Array, permutation: Permutation, devices: tuple[str, ...], slots: MeshChannel
) -> Array:
    """`lax.ppermute` over a group of devices with several workers (slots) each."""
    if not slots.axes:
        return lax.ppermute(x, devices, permutation) if devices else x
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for source, target in permutation:
        d, s = divmod(source, slots.size)
        e, t = divmod(target, slots.size)
        lanes.setdefault((s, t), []).append((d, e))
    rows = slots.gather(x)  # every slot of this device
    arrived = jnp.zeros_like(rows)
    for (s, t), pairs in lanes.items():
        row = lax.ppermute(rows[s], devices, pairs) if devices else rows[s]
        # Lanes that bring a slot nothing bring zeros, so their sum is the one message.
        arrived = arrived.at[t].add(row)
    return arrived[slots.index]
