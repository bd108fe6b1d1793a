"""Replicas under a `jax.vmap` along a mesh axis exchange as workers of `Workers` do.

MaxText and others map a step over replicas with ``jax.vmap(step, axis_name=...,
spmd_axis_name=...)``. Collectives over a vmapped axis are reshapes, of which XLA finds
messages, and shards inside a replica stay unknown. Here the replicas' mesh axis becomes
manual, as in `Workers.map`, so that the messages are those of `Workers`.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as Spec

from lsgd_jax._src import layouts
from lsgd_jax._src.layouts import Layouts, Specs
from lsgd_jax._src.shared import NAMES, during
from lsgd_jax._src.trees import Tree
from lsgd_jax._src.wire.collectives import is_bound


class Rows(NamedTuple):
    """Where the rows of a `jax.vmap` over replicas lie.

    Attributes:
      vmapped: the name of the vmapped axis.
      along: the mesh axis along which the rows lie, one on each of its devices.
      mesh: the mesh.
    """

    vmapped: str
    along: str
    mesh: Any

    @classmethod
    def of(cls, axes: Sequence[str], specs: Specs) -> "Rows | None":
        """The rows of the workers along some axes, or None if they do not lie in this way.

        Args:
          axes: the names of the axes of the workers.
          specs: as for `outer`; they may have a mesh.

        Raises:
          ValueError: specs without a mesh, under a `jax.vmap` along mesh axes.
        """
        mesh = _mesh(specs)
        names = _vmapped_mesh_axes()
        if names and mesh.empty:
            raise ValueError(
                "`specs` need the mesh: call the function of all workers in a "
                "`jax.set_mesh(mesh)`, or pass `NamedSharding`s as specs"
            )
        along = [name for name in names if name in mesh.shape]
        bound = [name for name in set(axes) if is_bound(name) and lax.axis_size(name) > 1]
        if len(along) != 1 or len(bound) != 1:
            return None
        (along,) = along
        (vmapped,) = bound
        # With several workers to a device, a device would hold more than one row.
        fits = lax.axis_size(vmapped) == mesh.shape[along]
        return cls(vmapped, along, mesh) if fits else None

    def layouts(self, specs: Specs, params: Tree) -> Layouts:
        """The layouts of one worker's parameters inside it."""
        inside = {name: n for name, n in self.mesh.shape.items() if name != self.along}
        return Layouts((params,), layouts.spread(specs, params, inside, (self.along,)))

    def run(self, fn: Callable[..., Tree], args: tuple, known: Layouts) -> Tree:
        """Returns fn(*args), computed where the mesh axis of the workers is manual.

        Args:
          fn: from trees of one worker to a tree, without traced values in its closure.
          args: trees.
          known: the layouts of the trees inside a worker.
        """
        leaves, structure = jax.tree.flatten(args)
        # `jax.vmap` calls the rule below with all rows at once, and so gives the batch to a
        # `shard_map`.
        one = custom_vmap(lambda *leaves: fn(*structure.unflatten(leaves)))

        @one.def_vmap
        def _(size: int, batched: Sequence[bool], *leaves: Any) -> tuple[Tree, Tree]:
            if size == 1:  # a `jax.vmap` of one row, inside that over the workers
                outputs = jax.tree.map(_as_row, one(*map(_first, leaves, batched)))
            elif size != self.mesh.shape[self.along]:
                # Rows of something else, such as a sweep: they stay rows.
                outputs = jax.vmap(one.fun, [0 if b else None for b in batched])(*leaves)
            else:
                outputs = self._on_devices(one.fun, batched, known)(*leaves)
            return outputs, jax.tree.map(lambda _: True, outputs)

        return one(*leaves)

    def _on_devices(
        self, fn: Callable[..., Tree], batched: Sequence[bool], known: Layouts
    ) -> Callable[..., Tree]:
        """fn of one worker's leaves as a function of those of all workers."""
        rows = Spec(self.along)

        def on_device(*leaves: Any) -> Tree:
            with layouts.known(known), during(NAMES, {self.vmapped: self.along}):
                outputs = known.laid_out(fn(*map(_first, leaves, batched)))
            return jax.tree.map(_as_row, outputs)

        @custom_vmap
        def on_devices(*leaves: Any) -> Tree:
            from jax._src.core import remove_explicit_mesh_axis_names

            # Gives an explicit axis back to the mesh, from which `jax.vmap` has taken it.
            with remove_explicit_mesh_axis_names((self.along,)):
                return jax.shard_map(
                    on_device,
                    mesh=self.mesh,
                    in_specs=tuple(rows if b else Spec() for b in batched),
                    out_specs=rows,
                    axis_names={self.along},
                    check_vma=False,
                )(*leaves)

        @on_devices.def_vmap
        def _(size: int, *_: Any) -> Any:
            raise ValueError(
                "an `outer` that knows the layout of its parameters must not stand in a "
                f"second `jax.vmap` over as many rows as there are workers, {size}"
            )

        return on_devices


def _first(x: Any, has_rows: bool) -> Any:
    """The only row, by a reshape, which leaves an array in the memory of its host."""
    return x.reshape(x.shape[1:]) if has_rows else x


def _as_row(x: Any) -> Any:
    return x.reshape(1, *x.shape)


def _mesh(specs: Specs) -> Any:
    """The mesh of the context, or of the specs."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        return mesh

    def is_sharding(x: Any) -> bool:
        return isinstance(x, NamedSharding)

    each = jax.tree.leaves(specs, is_leaf=is_sharding)
    return next((x.mesh for x in each if is_sharding(x)), mesh)


def _vmapped_mesh_axes() -> frozenset[str]:
    """The mesh axes along which vmapped axes lie; jax has no public function for them."""
    try:
        from jax._src.core import get_axis_env

        env = get_axis_env()
        return env.spmd_axis_names | env.explicit_mesh_axis_names
    except (ImportError, AttributeError):
        return frozenset()
