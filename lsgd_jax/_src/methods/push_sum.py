"""Push-sum: gossip on any directed graph, with weights that remove its bias."""

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
from jax import Array

from lsgd_jax._src import trees
from lsgd_jax._src.by_value import by_value
from lsgd_jax._src.checks import check_positive_int
from lsgd_jax._src.exchange.exchange import Exchange, exchange
from lsgd_jax._src.exchange.kernel import Pull
from lsgd_jax._src.exchange.options import PullOptions, takes_options
from lsgd_jax._src.exchange.rule import Rule
from lsgd_jax._src.methods.gossip import (
    blend,
    phase_rounds_on,
    send,
    share,
    taken_share,
    weight_dtype,
)
from lsgd_jax._src.shared import Axes
from lsgd_jax._src.topology import Graph, exponential, for_group
from lsgd_jax._src.trees import Tree, all_finite, widened


class PushSumState(NamedTuple):
    """The state of a push-sum worker beside its parameters.

    Attributes:
      weight: w, scalar in float32 at least, its push-sum weight; 1 at first; per worker.
      in_flight: messages on their way to this worker, the next one first: pairs of a
        numerator (a tree like the parameters, in float32 at least) and a weight; per
        worker; empty without a delay. At first the start with weight 1, of which the worker
        takes its in-neighbors' shares when it lands.
    """

    weight: Array
    in_flight: tuple[tuple[Tree, Array], ...]

    def __lsgd_resized__(self) -> "PushSumState":
        """For `resize`: x stays, and with w = 1 for all workers Σ w = W holds again."""
        if self.in_flight:
            raise ValueError(
                "the workers must stay the same while messages are in flight to them "
                f"(`staleness` above 1), got staleness={len(self.in_flight) + 1}"
            )
        return self._replace(weight=jnp.ones_like(self.weight))


@by_value
@takes_options()
def sgp(
    topology: Graph = exponential,
    axes: Axes = ("node", "local"),
    **options: Unpack[PullOptions],
) -> Exchange:
    r"""Stochastic gradient push: gossip on a directed graph, de-biased by push-sum weights.

    .. math::
      s_i = w_i x_i + u_i, \qquad s_i \leftarrow \sum_j P_{ij} s_j, \qquad
      w_i \leftarrow \sum_j P_{ij} w_j, \qquad x_i \leftarrow s_i / w_i

    with u the update, w the push-sum weight (1 at first), s the numerator and P the mixing
    matrix of the exchange's round: P_ij = 1 / (out-degree of j + 1) for i = j and every i
    that j sends to, or the `weights` of `from_edges`. The parameters x that a user
    sees are the de-biased ones. Out-degrees and weights may differ between workers, and
    between steps in a graph of several rounds. Σ s and Σ w are conserved.

    A worker whose x + u or loss is not finite sends neither numerator nor weight. It takes
    what its neighbors sent whole and keeps its weight.

    Args:
      topology: any graph, or a function of W that builds it.
      axes: the mesh axes of the group.
      **options: see `PullOptions`.

    Returns:
      An optax transformation for one worker, the last in its chain.

    Raises:
      ValueError: in `update`, a graph that is not one of the group's W workers.

    Reference: Assran, Loizou, Ballas, Rabbat, Stochastic Gradient Push, ICML 2019,
    arXiv:1811.10792.

    >>> import optax, lsgd_jax as lj
    >>> tx = optax.chain(optax.sgd(0.1), lj.sgp(lj.topology.exponential(8)))
    """
    return exchange(Pull(push_sum(topology, 0, axes), 1.0), **options)


