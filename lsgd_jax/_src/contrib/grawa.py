"""GRAWA: a soft pull to a mean in which workers with small gradients weigh more.

Dimlioglu, Choromanska. GRAWA: Gradient-based Weighted Averaging for Distributed Training of
Deep Learning Models. AISTATS 2024, arXiv:2403.04206.
"""

from typing import NamedTuple, Unpack

import jax
import jax.numpy as jnp
import optax
from jax import Array

from lsgd_jax._src import trees
from lsgd_jax._src.by_value import by_value
from lsgd_jax._src.checks import check_fraction, check_not_negative
from lsgd_jax._src.exchange.exchange import Exchange, exchange
from lsgd_jax._src.exchange.kernel import Pull
from lsgd_jax._src.exchange.options import PullOptions, takes_options
from lsgd_jax._src.exchange.rule import Rule
from lsgd_jax._src.exchange.schedule import Period, check_every
from lsgd_jax._src.methods.blocks import leaf_norms, times
from lsgd_jax._src.shared import Axes
from lsgd_jax._src.trees import Tree, widened


SMALLEST = 1e-12  # of the largest norm: a norm of 0 would take all the weight


class GradientNormState(NamedTuple):
    """The state of `gradient_weighted`. B is 1, or the number of leaves if layerwise.

    Attributes:
      measured: float [B], the norms s of the last step; per worker.
      norms: float [B], their running average n over exchanges; per worker.
      count: int32 scalar, the exchanges in that average; per worker.
    """

    measured: Array
    norms: Array
    count: Array


@by_value
def gradient_weighted(
    layerwise: bool = False,
    decay: float = 0.43046721,
    power: float = 1.0,
    axes: Axes = ("node", "local"),
) -> Rule:
    r"""The mean of the workers, weighted by inverse gradient norms, as a rule of a pull.

    .. math::
      n_i &\leftarrow \rho n_i + (1 - \rho) \, s_i, \qquad
      {\hat n}_i = n_i / (1 - \rho^k) \\
      w_i &= \frac{{\hat n}_i^{-p}}{\sum_{j \in H} {\hat n}_j^{-p}}, \qquad
      z = \sum_{i \in H} w_i y_i

    with s_i the sum over the leaves of the norms of worker i's gradient, k the number of
    exchanges in the average n_i, and H the workers whose y, loss and s are finite. A worker
    that is not in H starts its average anew. A norm counts as at least 1e-12 of the
    largest one. If all are 0, all weights are equal.

    s is the norm of the gradient that ``update`` gets as ``grad=``, otherwise of the update
    u. With SGD without momentum both give the same weights. Every step measures it.

    Args:
      layerwise: whether each leaf has a weight of its own, by the norm of its own gradient.
      decay: ρ in [0, 1), how much of the earlier norms the average keeps.
      power: p ≥ 0. 0 is the plain mean.
      axes: the mesh axes of the group.

    Raises:
      ValueError: ρ outside [0, 1), a negative p.

    >>> import lsgd_jax as lj
    >>> lj.contrib.gradient_weighted(axes="local").axes
    'local'
    """
    check_fraction("decay", decay)
    if decay == 1:
        raise ValueError("`decay` must be less than 1, or no gradient norm ever enters n")
    check_not_negative("power", power)

    def measure(gradient: Tree) -> Array:
        norms = leaf_norms(gradient)
        return norms if layerwise else norms.sum(keepdims=True)

    def init(params: Tree) -> GradientNormState:
        zero = measure(trees.zeros(params))
        return GradientNormState(zero, zero, jnp.int32(0))

    def step(u, x, state, loss, t, grad=None):
        measured = measure(u if grad is None else grad)
        return u, state._replace(measured=measured), jnp.isfinite(measured).all()

    def agree(group, x, y, state, takes_part, t):
        count = jnp.where(takes_part, state.count + 1, 0)
        average = decay * state.norms + (1 - decay) * state.measured
        norms = jnp.where(takes_part, average, 0)
        kept = jnp.power(jnp.asarray(decay, norms.dtype), count.astype(norms.dtype))
        corrected = jnp.where(takes_part, norms / (1 - kept), jnp.nan)
        each = group.gather(corrected)
        weights = inverse_weights(each, power)
        state = state._replace(norms=norms, count=count)
        # For any r, a weighted mean of y is the mean of r + n w (y - r) over n workers.
        n = (~jnp.isnan(each).any(axis=1)).sum(dtype=each.dtype)
        mine = n * weights[group.index]
        r = group.reference
        if r is None:
            given = times(y, mine)
        else:
            gaps = jax.tree.map(lambda y, r: widened(y) - r, y, r)
            given = jax.tree.map(jnp.add, r, times(gaps, mine))
        z, _ = group.masked_mean(given, takes_part)
        return z, weights.sum() > 0, state

    # Without `grad=` the norm is that of u, which `outer` knows only if it knows x.
    keeps = "reference", "error"
    reads = ("grad",)
    return Rule(
        axes, init, agree, step, keeps=keeps, reads_x=True, reads=reads, is_common=True
    )


