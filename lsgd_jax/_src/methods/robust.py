"""Aggregations of gradients, first in a chain: the mean and robust means."""

import jax
import jax.numpy as jnp
import optax
from jax import Array

from lsgd_jax._src import trees
from lsgd_jax._src.checks import check_fraction, check_not_negative, check_positive_int
from lsgd_jax._src.exchange.aggregate import aggregate
from lsgd_jax._src.methods import robust_means
from lsgd_jax._src.methods.blocks import leaf_norms
from lsgd_jax._src.norms import norm, squares
from lsgd_jax._src.shared import Axes
from lsgd_jax._src.trees import Tree
from lsgd_jax._src.wire.group import Group


def allreduce(
    axes: Axes = ("node", "local"), until: int | None = None
) -> optax.GradientTransformationExtraArgs:
    r"""All-reduce SGD: every worker's gradient is replaced by the mean of all.

    .. math:: g_i \leftarrow \frac{1}{|H|} \sum_{j \in H} g_j

    with H the workers of the group whose gradients are finite; if there is none the
    gradients stay as they are. LARS is ``optax.lars`` behind it. With `until` it is the
    first part of post-local SGD, whose second part is `local_sgd` at the end of the chain.

    Args:
      axes: the mesh axes of the group.
      until: the last step on which gradients are averaged. Defaults to all steps.

    Returns:
      An optax transformation for one worker, the first in its chain.

    Raises:
      ValueError: `until` below 1.

    >>> import optax, lsgd_jax as lj
    >>> tx = optax.chain(lj.allreduce(), optax.sgd(0.1))
    """
    if until is not None:
        check_positive_int("until", until)

    def rule(group, g, own, finite):
        return _mean_or(g, *group.masked_mean(g, finite)), own

    return aggregate(rule, axes, until=until)


def coordinate_median(
    axes: Axes = ("node", "local"),
) -> optax.GradientTransformationExtraArgs:
    r"""The coordinate-wise median of all gradients: a few attackers cannot move it.

    .. math:: g_i[k] \leftarrow \text{median}_j \, g_j[k]

    for each coordinate k, over the workers where it is finite; for an even number of them
    the mean of the middle two. Each worker computes 1/W of the coordinates, and receives
    about twice the bytes of its gradient in all, at any W.

    Args:
      axes: the mesh axes of the group.

    Returns:
      An optax transformation for one worker, the first in its chain.

    Reference: Yin, Chen, Kannan, Bartlett, Byzantine-Robust Distributed Learning, ICML
    2018, arXiv:1803.01498.

    >>> import optax, lsgd_jax as lj
    >>> tx = optax.chain(lj.robust.coordinate_median(), optax.sgd(0.1))
    """

    def rule(group, g, own, finite):
        return group.coordinatewise(robust_means.median, g), own

    return aggregate(rule, axes)


def licm(
    gamma: float = 0.5, axes: Axes = ("node", "local")
) -> optax.GradientTransformationExtraArgs:
    r"""LICM-SGD: the mean of the values near the coordinate-wise median.

    .. math::
      g_i[k] \leftarrow \text{mean} \{ g_j[k] : |g_j[k] - m[k]| \le \gamma |m[k]| \}, \qquad
      m[k] = \text{median}_j \, g_j[k]

    for each coordinate k, over the workers where it is finite; the median itself where
    no worker lies in the band. Withstands up to half the workers, in O(W d) for d
    parameters.
    Written from the abstract of the paper, which describes a Lipschitz-inspired
    coordinate-wise median; the width of the band is this library's reading of it.

    Args:
      gamma: half width of the band in units of the median, γ ≥ 0; 0 is the median.
      axes: the mesh axes of the group.

    Returns:
      An optax transformation for one worker, the first in its chain.

    Raises:
      ValueError: a negative band.

    Reference: Yang, Zhang, Fang, Liu, Byzantine-Resilient Stochastic Gradient Descent for
    Distributed Learning: A Lipschitz-Inspired Coordinate-wise Median Approach, 2019,
    arXiv:1909.04532.

    >>> import optax, lsgd_jax as lj
    >>> tx = optax.chain(lj.robust.licm(gamma=0.5), optax.sgd(0.1))
    """
    check_not_negative("gamma", gamma)

    def near_median(rows: Array, gamma: Array) -> Array:
        median = robust_means.median(rows)
        near = jnp.abs(rows - median[None]) <= gamma * jnp.abs(median)[None]
        count = near.sum(axis=0).astype(rows.dtype)
        mean = jnp.where(near, rows, 0).sum(axis=0) / jnp.maximum(count, 1)
        return jnp.where(count > 0, mean, median)

    def rule(group, g, own, finite):
        return group.coordinatewise(near_median, g, gamma), own

    return aggregate(rule, axes)