@by_value
@takes_options()
def osgp(
    topology: Graph = exponential,
    staleness: int = 1,
    axes: Axes = ("node", "local"),
    **options: Unpack[PullOptions],
) -> Exchange:
    r"""Overlap SGP: messages carry older parameters, so they can travel during a step.

    .. math::
      s_i \leftarrow P_{ii}(t) w_i x_i + u_i
        + \sum_{j \ne i} P_{ij}(r) w_j(r) x_j(r), \quad r = t - \sigma + 1,

    and likewise for the weights without u; then x = s / w. x and w are those before the
    step, u is the update and σ the `staleness`: with σ = 1 messages carry the parameters
    before this step's gradient, with σ = 2 those of the step before, …. In the first σ - 1
    steps, r < 1, the worker's own start with the weight P_ij(t) arrives in their place, as
    if shares of the common start had been in flight. On a balanced graph w is therefore 1
    from the first step on, where all rounds leave a worker the same share P_ii.

    Messages in flight carry numerator and weight. Σ s and Σ w, these included, are
    conserved. Messages follow no gradient, so in the long run workers of weight 1 move by
    1 / (1 + (σ - 1) (1 - P_ii)) times their mean update in a step. Everything else is as in
    `sgp`.

    Args:
      topology: any graph, or a function of W that builds it.
      staleness: how many steps a message is in flight, σ ≥ 1; keeps σ - 1 copies of the
        parameters.
      axes: the mesh axes of the group.
      **options: see `PullOptions`.

    Returns:
      An optax transformation for one worker, the last in its chain.

    Raises:
      ValueError: a staleness below 1; in `update`, a graph of another size.

    Reference: Assran et al., ICML 2019, arXiv:1811.10792, section 4 (overlap).

    >>> import optax, lsgd_jax as lj
    >>> tx = optax.chain(optax.sgd(0.1), lj.osgp(lj.topology.exponential(8), staleness=2))
    """
    check_positive_int("staleness", staleness)
    return exchange(Pull(push_sum(topology, staleness, axes), 1.0), **options)


@by_value
def push_sum(topology: Graph, staleness: int, axes: Axes) -> Rule:
    """The de-biased push-sum estimate, as a rule of a pull; see `osgp` and `sgp`.

    A message is the de-biased x in the parameters' dtype and a weight, so that the receiver
    forms the numerators, in float32 at least. With a narrow wire format the sender keeps
    the quantization error of its message, so that Σ s is conserved.

    Args:
      topology: any graph, or a function of W that builds it.
      staleness: σ; with 0 a message contains its sender's step as well.
      axes: the mesh axes of the group.
    """
    graph = for_group(topology)

    def init(params: Tree) -> PushSumState:
        one = jnp.ones([], weight_dtype(params))
        if staleness < 2:
            return PushSumState(one, ())
        start = widened(params), one
        start = trees.where(all_finite(params), start, jax.tree.map(jnp.zeros_like, start))
        return PushSumState(one, (start,) * (staleness - 1))

    def step(u, x, state, loss, t):
        return jax.tree.map(lambda u: u / state.weight.astype(u.dtype), u), state, True

    def agree(group, x, y, state, takes_part, t):  # y = (w x + u) / w
        here = graph(group.size)
        w = state.weight
        traveling = x if staleness else y
        shares, weights, error = send(group, traveling, w, takes_part, here)
        # The message of this step is the last one in flight. The first one lands now.
        arrives, *in_flight = [*state.in_flight, (shares, weights)]
        if staleness > 1:
            # The first messages are the start, whole: init does not know the graph.
            is_start = group.exchange_number < staleness
            taken = jnp.where(is_start, taken_share(group, here, w.dtype), 1)
            arrives = jax.tree.map(lambda x: taken.astype(x.dtype) * x, arrives)
        sums, mass = arrives
        kept = share(group, here, w.dtype) * w
        z = blend(traveling, jnp.where(takes_part, kept, 0), sums, mass, error, w - kept)
        weight = jnp.where(takes_part, kept, w) + mass
        if staleness:

            def add_step(z, x, y):  # u / weight
                step = (widened(y) - widened(x)) * (w / weight).astype(z.dtype)
                return z + jnp.where(takes_part, step.astype(z.dtype), 0)

            z = jax.tree.map(add_step, z, x, y)
        return z, takes_part | (mass > 0), PushSumState(weight, tuple(in_flight))

    return Rule(axes, init, agree, step, keeps=(), rounds=phase_rounds_on(graph))
