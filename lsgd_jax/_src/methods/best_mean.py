"""The mean of the best workers of a group."""

from typing import NamedTuple, get_args

import jax.numpy as jnp
from jax import Array

from lsgd_jax._src.by_value import by_value
from lsgd_jax._src.checks import check_option, check_positive_int
from lsgd_jax._src.exchange.rule import Rule, silent
from lsgd_jax._src.methods.scores import JudgedBy, judged, recorded
from lsgd_jax._src.shared import Axes
from lsgd_jax._src.trees import Tree


class BestMeanState(NamedTuple):
    """The state of `best_mean`.

    Attributes:
      losses: float [window], the last losses, a ring, or None if peers judge; per worker.
      score: float scalar, their mean, or the loss that a peer measured at the last
        exchange; per worker.
    """

    losses: Array | None
    score: Array


@by_value
def best_mean(
    keep: int,
    axes: Axes = ("node", "local"),
    window: int = 10,
    judged_by: JudgedBy = "own",
) -> Rule:
    r"""The mean of the group's best workers, as a rule of a pull: admission by score.

    .. math:: z = \frac{1}{|B|} \sum_{i \in B} y_i

    with B the k workers of the lowest scores among those whose score and y are finite, or
    all of these if they are fewer. Scores are those of `leader`. Ties go to the lowest
    index. k = 1 is the leader; k = W is `average`.

    Args:
      keep: k, the number of workers in the mean.
      axes: the mesh axes of the group.
      window: the number of losses that a score is the mean of, if they are a worker's own.
      judged_by: whose losses are a worker's score: its 'own', or those of its 'peers', as
        for `leader`.

    Raises:
      ValueError: a number to keep or a window below 1, an unknown judge; in `update`, no
        `value` or, for peers, no `value_fn`.

    >>> import lsgd_jax as lj
    >>> half = lj.exchange(lj.Pull(lj.best_mean(keep=4), 1.0, every=16))
    """
    check_positive_int("keep", keep)
    check_positive_int("window", window)
    check_option("judged_by", judged_by, get_args(JudgedBy))
    peers = judged_by == "peers"

    def init(params: Tree) -> BestMeanState:
        dtype = jnp.result_type(float)
        losses = None if peers else jnp.zeros([window], dtype)
        return BestMeanState(losses, jnp.asarray(jnp.inf, dtype))

    def step(u, x, state, loss, t):
        state = BestMeanState(*recorded(state.losses, loss, t))
        return u, state, jnp.isfinite(state.score)

    def agree(group, x, y, state, is_finite, t, value_fn=None):
        scores, state = judged(group, state, y, is_finite, value_fn)
        scores = jnp.where(jnp.isfinite(scores), scores, jnp.inf)
        rank = jnp.argsort(jnp.argsort(scores))
        admitted = (rank < keep) & jnp.isfinite(scores)
        z, count = group.masked_mean(y, admitted[group.index])
        return z, count > 0, state

    return Rule(
        axes,
        init,
        agree,
        silent if peers else step,
        keeps=("reference", "error"),
        reads_x=False,
        reads_value_fn=peers,
    )
