"""SPARTA: a few random entries of the parameters are averaged at every step."""

import itertools
from typing import Unpack

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as Spec

from lsgd_jax._src import trees
from lsgd_jax._src.by_value import by_value
from lsgd_jax._src.checks import check_fraction
from lsgd_jax._src.exchange.exchange import Exchange, exchange
from lsgd_jax._src.exchange.kernel import Pull
from lsgd_jax._src.exchange.options import PullOptions, takes_options
from lsgd_jax._src.exchange.rule import Rule
from lsgd_jax._src.layouts import shard_by_shard
from lsgd_jax._src.shared import Axes
from lsgd_jax._src.trees import Tree, widened
from lsgd_jax._src.wire.codec import draws
from lsgd_jax._src.wire.group import Group


@by_value
@takes_options(wire="the values that are chosen travel in float32")
def sparta(
    density: float = 0.005,
    seed: int = 0,
    axes: Axes = ("node", "local"),
    **options: Unpack[PullOptions],
) -> Exchange:
    r"""SPARTA: the mean of a random fraction of the entries, at every step.

    .. math::
      y_i[k] \leftarrow \frac{1}{|H|} \sum_{j \in H} y_j[k] \quad \text{for } k \in M_t

    with y = x + u the worker's parameters after its own step t, H the workers whose y and
    loss are finite, and :math:`M_t` the entries drawn at step t: one from every cell of
    c = round(1 / p) neighboring entries of a leaf, p the `density`. Each entry is drawn
    with probability 1 / c, and the number of bytes is the same at all steps. The draws
    depend on the seed and the step alone, so that all workers draw the same entries and
    only their values travel: 4 p P bytes per step and worker for P parameters.

    A worker whose y or loss is not finite goes back to its x, and takes the mean of the
    entries drawn. There is no whole target to restore a worker whose x is not finite, too:
    it waits (`lsgd_jax.waiting`).

    Args:
      density: fraction of the entries that are averaged at a step, p in (0, 1]; 1 / p is
        rounded to a whole number.
      seed: seed of the draws.
      axes: the mesh axes of the group.
      **options: see `PullOptions`.

    Returns:
      An optax transformation for one worker, the last in its chain. Its values travel in
      float32 at least.

    Raises:
      ValueError: a density outside (0, 1]; in `update`, a leaf of 2³¹ entries or more on a
        device.

    Reference: the SPARTA strategy of EXO Gym, whose released code draws every entry by
    itself.

    >>> import optax, lsgd_jax as lj
    >>> tx = optax.chain(optax.adamw(1e-3), lj.contrib.sparta(density=0.005))
    """
    check_fraction("density", density)
    if density == 0:
        raise ValueError("`density` must be above 0, got density=0")
    cell = round(1 / density)

    def agree(group, x, y, state, takes_part, t):
        own = trees.where(takes_part, y, x)
        z, count = _averaged(group, own, takes_part, cell, seed, t)
        found = (count > 0) & (takes_part | trees.all_finite(x))
        return z, found, state

    return exchange(Pull(Rule(axes, lambda params: (), agree), 1.0), **options)


def _averaged(
    group: Group, tree: Tree, where: Array, cell: int, seed: int, t: Array
) -> tuple[Tree, Array]:
    """The tree with means at one random entry of every cell, and how many took part.

    A worker of several devices draws the same entries in each shard of a leaf, and in each
    copy of one that is not sharded.
    """

    def average(tree: Tree, where: Array, t: Array) -> tuple[Tree, Array]:
        leaves, treedef = jax.tree.flatten(tree)
        for leaf in leaves:
            if leaf.size >= 2**31:
                raise ValueError(
                    "a leaf must have fewer than 2^31 entries on each device for `sparta`, "
                    f"got shape {leaf.shape}: shard it, or exclude it with `part=`"
                )
        # One entry of every cell of each leaf.
        counts = [-(-leaf.size // cell) for leaf in leaves]
        offsets = jax.random.randint(draws(seed, t), [sum(counts)], 0, cell, jnp.int32)
        ends = itertools.accumulate(counts)

        def first(count):
            return cell * jnp.arange(count, dtype=jnp.int32)

        drawn = [first(n) + offsets[end - n : end] for n, end in zip(counts, ends)]
        flat = [widened(leaf).ravel() for leaf in leaves]
        # The last cell of a leaf may reach beyond its end, where there is nothing to draw.
        mine = [x.at[k].get(mode="fill", fill_value=0) for x, k in zip(flat, drawn)]
        means, count = group.masked_mean(mine, where)
        flat = [x.at[k].set(m, mode="drop") for x, k, m in zip(flat, drawn, means)]
        shaped = [x.reshape(leaf.shape) for x, leaf in zip(flat, leaves)]
        return jax.tree.unflatten(treedef, shaped), count

    return shard_by_shard(average, tree, where, t, out=lambda specs, *_: (specs, Spec()))
