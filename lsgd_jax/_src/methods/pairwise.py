"""Pairwise averaging: every worker takes from one peer (dpwa, GoSGD)."""

from typing import Literal, NamedTuple, Unpack, get_args

import jax
import jax.numpy as jnp
import optax
from jax import Array
from jax.typing import ArrayLike

from lsgd_jax._src import trees
from lsgd_jax._src.by_value import by_value
from lsgd_jax._src.checks import check_fraction, check_not_negative, check_option
from lsgd_jax._src.exchange.exchange import Exchange, exchange
from lsgd_jax._src.exchange.kernel import Pull
from lsgd_jax._src.exchange.options import PullOptions, takes_options
from lsgd_jax._src.exchange.rule import Rule
from lsgd_jax._src.methods.gossip import blend, phase_rounds_on, send, share, weight_dtype
from lsgd_jax._src.methods.scores import HOW
from lsgd_jax._src.shared import Axes
from lsgd_jax._src.topology import Graph, check_one_peer, exponential, for_group
from lsgd_jax._src.trees import value_at, widened


Interpolation = Literal["constant", "clock", "loss"]


class PairwiseState(NamedTuple):
    """The state of `pairwise`.

    Attributes:
      measure: scalar in float32 at least, this worker's clock, or its loss at this step,
        or 0, by the kind of interpolation; per worker.
    """

    measure: Array


@by_value
@takes_options()
def pairwise(
    interpolation: Interpolation = "constant",
    value: optax.ScalarOrSchedule = 0.5,
    divergence_threshold: float = 0.0,
    topology: Graph = exponential,
    fetch_probability: optax.ScalarOrSchedule = 1.0,
    seed: int = 0,
    axes: Axes = ("node", "local"),
    **options: Unpack[PullOptions],
) -> Exchange:
    r"""Pairwise averaging (dpwa): every worker moves towards one peer after its own step.

    .. math:: y_i \leftarrow f y_j + (1 - f) y_i \quad \text{with probability } p,

    with y = x + u, j the one worker that sends to i in the exchange's round of the graph, p
    the `fetch_probability` and f by `interpolation`:

    - 'constant': f = `value`;
    - 'clock': :math:`f = c_j / (c_i + c_j)`, c the clock, which counts steps from 0 and
      is mixed as y is: :math:`c_i \leftarrow f c_j + (1 - f) c_i`;
    - 'loss': :math:`f = v_i / (v_i + v_j)`, v the loss at this step: the worse worker
      takes more. If :math:`v_i < \theta`, the `divergence_threshold`, then
      :math:`f \leftarrow f v_i / \theta`.

    0 / 0 is 1/2, and f is clipped to [0, 1]. If the peer's y or loss is not finite, a
    worker keeps its own y. If its own y or loss is not finite, it takes the peer's y whole.

    Args:
      interpolation: how the peer's weight f is computed.
      value: the peer's weight with 'constant', f in [0, 1], or a schedule of t.
      divergence_threshold: with 'loss', the loss below which a worker takes less from its
        peer, θ ≥ 0.
      topology: a graph in which each worker sends to one, or a function of W that builds
        it; with `exponential` i takes from i - hop.
      fetch_probability: probability p of taking from the peer, in [0, 1], or a schedule
        of t; drawn anew per worker and step.
      seed: seed of the draws.
      axes: the mesh axes of the group.
      **options: see `PullOptions`.

    Returns:
      An optax transformation for one worker, the last in its chain. With 'loss', `update`
      needs ``loss=`` (the worker's loss at x).

    Raises:
      ValueError: an unknown interpolation, a fraction outside [0, 1], a negative
        threshold, a graph with more than one peer; in `update`, a graph of another size,
        or no loss where one is needed.

    Reference: the dpwa library (pair-wise averaging), after Jin, Yuan, Iandola, Keutzer,
    How to Scale Distributed Deep Learning?, 2016, arXiv:1611.04581.

    >>> import optax, lsgd_jax as lj
    >>> tx = optax.chain(optax.sgd(0.1), lj.pairwise("loss", divergence_threshold=0.1))
    """
    check_option("interpolation", interpolation, get_args(Interpolation))
    if not callable(value):
        check_fraction("value", value)
    if not callable(fetch_probability):
        check_fraction("fetch_probability", fetch_probability)
    check_not_negative("divergence_threshold", divergence_threshold)
    graph = for_group(topology, check_one_peer)

    def step(u, x, state, loss, t):
        measure = state.measure
        if interpolation == "clock":
            measure = measure + 1
        if interpolation == "loss":
            if loss is None or jnp.shape(loss) != ():
                raise ValueError(
                    f"`interpolation='loss'` needs each worker's loss, a scalar: {HOW}, "
                    f"got loss={loss}"
                )
            measure = jnp.asarray(loss, measure.dtype)
        return u, PairwiseState(measure), True

    def agree(group, x, y, state, takes_part, t):
        mine = state.measure
        here = graph(group.size)
        message = jax.tree.map(lambda a: jnp.where(takes_part, a, 0), (y, mine))
        r = group.round_of(len(here.rounds))
        weight = takes_part.astype(jnp.float32)
        arrived = group.push(message, weight, here.rounds, r)
        z, theirs = arrived[0]
        there = arrived[1] > 0
        error = group.quantization_error(message)
        if error is not None:  # y_i + f (Q(y_j) - Q(y_i)): equal workers do not move
            z = jax.tree.map(jnp.add, z, error[0])

        constant = value_at(value, t)
        f = part_taken(interpolation, mine, theirs, constant, divergence_threshold)
        drawn = group.bernoulli(value_at(fetch_probability, t), seed, t)
        f = jnp.where(drawn, f, 0)
        f = jnp.where(there, jnp.where(takes_part, f, 1), 0)
        if interpolation == "clock":
            mine = mine + f * (theirs - mine)
        own = jax.tree.map(lambda a: jnp.where(takes_part, widened(a), 0), y)
        return trees.step_towards(own, z, f), takes_part | there, PairwiseState(mine)

    def init(params):
        return PairwiseState(jnp.zeros([], weight_dtype(params)))

    rounds = phase_rounds_on(graph)
    rule = Rule(axes, init, agree, step, keeps=(), reads_x=False, rounds=rounds)
    return exchange(Pull(rule, 1.0), **options)


