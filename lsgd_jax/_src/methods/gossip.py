"""Gossip with doubly stochastic weights: D-PSGD, and AD-PSGD in lock-step."""

import functools
from collections.abc import Callable
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jax import Array

from lsgd_jax._src import trees
from lsgd_jax._src.by_value import by_value
from lsgd_jax._src.exchange.exchange import Exchange, exchange
from lsgd_jax._src.exchange.kernel import Pull
from lsgd_jax._src.exchange.options import PullOptions, takes_options
from lsgd_jax._src.exchange.rule import Order, Rule, in_order
from lsgd_jax._src.shared import Axes
from lsgd_jax._src.topology import (
    Graph,
    Topology,
    bipartite_exponential,
    check_balanced,
    check_paired,
    for_group,
    ring,
)
from lsgd_jax._src.trees import Tree, widened
from lsgd_jax._src.wire.group import Group, phase_rounds


@by_value
def neighbors(topology: Graph, axes: Axes = ("node", "local")) -> Rule:
    r"""The weighted mean of a worker and its neighbors in a graph, as a rule of a pull.

    .. math::
      z_i = \sum_j P_{ij} y_j

    with P the mixing matrix of this exchange's round of the graph. A neighbor whose y or
    loss is not finite is left out, and its share stays with the receiver. With a narrow
    wire format z_i = y_i + Σ_j P_ij (Q(y_j) - Q(y_i)), which conserves the sum over all
    workers.

    Args:
      topology: the graph, or a function of W that builds it; its mixing matrices must be
        doubly stochastic. With equal weights, every worker must send to as many workers as
        it receives from.
      axes: the mesh axes of the group, whose W workers the graph joins.

    Raises:
      ValueError: a graph that is not balanced; in `update`, one of another size.

    >>> import lsgd_jax as lj
    >>> from lsgd_jax._src.topology import ring
    >>> lj.rules.neighbors(ring(4), axes="local").axes
    'local'
    """
    graph = for_group(topology, check_balanced)

    def agree(group, x, y, state, takes_part, t):
        one = jnp.ones([], weight_dtype(y))
        sums, mass, error = send(group, y, one, takes_part, graph(group.size))
        own = jnp.where(takes_part, 1 - mass, 0)
        return blend(y, own, sums, mass, error, mass), takes_part | (mass > 0), state

    rounds = phase_rounds_on(graph)
    return Rule(axes, lambda params: (), agree, keeps=(), reads_x=False, rounds=rounds)


def weight_dtype(params: Tree) -> Any:
    """Returns a dtype for weights that is as exact as the parameters they weigh."""
    dtypes = [x.dtype for x in jax.tree.leaves(params)]
    return trees.widest("float32", *dtypes)


def send(
    group: Group, y: Tree, weight: Array, takes_part: Array, topology: Topology
) -> tuple[Tree, Array, Tree | None]:
    """Sends y with a share of the weight along the edges of this exchange's round.

    Returns:
      (sums, mass, error): Σ m_j y_j and Σ m_j over this worker's in-neighbors j, and the
      quantization error of its own y, or None. m_j = P_ij · weight_j with P as in
      `Topology.mixing`, and 0 for a worker that is not finite.
    """
    r = group.round_of(len(topology.rounds))
    shares = jnp.asarray(topology.given, weight.dtype)[r, group.index]
    given = jnp.where(takes_part, shares * weight, 0)
    message = jax.tree.map(lambda y: jnp.where(takes_part, y, 0), y)
    sums, mass = group.push(message, given, topology.rounds, r)
    return sums, mass, group.quantization_error(message)


def share(group: Group, topology: Topology, dtype: Any) -> Array:
    """P_jj, the share that this worker keeps in this exchange's round: a scalar."""
    r = group.round_of(len(topology.rounds))
    return jnp.asarray(topology.kept, dtype)[r, group.index]


def taken_share(group: Group, topology: Topology, dtype: Any) -> Array:
    """Σ_{j≠i} P_ij, the shares of others that worker i takes in this round: a scalar."""
    r = group.round_of(len(topology.rounds))
    return jnp.asarray(topology.taken, dtype)[r, group.index]


