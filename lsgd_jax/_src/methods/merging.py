"""Merges of several pseudo-gradients into one: the weighted mean and the radial one."""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array, lax

from lsgd_jax._src.methods.blocks import leaf_norms, times
from lsgd_jax._src.trees import Tree
from lsgd_jax._src.wire.group import Group


Merge = Literal["mean", "radial"]

CANCELS = 1e-6  # a mean of unit vectors this short is the rounding error of 0


def weighted_mean(group: Group, deltas: Tree, weights: Array, takes_part: Array) -> Tree:
    r"""The weighted mean :math:`\sum_i w_i \Delta_i`.

    Args:
      group: the workers.
      deltas: this worker's Δ.
      weights: float [W, B], equal on all workers, with columns that sum to 1; B is 1 or the
        number of leaves.
      takes_part: bool scalar, whether this worker counts.
    """
    mean, _ = group.masked_sum(times(deltas, weights[group.index]), takes_part)
    return mean


def radial_directional_mean(
    group: Group, deltas: Tree, weights: Array, takes_part: Array
) -> Tree:
    r"""The mean norm along the mean direction, leaf by leaf.

    .. math::
      \Bigl( \sum_i w_i |\Delta_i| \Bigr) \, \text{dir} \Bigl( \sum_i w_i \,
      \text{dir}(\Delta_i) \Bigr), \qquad \text{dir}(v) = v / |v|, \; \text{dir}(0) = 0

    A leaf in which the directions cancel takes the weighted mean. Only then a second round
    of messages is sent, which the bytes of `diagnostics` do not count.

    Args:
      group, deltas, weights, takes_part: as for `weighted_mean`.

    Reference: Decoupled DiLoCo, 2026, arXiv:2604.21428.
    """
    mine = weights[group.index]
    norms = leaf_norms(deltas)
    scaled = times(deltas, mine)
    inverse = jnp.where(norms > 0, 1 / jnp.where(norms > 0, norms, 1), 0)
    given = times(scaled, inverse), mine * norms
    (sums, radius), _ = group.masked_sum(given, takes_part)
    lengths = leaf_norms(sums)
    cancels = (lengths <= CANCELS) & (radius > 0)
    factors = jnp.where(cancels, 0, radius / jnp.where(lengths > 0, lengths, 1))
    merged = times(sums, factors)

    def mean_where_they_cancel(operand: tuple[Tree, Tree, Array]) -> Tree:
        merged, scaled, where = operand
        means, _ = group.channel.sum(scaled, where, mean=False)
        leaves, treedef = jax.tree.flatten(merged)
        chosen = map(jnp.where, cancels, jax.tree.leaves(means), leaves)
        return treedef.unflatten(chosen)

    return lax.switch(
        cancels.any().astype(jnp.int32),
        [lambda operand: operand[0], mean_where_they_cancel],
        (merged, scaled, takes_part),
    )


MERGES = {"mean": weighted_mean, "radial": radial_directional_mean}
