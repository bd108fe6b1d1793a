"""The layout of an island: a worker that is sharded over several devices of its process.

XLA chooses the layout of every result that nothing determines. The drivers therefore keep
the layout of a worker's initial parameters: in their compiled functions by constraints, and
in everything that arrives by placing it shard by shard.
"""

import contextlib
import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

from lsgd_jax._src.checks import check_all_auto
from lsgd_jax._src.layouts import Layouts
from lsgd_jax._src.trees import Tree


class Sharding:
    """The layout of one worker's parameters, and of all trees that are like them.

    A leaf lies as the parameter of the same shape whose path ends most alike, such as the
    anchor of ``params['dense']['kernel']``. Other leaves are replicated.

    Args:
      mesh: the devices of the island.
      params: the parameters, of which only paths and shapes are used.
      specs: the spec of each parameter.
    """

    def __init__(self, mesh: Mesh, params: Tree, specs: Iterable[Spec]):
        self.mesh = mesh
        self._layouts = Layouts((params,), specs)

    def of(self, tree: Tree) -> Tree:
        """Returns the sharding of every leaf."""
        specs = self._layouts.specs(tree)
        return jax.tree.map(lambda x, spec: NamedSharding(self.mesh, spec), tree, specs)

    def put(self, tree: Tree) -> Tree:
        """Returns a tree of arrays on the devices; each receives only its shards."""
        return jax.device_put(tree, self.of(tree))


def constrained(tree: Tree, sharding: Sharding | None) -> Tree:
    """Returns the tree in a layout, or as it is on one device; for compiled functions."""
    return (
        tree if sharding is None else lax.with_sharding_constraint(tree, sharding.of(tree))
    )


def placed(tree: Tree, sharding: Sharding | None) -> Tree:
    """Returns the tree as compiled functions take it: in an island as placed shards."""
    return tree if sharding is None else sharding.put(tree)


def on_cpu(sharding: Sharding | None) -> contextlib.AbstractContextManager:
    """Computes on the CPU in the `with` block in an island, of which no device has room."""
    if sharding is None:
        return contextlib.nullcontext()
    cpu = None
    with contextlib.suppress(RuntimeError):  # JAX_PLATFORMS may leave it out
        cpu = jax.local_devices(backend="cpu")[0]
    return jax.default_device(cpu)


def placed_like(tree: Tree, other: Tree) -> Tree:
    """Returns the other tree, on the devices of `tree` where these are several."""

    def as_like(like: Any, x: Any) -> Any:
        is_spread = isinstance(like, Array) and len(like.sharding.device_set) > 1
        if not is_spread or getattr(x, "sharding", None) == like.sharding:
            return x
        return jax.device_put(x, like.sharding)

    return jax.tree.map(as_like, tree, other)


def sharding_of(params: Tree) -> Sharding | None:
    """Returns the layout of a worker's parameters; None if they are on one device.

    Equal layouts are one object, so that all workers of a process share what is compiled.

    Raises:
      ValueError: parameters on several meshes, in a sharding that is no `NamedSharding`, or
        on a mesh that `check_mesh` refuses.
    """
    leaves, treedef = jax.tree.flatten(params)
    arrays = [x for x in leaves if isinstance(x, Array)]
    spread_out = [x for x in arrays if len(x.sharding.device_set) > 1]
    if not spread_out:
        return None
    meshes = {getattr(x.sharding, "mesh", None) for x in spread_out}
    mesh = meshes.pop()
    if meshes or not isinstance(mesh, Mesh):
        raise ValueError(
            "all parameters of a worker must have a NamedSharding on one mesh, got "
            f"{', '.join(sorted({str(x.sharding) for x in spread_out}))}"
        )
    check_mesh(mesh)

    def is_on(x):
        return isinstance(x, Array) and getattr(x.sharding, "mesh", None) == mesh

    specs = tuple(x.sharding.spec if is_on(x) else Spec() for x in leaves)
    return _sharding(mesh, treedef, tuple(tuple(jnp.shape(x)) for x in leaves), specs)


def check_mesh(mesh: Mesh) -> None:
    """Raises ValueError for a mesh of explicit axes, or with devices of other processes."""
    check_all_auto(mesh)
    if any(d.process_index != jax.process_index() for d in mesh.devices.flat):
        raise ValueError(
            "the mesh of an asynchronous worker must have devices of its own process only, "
            f"got {mesh!r}"
        )


@functools.lru_cache(maxsize=32)
def _sharding(mesh: Mesh, treedef: Any, shapes: tuple, specs: tuple) -> Sharding:
    like = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    return Sharding(mesh, treedef.unflatten(like), specs)
