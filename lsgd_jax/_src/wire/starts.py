"""The common start of a group's workers, which is sent only if their own starts differ."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.custom_batching import custom_vmap

from lsgd_jax._src import trees
from lsgd_jax._src.shared import REPAIR, typed_alike
from lsgd_jax._src.trees import Tree
from lsgd_jax._src.wire.fingerprints import fingerprint


def common_start(group: Any, params: Tree) -> Tree:
    """A tree that is equal in the group before the first exchange, in float32 or wider.

    It is the parameters themselves if all workers start from the same ones, which their
    fingerprints tell. Otherwise it is the mean of the finite starts, and only then do the
    parameters travel. Elements that are not finite are 0.
    """
    start = lax.stop_gradient(trees.widened(params))
    if group.is_bound and group.size > 1:
        prints = group.gather(fingerprint(start))
        differ = (prints != prints[:1]).any()

        def mean(_: Any, start: Tree) -> Tree:
            found, _ = group.masked_mean(start, trees.all_finite(start))
            return trees.where(differ, found, start)

        # Under a `jax.vmap` a branch would become a `select` and always communicate.
        times = of_any_row(differ).astype(jnp.int32)
        start = jax.tree.map(lambda x: typed_alike(x, differ), start)
        with jax.named_scope(REPAIR):
            start = lax.fori_loop(0, times, mean, start)
        start = group.channel.known_equal(start)
    return jax.tree.map(trees.finite_part, start)


@custom_vmap
def of_any_row(condition: Array) -> Array:
    """Returns the condition; under `jax.vmap`, whether it holds in any row.

    All rows then repair together: they meet in the same messages.
    """
    return condition


@of_any_row.def_vmap
def _(size: int, batched: list[bool], condition: Array) -> tuple[Array, bool]:
    del size
    return (of_any_row(condition.any(0)) if batched[0] else condition), False