def phase_rounds_on(graph: Callable[[int], Topology]) -> Callable[[int], tuple[int, ...]]:
    """The rounds of a graph that a phase may name, by W; equal in edges and weights."""

    @functools.cache  # a host loop asks at every step
    def rounds(size: int) -> tuple[int, ...]:
        here = graph(size)
        return phase_rounds(list(zip(here.rounds, here.weights)), size)

    return rounds


def blend(
    y: Tree, own: Array, sums: Tree, mass: Array, error: Tree | None, given: Array
) -> Tree:
    """(own · y + sums + given · error) / (own + mass), in float32 at least.

    y is ignored if own = 0. A sender keeps the quantization error of the weight that it
    gave away, so that the sum over all workers is conserved.
    """

    def leaf(y: Array, sent: Array, *error: Array) -> Array:
        # Weights may have a wider dtype than y. A worker of weight 0 may hold nan.
        mine = own.astype(sent.dtype) * jnp.where(own > 0, widened(y), 0)
        for rest in error:
            mine += given.astype(sent.dtype) * jnp.where(own > 0, rest, 0)
        return (mine + sent) / (own + mass).astype(sent.dtype)

    return jax.tree.map(leaf, y, sums, *(() if error is None else (error,)))


@by_value
@takes_options()
def dpsgd(
    topology: Graph = ring,
    order: Order = "combine_then_adapt",
    axes: Axes = ("node", "local"),
    **options: Unpack[PullOptions],
) -> Exchange:
    r"""Decentralized parallel SGD: every worker mixes with its neighbors in a graph.

    .. math::
      x_i \leftarrow \sum_j P_{ij} x_j + u_i

    with x the parameters before the step, u the update and P the doubly stochastic mixing
    matrix of the exchange's round; on a ring 1/3 for a worker and each of its neighbors. A
    neighbor whose x + u or loss is not finite is left out, and its share stays with the
    receiver. Such a worker takes the mean of its own neighbors whole.

    Args:
      topology: a graph whose mixing matrices are doubly stochastic, such as `ring` or
        `metropolis(edges)`, or a function of W that builds it.
      order: 'adapt_then_combine' mixes x + u instead of x.
      axes: the mesh axes of the group.
      **options: see `PullOptions`.

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
    rule = in_order(neighbors(topology, axes), order)
    return exchange(Pull(rule, 1.0), **options)


@by_value
@takes_options()
def adpsgd(
    topology: Graph = bipartite_exponential,
    order: Order = "combine_then_adapt",
    axes: Axes = ("node", "local"),
    **options: Unpack[PullOptions],
) -> Exchange:
    r"""AD-PSGD in lock-step: the workers meet in pairs and both take the average.

    .. math::
      x_i \leftarrow \tfrac{1}{2} (x_i + x_j) + u_i

    with j the worker that i meets in the exchange's round of the graph, x the parameters
    before the step and u the update, whose gradient was taken before the exchange. A
    worker that meets no other keeps x + u. Workers that are not finite are treated as in
    `dpsgd`.

    Args:
      topology: a graph of pairs in each round, or a function of W that builds it.
      order: 'adapt_then_combine' averages x + u instead of x.
      axes: the mesh axes of the group.
      **options: see `PullOptions`.

    Returns:
      An optax transformation for one worker, the last in its chain.

    Raises:
      ValueError: a graph in which a worker meets two others in a round, or sends to a
        worker that does not send back, an unknown order; in `update`, a graph of another
        size.

    Reference: Lian, Zhang, Zhang, Liu, Asynchronous Decentralized Parallel Stochastic
    Gradient Descent, ICML 2018, arXiv:1710.06952.

    >>> import optax, lsgd_jax as lj
    >>> tx = optax.chain(optax.sgd(0.1), lj.adpsgd(lj.topology.bipartite_exponential(8)))
    """
    rule = in_order(neighbors(for_group(topology, check_paired), axes), order)
    return exchange(Pull(rule, 1.0), **options)
