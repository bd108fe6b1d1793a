"""Gossip with doubly stochastic weights: D-PSGD, and AD-PSGD in lock-step."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from lsgd_jax import collectives
from lsgd_jax._types import Shared, Tree
from lsgd_jax.collectives import Axes, widened
from lsgd_jax.pull import Order, Target, nbytes, observe_step, pull, quarantine
from lsgd_jax.topology import (
    Graph,
    Topology,
    bipartite_exponential,
    check_balanced,
    check_paired,
    for_group,
    ring,
)


class GossipState(NamedTuple):
    """The state of `neighbors`.

    Attributes:
      step: int32 scalar, steps so far; shared.
    """

    step: Shared[Array]


def neighbors(topology: Graph, axes: Axes = ("node", "local")) -> Target:
    r"""The weighted mean of a worker and its neighbors in a graph, as a target of `pull`.

    .. math::
      z_i = \sum_j P_{ij} y_j

    with P the mixing matrix of the step's round of the graph. A neighbor whose y or loss
    is not finite is left out, and its share stays with the receiver.

    Args:
      topology: the graph, or the function that builds it for W workers; every worker
        sends to as many as it receives from.
      axes: the mesh axes of the group, whose W workers the graph joins.

    Raises:
      ValueError: a graph that is not balanced; in `update`, one of another size.

    >>> from lsgd_jax.topology import ring
    >>> neighbors(ring(4), axes="local").axes
    'local'
    """
    graph = for_group(topology, check_balanced)

    def aim(y, state, healthy):
        here = graph(collectives.size(axes))
        sums, mass = send(y, 1.0, healthy, here, state.step.value, axes)
        own = jnp.where(healthy, 1 - mass, 0)
        return blend(y, own, sums, mass), healthy | (mass > 0), state

    init = lambda params: GossipState(Shared(jnp.int32(0)))
    payload = lambda params: message_nbytes(params, graph(collectives.size(axes)))
    return Target(axes, init, observe_step, aim, payload)


def send(
    y: Tree,
    weight: Array | float,
    healthy: Array,
    topology: Topology,
    step: Array,
    axes: Axes,
) -> tuple[Tree, Array]:
    """What arrives if everybody sends y with its share of a weight: (Σ m_j y_j, Σ m_j).

    m_j = p_j · weight_j with p_j as in `Topology.mixing`, and 0 for who is not healthy.
    """
    r = topology.round_at(step)
    given = jnp.where(healthy, share(topology, r, axes) * weight, 0)
    message = jax.tree.map(lambda y: jnp.where(healthy, y, 0), y)
    return collectives.push(message, given, topology.rounds, r, axes)


def share(topology: Topology, r: Array, axes: Axes) -> Array:
    """p = 1 / (out-degree + 1) of this worker in round r: float32 scalar."""
    table = jnp.asarray(1 / (topology.out_degrees + 1), jnp.float32)
    return table[r, collectives.index(axes)]


def blend(y: Tree, own: Array, sums: Tree, mass: Array) -> Tree:
    """(own · y + sums) / (own + mass), in float32 at least; y does not count if own = 0."""
    mine = jax.tree.map(lambda y: own * jnp.where(own > 0, widened(y), 0), y)
    return jax.tree.map(lambda a, b: (a + b) / (own + mass), mine, sums)


def message_nbytes(params: Tree, topology: Topology) -> int:
    """Bytes each worker sends per step: the parameters and a weight, to every peer.

    The mean over the rounds of the last phase, where they differ.
    """
    rounds = topology.rounds[-topology.phases[-1][1] :]
    messages = sum(map(len, rounds)) / len(rounds)
    return round(messages * (nbytes(params) + 4))


def dpsgd(
    topology: Graph = ring,
    order: Order = "combine_then_adapt",
    axes: Axes = ("node", "local"),
) -> optax.GradientTransformationExtraArgs:
    r"""Decentralized parallel SGD: every worker mixes with its neighbors in a graph.

    .. math::
      x_i \leftarrow \sum_j P_{ij} x_j + u_i

    with x the parameters before the step, u the update and P the doubly stochastic mixing
    matrix of the step's round; on a ring 1/3 for a worker and each of its neighbors. A
    neighbor whose x + u or loss is not finite is left out, its share staying with the
    receiver; it takes the mean of its own neighbors whole.

    Args:
      topology: the graph, with equal degrees: `ring(W)`, `exponential(W)`, …; or, without
        its W, the function that builds it.
      order: 'adapt_then_combine' mixes x + u instead of x.
      axes: the mesh axes of the group.

    Returns:
      An optax transformation for one worker, the last in its chain.

    Raises:
      ValueError: a graph whose mixing matrices are not doubly stochastic, an unknown
        order; in `update`, a graph that is not one of the group's W workers.

    Reference: Lian et al., Can Decentralized Algorithms Outperform Centralized
    Algorithms?, NeurIPS 2017, arXiv:1705.09056.

    >>> import optax, lsgd_jax as lj
    >>> tx = optax.chain(optax.sgd(0.1), lj.dpsgd(lj.topology.ring(8)))
    """
    return quarantine(pull(neighbors(topology, axes), 1.0, order=order))


def adpsgd(
    topology: Graph = bipartite_exponential,
    order: Order = "combine_then_adapt",
    axes: Axes = ("node", "local"),
) -> optax.GradientTransformationExtraArgs:
    r"""AD-PSGD in lock-step: the workers meet in pairs and both take the average.

    .. math::
      x_i \leftarrow \tfrac{1}{2} (x_i + x_j) + u_i

    with j the worker that i meets in the step's round of the graph, x the parameters
    before the step and u the update, whose gradient was taken before the exchange. Who
    meets nobody keeps x + u. Workers that are not finite are treated as in `dpsgd`.

    Args:
      topology: the graph, in rounds of pairs, or the function that builds it.
      order: 'adapt_then_combine' averages x + u instead of x.
      axes: the mesh axes of the group.

    Returns:
      An optax transformation for one worker, the last in its chain.

    Raises:
      ValueError: a graph in which some worker meets two others in a round or is not met
        by whom it meets, an unknown order; in `update`, a graph of another size.

    Reference: Lian, Zhang, Zhang, Liu, Asynchronous Decentralized Parallel Stochastic
    Gradient Descent, ICML 2018, arXiv:1710.06952.

    >>> import optax, lsgd_jax as lj
    >>> tx = optax.chain(optax.sgd(0.1), lj.adpsgd(lj.topology.bipartite_exponential(8)))
    """
    return quarantine(
        pull(neighbors(for_group(topology, check_paired), axes), 1.0, order=order)
    )
