"""NoLoCo: DiLoCo without an all-reduce; slow weights are averaged in changing pairs."""

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp

from lsgd_jax._src import trees
from lsgd_jax._src.by_value import by_value
from lsgd_jax._src.checks import check_fraction, check_not_negative
from lsgd_jax._src.exchange.exchange import Exchange, exchange
from lsgd_jax._src.exchange.kernel import Pull
from lsgd_jax._src.exchange.options import PullOptions, takes_options
from lsgd_jax._src.exchange.rule import Rule
from lsgd_jax._src.exchange.schedule import Period, check_every
from lsgd_jax._src.methods.gossip import neighbors
from lsgd_jax._src.shared import Axes
from lsgd_jax._src.topology import Graph, matchings
from lsgd_jax._src.trees import Tree, widened


class NoLoCoState(NamedTuple):
    """The state of `noloco`.

    Attributes:
      slow: φ, where this worker stood after its last exchange; a tree like the parameters,
        in float32 at least; per worker.
      momentum: δ, the last move of φ; likewise.
    """

    slow: Tree
    momentum: Tree


@by_value
@takes_options()
def noloco(
    period: Period = 50,
    alpha: float = 0.5,
    beta: float = 0.7,
    gamma: float = 0.7,
    topology: Graph = matchings,
    axes: Axes = ("node", "local"),
    **options: Unpack[PullOptions],
) -> Exchange:
    r"""NoLoCo: slow weights with a momentum, averaged in pairs that change every time.

    If t mod τ = 0, with y = x + u the worker's parameters after its own step t = 1, 2, …:

    .. math::
      \delta_i &\leftarrow \alpha \delta_i
        + \beta \, \frac{1}{|G|} \sum_{j \in G} (y_j - \varphi_j)
        + \gamma \, \Bigl( \frac{1}{|G|} \sum_{j \in G} \varphi_j - \varphi_i \Bigr) \\
      \varphi_i &\leftarrow \varphi_i + \delta_i, \qquad y_i \leftarrow \varphi_i

    φ are the slow weights of a worker (its start at first), δ their momentum (0 at first),
    G the worker and its peer in the exchange's round of the graph, with the old φ on the
    right-hand sides. γ pulls the slow weights of a pair together. Each worker sends
    β (y - φ) + γ φ to one peer, which has the bytes of its parameters. The mean of all φ
    follows a momentum on the mean of all y - φ, since γ cancels in every group. A narrow
    `wire` encodes this message; take one with stochastic rounding, see `neighbors`.

    With more than 4 workers a compiled program does not contain each random matching. It
    sends messages through all workers, which takes twice the bytes and an all-to-all (see
    `matchings`). With `bipartite_exponential` and in asynchronous workers every message
    goes to its peer alone.

    A worker whose peer is not finite, or that has none, acts as if it were alone:
    G = {i}. A worker that is not finite keeps φ and δ, and goes back to φ.

    Args:
      period: steps between exchanges, τ, or `Periods`.
      alpha: momentum of the slow weights, α in [0, 1]; the released code has 0.5 in its
        experiments and 0.9 as its default.
      beta: learning rate of the slow weights, β ≥ 0.
      gamma: pull of the slow weights on each other, γ ≥ 0.
      topology: the pairs of each exchange: a balanced graph, or a function of W that builds
        it; exchange n uses round n - 1, and begins again after the last one. In a graph
        with more neighbors G is the worker and all of them.
      axes: the mesh axes of the group.
      **options: see `PullOptions`.

    Returns:
      An optax transformation for one worker, the last in its chain. Each worker keeps φ and
      δ, in float32 at least.

    Raises:
      ValueError: a period below 1, a momentum outside [0, 1], a negative rate or pull, a
        graph that is not balanced, fragments or a delay that do not fit the period; in
        `update`, a graph of another size.

    Reference: Kolehmainen, Blagoev, Donaghy, Ersoy, Nies, NoLoCo: No-all-reduce Low
    Communication Training Method for Large Models, 2025, arXiv:2506.10911, and its released
    code, gensyn-ai/noloco.

    >>> import optax, lsgd_jax as lj
    >>> tx = optax.chain(optax.adamw(1e-3), lj.contrib.noloco(period=50))
    """
    check_every("period", period)
    check_fraction("alpha", alpha)
    check_not_negative("beta", beta)
    check_not_negative("gamma", gamma)
    pairs = neighbors(topology, axes)

    def agree(group, x, y, state, takes_part, t):
        # Means are linear, so y - φ and φ need not travel apart.
        def blend(y, slow):
            return beta * (widened(y) - slow) + gamma * slow

        message = jax.tree.map(blend, y, state.slow)
        mean, _, _ = pairs.agree(group, None, message, (), takes_part, t)
        mean = group.movable(mean, message)

        def momentum(old, mean, slow):
            return alpha * old + (mean - gamma * slow)

        moved = jax.tree.map(momentum, state.momentum, mean, state.slow)
        stepped = NoLoCoState(jax.tree.map(jnp.add, state.slow, moved), moved)
        state = trees.where(takes_part, stepped, state)
        return state.slow, jnp.asarray(True), state

    def init(params):
        return NoLoCoState(trees.widened(params), trees.zeros(params))

    rule = Rule(axes, init, agree, keeps=(), reads_x=False, rounds=pairs.rounds)
    return exchange(Pull(rule, 1.0, every=period), **options)
