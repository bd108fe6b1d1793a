"""Shapes and shardings of a training state over all workers, without any array."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import PartitionSpec as Spec

from lsgd_jax._src.layouts import following, spread
from lsgd_jax._src.shared import one_worker, shared_flags
from lsgd_jax._src.workers.workers import Workers


Tree = Any


def carry_of(workers: Workers, init: Callable[[], tuple], specs: Any) -> tuple:
    """The shapes of the state of all workers, which `init` returns for one worker.

    Args:
      init: without arguments; returns (parameters, ...).
      specs: how the parameters are sharded inside a worker, as for `Workers.put`. The rest
        of the state follows.
    """
    mapped: Any = workers.map(lambda: tuple(init()))
    carry = mapped.lower().out_info
    if specs is None or not workers.inside:
        return placed(workers, carry, None)
    params = placed(workers, carry[0], specs)
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
    each = spread(specs, one_worker(tree), workers.inside, grid.axes)
    return structure.unflatten(map(shape, leaves, shared_flags(tree), each))
