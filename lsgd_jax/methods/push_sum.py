"""Push-sum: gossip on any directed graph, with weights that take the bias out again."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from lsgd_jax import collectives
from lsgd_jax._types import Shared, Tree
from lsgd_jax.checks import check_positive_int
from lsgd_jax.collectives import Axes, widened
from lsgd_jax.methods.gossip import blend, message_nbytes, send, share
from lsgd_jax.pull import (
    NO_PARAMS,
    PullState,
    all_finite,
    finite_part,
    plus,
    quarantine,
    sound,
    step_towards,
    tree_where,
)
from lsgd_jax.topology import Graph, exponential, for_group


class PushSumState(NamedTuple):
    """What a worker of push-sum knows beside its parameters.

    Attributes:
      weight: w, float32 scalar, its push-sum weight; 1 at first; per worker.
      under_way: what was sent to it and has not arrived, the next to arrive first: pairs
        of a numerator (a tree like the parameters, in float32 at least) and a weight; per
        worker; empty if nothing is delayed.
    """

    weight: Array
    under_way: tuple[tuple[Tree, Array], ...]

    def resized(self) -> "PushSumState":
        """For `resize`: x stays, and with w = 1 for everybody Σ w = W holds again."""
        if self.under_way:
            raise ValueError(
                "the workers must stay the same while messages are under way to them "
                f"(`staleness` above 1), got staleness={len(self.under_way) + 1}"
            )
        return self._replace(weight=jnp.ones_like(self.weight))


def sgp(
    topology: Graph = exponential, axes: Axes = ("node", "local")
) -> optax.GradientTransformationExtraArgs:
    r"""Stochastic gradient push: gossip on a directed graph, de-biased by push-sum weights.

    .. math::
      s_i = w_i x_i + u_i, \qquad s_i \leftarrow \sum_j P_{ij} s_j, \qquad
      w_i \leftarrow \sum_j P_{ij} w_j, \qquad x_i \leftarrow s_i / w_i

    with u the update, w the push-sum weight (1 at first), s the numerator and
    P_ij = 1 / (out-degree of j + 1) for i = j and every i that j sends to. The parameters
    x that a user sees are the de-biased ones. Out-degrees may differ between workers and
    from step to step (`Topology.then`): Σ s and Σ w are conserved.

    From a worker whose x + u or loss is not finite neither numerator nor weight arrives.
    It takes what its neighbors sent whole and keeps its weight.

    Args:
      topology: any graph, or the function that builds it for W workers.
      axes: the mesh axes of the group.

    Returns:
      An optax transformation for one worker, the last in its chain.

    Raises:
      ValueError: in `update`, a graph that is not one of the group's W workers.

    Reference: Assran, Loizou, Ballas, Rabbat, Stochastic Gradient Push, ICML 2019,
    arXiv:1811.10792.

    >>> import optax, lsgd_jax as lj
    >>> tx = optax.chain(optax.sgd(0.1), lj.sgp(lj.topology.exponential(8)))
    """
    return quarantine(_push_sum(topology, 0, axes))


def osgp(
    topology: Graph = exponential, staleness: int = 1, axes: Axes = ("node", "local")
) -> optax.GradientTransformationExtraArgs:
    r"""Overlap SGP: what travels is older than the step, so it can travel beside it.

    .. math::
      s_i \leftarrow P_{ii}(t) w_i x_i + u_i
        + \sum_{j \ne i} P_{ij}(r) w_j(r) x_j(r), \quad r = t - \sigma + 1,

    and likewise for the weights without u; then x = s / w. x and w are those before the
    step, u is the update and σ the `staleness`: with σ = 1 messages carry the parameters
    before this step's gradient, with σ = 2 those of the step before, …. What is under way
    carries numerator and weight: counted in, Σ s and Σ w are conserved. All else as in
    `sgp`.

    Args:
      topology: any graph, or the function that builds it for W workers.
      staleness: σ ≥ 1; keeps σ - 1 copies of the parameters under way.
      axes: the mesh axes of the group.

    Returns:
      An optax transformation for one worker, the last in its chain.

    Raises:
      ValueError: a staleness below 1; in `update`, a graph of another size.

    Reference: Assran et al., ICML 2019, arXiv:1811.10792, section 4 (overlap).

    >>> import optax, lsgd_jax as lj
    >>> tx = optax.chain(optax.sgd(0.1), lj.osgp(lj.topology.exponential(8), staleness=2))
    """
    check_positive_int("staleness", staleness)
    return quarantine(_push_sum(topology, staleness, axes))


def _push_sum(
    topology: Graph, staleness: int, axes: Axes
) -> optax.GradientTransformationExtraArgs:
    """`sgp` (staleness 0: the step travels) and `osgp`, without the quarantine.

    A message is the de-biased x in the parameters' dtype and a weight, so that numerators
    are formed in float32 by the receiver.
    """

    graph = for_group(topology)

    def init(params: Tree) -> Any:
        nothing = jax.tree.map(lambda x: jnp.zeros_like(widened(x)), params)
        under_way = tuple((nothing, jnp.float32(0)) for _ in range(staleness - 1))
        return PullState(
            count=Shared(jnp.zeros([], jnp.int32)),
            healed=jnp.zeros([], jnp.int32),
            target=PushSumState(jnp.float32(1), under_way),
            axes=axes,
            period=1,
            payload=message_nbytes(params, graph(collectives.size(axes))),
        )

    def update(updates, state, params=None, *, value=None, **extra_args):
        del extra_args
        if params is None:
            raise ValueError(NO_PARAMS)
        x, u, w = params, updates, state.target.weight
        t = jnp.asarray(optax.safe_increment(state.count.value))
        here = graph(collectives.size(axes))
        scaled = lambda w: jax.tree.map(lambda u: (u / w).astype(u.dtype), u)
        y = plus(x, scaled(w))  # (w x + u) / w
        healthy = sound(value) & all_finite(y)

        traveling = x if staleness else y
        sent = send(traveling, w, healthy, here, t, axes)
        arrived, *under_way = (*state.target.under_way, sent)
        sums, mass = arrived

        own = jnp.where(healthy, share(here, here.round_at(t), axes) * w, 0)
        weight = jnp.where(healthy, own, w) + mass
        z = blend(traveling, own, sums, mass)
        found = healthy | (mass > 0)
        moved = step_towards(scaled(weight if staleness else w), traveling, z, 1.0)
        whole = jax.tree.map(lambda x, z: z - finite_part(x), x, z)
        move = tree_where(healthy, moved, whole)
        return tree_where(found, move, u), dataclasses.replace(
            state,
            count=Shared(t),
            healed=state.healed + (found & ~healthy),
            target=PushSumState(weight, tuple(under_way)),
        )

    return optax.GradientTransformationExtraArgs(init, update)