def cge(
    faulty: int = 1, decay: float = 0.0, axes: Axes = ("node", "local")
) -> optax.GradientTransformationExtraArgs:
    r"""Comparative gradient elimination: the mean without the f largest gradients.

    .. math:: g_i \leftarrow \frac{1}{|K|} \sum_{j \in K} h_j, \qquad
      h_j \leftarrow \beta h_j + (1 - \beta) g_j

    with K the W - f workers whose h has the smallest norm, ties to the lowest index, and
    h the exponential average of a worker's gradients (0 at first; h = g for β = 0). A
    gradient that is not finite counts as infinitely large, is never in K, and does not
    enter h. If K is empty the gradients stay as they are.

    Args:
      faulty: number of workers that may send anything, 0 ≤ f < W.
      decay: weight of the earlier gradients, β in [0, 1). If it is not 0, each worker keeps
        its h.
      axes: the mesh axes of the group.

    Returns:
      An optax transformation for one worker, the first in its chain.

    Raises:
      ValueError: f below 0, β outside [0, 1); in `init`, f not below W.

    Reference: Gupta, Liu, Vaidya, Byzantine Fault-Tolerant Distributed Machine Learning
    Using Stochastic Gradient Descent (SGD) and Norm-Based Comparative Gradient Elimination
    (CGE), 2020, arXiv:2008.04699.

    >>> import optax, lsgd_jax as lj
    >>> tx = optax.chain(lj.robust.cge(faulty=2), optax.sgd(0.1))
    """
    if faulty != 0:
        check_positive_int("faulty", faulty)
    check_fraction("decay", decay)
    if decay == 1:
        raise ValueError("`decay` must be less than 1, or no gradient ever enters h")

    def rule(group, g, own, finite):
        h = trees.widened(g)
        if decay:
            ema = jax.tree.map(lambda h, g: decay * h + (1 - decay) * g, own, h)
            h = own = trees.where(finite, ema, own)
        length = norm(squares(leaf_norms(h)))
        norms = jnp.where(finite & jnp.isfinite(length), length, jnp.inf)
        rank = jnp.argsort(jnp.argsort(group.gather(norms)))
        chosen = (rank[group.index] < group.size - faulty) & jnp.isfinite(norms)
        return _mean_or(g, *group.masked_mean(h, chosen)), own

    def init(params: Tree) -> Tree:
        group = Group(axes)
        if group.is_bound and faulty >= group.size:
            raise ValueError(
                f"`faulty` must be less than the number of workers ({group.size}), got "
                f"{faulty=}"
            )
        return trees.zeros(params) if decay else ()

    return aggregate(rule, axes, init)