def part_taken(
    interpolation: Interpolation,
    mine: Array,
    theirs: Array,
    value: ArrayLike,
    divergence_threshold: float,
) -> ArrayLike:
    """The peer's weight f in `pairwise`, from the measures of both workers.

    >>> part_taken("loss", jnp.float32(3), jnp.float32(1), 0.5, 6.0).item()
    0.375
    """
    if interpolation == "clock":
        return _part(theirs, mine + theirs)
    if interpolation == "constant":
        return value
    f = _part(mine, mine + theirs)
    if not divergence_threshold:
        return f
    less = jnp.clip(f * mine / divergence_threshold, 0, 1)
    return jnp.where(mine < divergence_threshold, less, f)


class SumWeightState(NamedTuple):
    """The state of `gosgd`.

    Attributes:
      weight: scalar in float32 at least, this worker's weight, 1 at first; per worker.
    """

    weight: Array

    def __lsgd_resized__(self) -> "SumWeightState":
        """For `resize`: y stays, and with w = 1 for all workers Σ w = W holds again."""
        return self._replace(weight=jnp.ones_like(self.weight))


@by_value
@takes_options()
def gosgd(
    topology: Graph = exponential,
    send_probability: optax.ScalarOrSchedule = 0.5,
    seed: int = 0,
    axes: Axes = ("node", "local"),
    **options: Unpack[PullOptions],
) -> Exchange:
    r"""GoSGD: sum-weight gossip, every worker sending to one peer now and then.

    With probability p worker j sends :math:`(y_j, w_j / 2)` to its peer and keeps
    :math:`w_j / 2`. The receiver takes the weighted mean:

    .. math::
      y_i \leftarrow \frac{w_i y_i + (w_j / 2) y_j}{w_i + w_j / 2}, \qquad
      w_i \leftarrow w_i + w_j / 2,

    with y = x + u, w the weight (1 at first) after i's own message has left, j the one
    worker that sends to i in the exchange's round of the graph, and p the probability
    `send_probability`. Σ w and Σ w y are conserved. A worker whose y or loss is not finite
    sends nothing, takes what arrives whole and keeps its weight.

    Args:
      topology: a graph in which each worker sends to one, or a function of W that builds
        it.
      send_probability: probability p of sending to the peer, in [0, 1], or a schedule of
        t; drawn anew per worker and step.
      seed: seed of the draws.
      axes: the mesh axes of the group.
      **options: see `PullOptions`.

    Returns:
      An optax transformation for one worker, the last in its chain.

    Raises:
      ValueError: a probability outside [0, 1], a graph with more than one peer; in
        `update`, a graph of another size.

    Reference: Blot, Picard, Cord, Thome, Gossip Training for Deep Learning, 2016,
    arXiv:1611.09726.

    >>> import optax, lsgd_jax as lj
    >>> tx = optax.chain(optax.sgd(0.1), lj.contrib.gosgd(send_probability=0.1))
    """
    if not callable(send_probability):
        check_fraction("send_probability", send_probability)
    graph = for_group(topology, check_one_peer)

    def agree(group, x, y, state, takes_part, t):
        w = state.weight
        here = graph(group.size)
        sends = takes_part & group.bernoulli(value_at(send_probability, t), seed, t)
        # 1/2, or all where there is no peer.
        kept = share(group, here, w.dtype)
        own = jnp.where(sends, kept * w, w)
        sums, mass, error = send(group, y, jnp.where(sends, w, 0), takes_part, here)
        z = blend(y, jnp.where(takes_part, own, 0), sums, mass, error, w - own)
        return z, takes_part | (mass > 0), SumWeightState(own + mass)

    def init(params):
        return SumWeightState(jnp.ones([], weight_dtype(params)))

    rounds = phase_rounds_on(graph)
    rule = Rule(axes, init, agree, keeps=(), reads_x=False, rounds=rounds)
    return exchange(Pull(rule, 1.0), **options)


def _part(a: Array, total: Array) -> Array:
    """a / total, clipped to [0, 1]; 0 / 0 is 1/2."""
    part = a / jnp.where(total == 0, 1, total)
    return jnp.where(total == 0, 0.5, jnp.clip(part, 0, 1))