def inverse_weights(norms: Array, power: float) -> Array:
    """Weights proportional to norms^-power.

    Args:
      norms: [W, B], nan for a worker that does not count.
      power: at least 0.

    Returns:
      float [W, B], columns that sum to 1, or to 0 if no worker counts.

    >>> norms = jnp.array([[1e-30, 1.0], [3e-30, 1.0], [jnp.nan, jnp.nan]])
    >>> inverse_weights(norms, 1.0).tolist()
    [[0.75, 0.5], [0.25, 0.5], [0.0, 0.0]]
    """
    counts = jnp.isfinite(norms)
    largest = jnp.where(counts, norms, 0).max(axis=0, keepdims=True)
    floored = jnp.maximum(norms, SMALLEST * largest)
    smallest = jnp.where(counts, floored, jnp.inf).min(axis=0, keepdims=True)
    # Relative to the smallest one no power overflows.
    ratios = jnp.where(largest > 0, floored / smallest, 1)
    raw = jnp.where(counts, jnp.power(ratios, -power), 0)
    total = raw.sum(axis=0, keepdims=True)
    return jnp.where(total > 0, raw / total, 0)


@by_value
@takes_options()
def grawa(
    pull: optax.ScalarOrSchedule = 0.1,
    period: Period = 256,
    layerwise: bool = False,
    decay: float = 0.43046721,
    power: float = 1.0,
    axes: Axes = ("node", "local"),
    **options: Unpack[PullOptions],
) -> Exchange:
    r"""GRAWA: workers are pulled to a mean in which flat places weigh more.

    With y = x + u the worker's parameters after its own step t = 1, 2, …, if t mod τ = 0:

    .. math::
      y_i \leftarrow (1 - \lambda) \, y_i + \lambda \sum_j w_j y_j, \qquad
      w_j \propto {\hat n}_j^{-p}

    with n̂_j the running average of the norms of worker j's gradients, see
    `gradient_weighted`. By default (MGRAWA) a worker has one weight. With `layerwise`
    (LGRAWA) it has one for each leaf.

    The norms are those of the update u in front, which is right for SGD. For any other
    base optimizer pass the gradient, ``tx.update(grads, state, params, grad=grads)``, with
    `outer` as ``step(params, state, grad=grads)``. The authors' code measures the gradient
    at y on an extra batch, and this rule at x on the step's own.

    A worker whose y, loss or gradient is not finite has no weight and takes the mean whole.

    Args:
      pull: λ in [0, 1], or a schedule of t.
      period: steps between exchanges, τ, or `Periods`.
      layerwise: whether each leaf has a weight of its own.
      decay: ρ in [0, 1), of the running average over exchanges.
      power: p ≥ 0. 0 is a soft pull to the plain mean.
      axes: the mesh axes of the group.
      **options: see `PullOptions`.

    Returns:
      An optax transformation for one worker, the last in its chain.

    Raises:
      ValueError: λ outside [0, 1], ρ outside [0, 1), a negative p, a period below 1,
        fragments that do not divide it, a delay of τ or more.

    Reference: Dimlioglu, Choromanska, AISTATS 2024, arXiv:2403.04206; defaults as in its
    code.

    >>> import optax, lsgd_jax as lj
    >>> tx = optax.chain(optax.sgd(0.1), lj.contrib.grawa(pull=0.1, period=16))
    """
    check_every("period", period)
    if not callable(pull):
        check_fraction("pull", pull)
    rule = gradient_weighted(layerwise, decay, power, axes)
    return exchange(Pull(rule, pull, every=period), **options)