def krum(
    faulty: int = 1, keep: int = 1, axes: Axes = ("node", "local")
) -> optax.GradientTransformationExtraArgs:
    r"""Krum: the gradient that is nearest to its neighbors, or the mean of the m best.

    .. math::
      g_i \leftarrow \frac{1}{m} \sum_{j \in K} g_j, \qquad
      \text{score}_j = \sum_{k \in N_j} |g_j - g_k|^2

    with N_j the W - f - 2 other workers nearest to worker j, and K the m workers of the
    lowest score, ties to the lowest index. m = 1 is Krum, m > 1 Multi-Krum. Workers whose
    gradients are not finite are left out and not counted in W. If fewer than 2 f + 3 are
    left, the aggregate is their coordinate-wise median, and if none is left the gradients
    stay as they are. The cost is that of `coordinate_median`, and a sum of 3 W² numbers.

    Args:
      faulty: number of workers that may send anything, f ≥ 0.
      keep: number of best gradients to average, m ≥ 1.
      axes: the mesh axes of the group.

    Returns:
      An optax transformation for one worker, the first in its chain.

    Raises:
      ValueError: f below 0, m below 1.

    Reference: Blanchard, El Mhamdi, Guerraoui, Stainer, Machine Learning with Adversaries:
    Byzantine Tolerant Gradient Descent, NeurIPS 2017, arXiv:1703.02757.

    >>> import optax, lsgd_jax as lj
    >>> tx = optax.chain(lj.robust.krum(faulty=2, keep=3), optax.sgd(0.1))
    """
    return _robust(robust_means.krum(faulty, keep), axes)


def geometric_median(
    iterations: int = 32, axes: Axes = ("node", "local")
) -> optax.GradientTransformationExtraArgs:
    r"""The geometric median of all gradients: fewer than half of them cannot move it far.

    .. math::
      g_i \leftarrow z, \qquad z \leftarrow \frac{\sum_j w_j g_j}{\sum_j w_j}, \qquad
      w_j = 1 / \max(\nu, |g_j - z|)

    over the workers whose gradients are finite, from their coordinate-wise median, with ν
    10⁻⁶ of the median of the distances. If there are none the gradients stay as they are.
    The cost is that of `coordinate_median`, and a sum of 3 W numbers per iteration.

    Args:
      iterations: of z, at least 1.
      axes: the mesh axes of the group.

    Returns:
      An optax transformation for one worker, the first in its chain.

    Raises:
      ValueError: less than one iteration.

    Reference: Pillutla, Kakade, Harchaoui, Robust Aggregation for Federated Learning, 2019,
    arXiv:1912.13445 (RFA, the smoothed Weiszfeld iteration).

    >>> import optax, lsgd_jax as lj
    >>> tx = optax.chain(lj.robust.geometric_median(), optax.sgd(0.1))
    """
    return _robust(robust_means.geometric_median(iterations), axes)


def trimmed_mean(
    cut: int = 1, axes: Axes = ("node", "local")
) -> optax.GradientTransformationExtraArgs:
    r"""The coordinate-wise mean without the b smallest and the b largest values.

    .. math:: g_i[k] \leftarrow \frac{1}{W - 2 b} \sum_{j = b + 1}^{W - b} g_{(j)}[k]

    with :math:`g_{(j)}[k]` the j-th smallest value of coordinate k. Workers whose gradients
    are not finite are left out and not counted in W. If 2 b of them or fewer are left, the
    aggregate is their coordinate-wise median, and if none is left the gradients stay as
    they are. The cost is that of `coordinate_median`.

    Args:
      cut: b ≥ 0; 0 is the mean.
      axes: the mesh axes of the group.

    Returns:
      An optax transformation for one worker, the first in its chain.

    Raises:
      ValueError: b below 0.

    Reference: Yin, Chen, Kannan, Bartlett, Byzantine-Robust Distributed Learning, ICML
    2018, arXiv:1803.01498.

    >>> import optax, lsgd_jax as lj
    >>> tx = optax.chain(lj.robust.trimmed_mean(cut=2), optax.sgd(0.1))
    """
    return _robust(robust_means.trimmed_mean(cut), axes)


def _robust(mean: robust_means.Mean, axes: Axes) -> optax.GradientTransformationExtraArgs:
    """The aggregate that is a robust mean of the finite gradients."""

    def rule(group, g, own, finite):
        z, found = robust_means.agreed(group, g, finite, mean, rounded=True)
        return trees.where(found, z, g), own

    return aggregate(rule, axes)


def _mean_or(g: Tree, mean: Tree, count: Array) -> Tree:
    """The mean of so many gradients; g itself if there are none."""
    return jax.tree.map(lambda m, g: jnp.where(count > 0, m, g.astype(m.dtype)), mean, g)
