"""Shapes and shardings of a training state over all workers, without any array."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

from lsgd_jax._src.layouts import following, spread
from lsgd_jax._src.shared import one_worker, shared_flags
from lsgd_jax._src.workers.workers import Workers


Tree = Any


def shapes_of(
    init: Callable[..., Tree],
    *args: Any,
    mesh: Mesh,
    specs: Any = None,
    across: str | tuple[str, ...] = (),
) -> Tree:
    """The shapes and shardings of a state of your own, for `report_of`.

    No array is made. The state is any tree, such as a `TrainState` or one of Flax's nnx.

    Args:
      init: returns the state.
      *args: shapes of its arguments, as for `jax.eval_shape`.
      mesh: that of a described cluster, `Pod.mesh`.
      specs: how the state is sharded: a `PartitionSpec`, a tree of them that is a prefix of
        the state, or a function of a leaf's path and shape such as
        `lj.layouts.largest_dimension` and `lj.layouts.following`. Defaults to no sharding.
      across: the axes of the mesh over which the replicas lie that a `jax.vmap` in `init`
        has stacked. Specs are those of one replica, without the stacked dimension.

    Raises:
      ValueError: specs that are no prefix of the state, or that do not divide a leaf.

    >>> import jax, jax.numpy as jnp, lsgd_jax as lj
    >>> from jax.sharding import PartitionSpec as P
    >>> from lsgd_jax import aot
    >>> mesh = lj.Workers(nodes=2, inside={"fsdp": 4}).mesh
    >>> init = jax.vmap(lambda key: {"w": jnp.zeros((8, 8))})
    >>> keys = jax.ShapeDtypeStruct((2,), jax.random.key(0).dtype)
    >>> state = aot.shapes_of(init, keys, mesh=mesh, specs=P("fsdp"), across="node")
    >>> state["w"].shape, state["w"].sharding.spec == P("node", "fsdp")
    ((2, 8, 8), True)
    """
    leaves, structure = jax.tree.flatten(jax.eval_shape(init, *args))
    names = (across,) if isinstance(across, str) else tuple(across)
    stacked = 1 if names else 0
    inside = {name: size for name, size in mesh.shape.items() if name not in names}
    tree = structure.unflatten(leaves)
    one = [jax.ShapeDtypeStruct(x.shape[stacked:], x.dtype) for x in leaves]
    each = spread(specs, tree, inside, names, one)
    first = (across,) if names else ()

    def laid_out(x: Any, spec: Spec) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, Spec(*first, *spec))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return structure.unflatten(map(laid_out, leaves, each))


def carry_of(workers: Workers, init: Callable[[], Any], specs: Any) -> tuple:
    """The shapes of the state of all workers, which `init` returns for one worker.

    Args:
      init: without arguments; returns (parameters, ...), or one state that is no tuple.
      specs: how the parameters are sharded inside a worker, as for `Workers.put`. The rest
        of the state follows. In a state with an attribute `params` these are the
        parameters; a function is asked about all leaves of any other state.
    """

    def parts() -> tuple:
        state = init()
        return tuple(state) if isinstance(state, tuple) else (state,)

    mapped: Any = workers.map(parts)
    carry = mapped.lower().out_info
    if specs is None or not workers.inside:
        return placed(workers, carry, None)
    first = carry[0]
    if hasattr(first, "params"):
        params = {"params": placed(workers, first.params, specs)}
        return placed(workers, carry, following(params))
    params = placed(workers, first, specs)
    return (params, *placed(workers, carry[1:], following(params)))


def batch_of(workers: Workers, batch: Tree, specs: Any) -> Tree:
    """The shapes of the batches of all workers, from that of one worker."""

    def stacked(x: Any, is_shared: bool) -> jax.ShapeDtypeStruct:
        leading = () if is_shared else (workers.num_workers,)
        return jax.ShapeDtypeStruct((*leading, *x.shape), x.dtype)

    leaves, structure = jax.tree.flatten(batch)
    whole = structure.unflatten(map(stacked, leaves, shared_flags(batch)))
    return placed(workers, whole, specs if workers.inside else None)


def placed(workers: Workers, tree: Tree, specs: Any) -> Tree:
    """Shapes [W, ...] with the sharding that `Workers.put` gives arrays."""
    grid = workers._grid

    def shape(x: Any, is_shared: bool, spec: Spec) -> jax.ShapeDtypeStruct:
        sharding = grid.sharding(spec, is_shared)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    leaves, structure = jax.tree.flatten(tree)
    each = spread(specs, tree, workers.inside, grid.axes, one_worker(tree))
    return structure.unflatten(map(shape, leaves, shared_flags(tree), each))
