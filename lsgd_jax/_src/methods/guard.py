"""EDiT's guard: pseudo-gradients weigh by their norms, and anomalous ones are dropped.

Cheng et al. EDiT: A Local-SGD-Based Efficient Distributed Training Method for Large
Language Models. ICLR 2025, arXiv:2412.07210.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from lsgd_jax._src import trees
from lsgd_jax._src.checks import check_fraction, check_positive_int
from lsgd_jax._src.methods.blocks import leaf_norms, times
from lsgd_jax._src.norms import norm, squares
from lsgd_jax._src.trees import Tree
from lsgd_jax._src.wire.group import Group


@dataclasses.dataclass(frozen=True)
class Guard:
    r"""Guards `diloco` and `anchored` against pseudo-gradients that are too large.

    At every exchange, for each block (the whole model, or every leaf if layerwise), with
    :math:`\Delta_i = a - y_i` and :math:`G_i = |\Delta_i|_2`:

    .. math::
      \text{bad}_i &\;=\; \text{count}_i \ge n \;\wedge\;
        Z_i(G_i) > \theta \max(1, \text{std of the last } n \; Z_i) \\
      w_i &\propto e^{-G_i / T}, \quad 0 \text{ for a bad worker} \\
      \Delta &= \sum_i w_i \Delta_i, \qquad
      \Delta \leftarrow \Delta \min \bigl(1, \phi / (|\Delta|_2 + 10^{-6}) \bigr)

    A block for which all workers are bad is rolled back: its anchor and its outer state
    stay, and the workers return to the anchor.

    :math:`Z_i(G) = (G - M_i) / \sqrt{V_i}`, 0 for the first n - 1 exchanges, is worker i's
    running z-score. All finite norms renew it after the test, outliers too, from M = V = 0:

    .. math::
      d = G - M, \qquad M \leftarrow M + \kappa d, \qquad
      V \leftarrow (1 - \kappa) \bigl(V + \kappa d \, (G - M)\bigr)

    M starts at 0, so that with a small κ a short warm-up finds every norm large.

    Attributes:
      temperature: T > 0, in units of the norms. A worker whose norm is several T above the
        smallest one has practically no weight; infinity weighs all alike.
      threshold: θ > 0.
      warmup: n ≥ 2, exchanges before the first test, and the length of the window.
      decay: κ in [0, 1].
      clip: φ > 0, the largest norm of Δ; None: no limit.
      layerwise: whether each leaf is a block, with an outer state of its own.

    Raises:
      ValueError: a temperature, threshold or clip that is not positive, a warm-up below 2,
        κ outside [0, 1].

    Reference: Cheng et al., ICLR 2025, arXiv:2412.07210; equations and defaults as in the
    authors' code, but for the temperature, which is None there.

    >>> import optax, lsgd_jax as lj
    >>> guarded = lj.diloco(period=100, guard=lj.Guard(temperature=1.0, clip=10.0))
    """

    temperature: float = 1.0
    threshold: float = 3.0
    warmup: int = 120
    decay: float = 0.02
    clip: float | None = None
    layerwise: bool = False

    def __post_init__(self):
        positive = ["temperature", "threshold", *["clip"] * (self.clip is not None)]
        for name in positive:
            value = getattr(self, name)
            if not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"`{name}` must be positive, got {name}={value!r}")
        check_positive_int("warmup", self.warmup)
        if self.warmup < 2:
            raise ValueError(
                f"`warmup` must be at least 2 exchanges, got warmup={self.warmup}"
            )
        check_fraction("decay", self.decay)

    def norms(self, deltas: Tree) -> Array:
        """G of every block: [B]."""
        norms = leaf_norms(deltas)
        return norms if self.layerwise else norm(squares(norms))[None]

    def clipped(self, delta: Tree) -> Tree:
        """Δ, with blocks of a norm of φ at most."""
        if self.clip is None:
            return delta
        return times(delta, jnp.minimum(1, self.clip / (self.norms(delta) + 1e-6)))


class Detector(NamedTuple):
    """A worker's running z-test of the norms of its B blocks; per worker.

    Attributes:
      mean: float [B], M.
      variance: float [B], V.
      window: float [n, B], the last z-scores, a ring.
      count: int32 scalar, the norms seen.
    """

    mean: Array
    variance: Array
    window: Array
    count: Array

    @classmethod
    def start(cls, guard: Guard, params: Tree) -> "Detector":
        """Before the first exchange."""
        zero = guard.norms(trees.zeros(params))
        window = jnp.zeros([guard.warmup, *zero.shape], zero.dtype)
        return cls(zero, zero, window, jnp.int32(0))

    def z(self, norms: Array, guard: Guard) -> Array:
        """The z-score of every block: [B]."""
        gap = norms - self.mean
        has_spread = (self.variance > 0) & (self.count >= guard.warmup)
        spread = jnp.sqrt(jnp.where(has_spread, self.variance, 1))
        return jnp.where(has_spread, gap / spread, 0)

    def is_anomaly(self, norms: Array, guard: Guard) -> Array:
        """Whether the norms are too large: bool [B]."""
        spread = jnp.std(self.window, axis=0, ddof=1)
        too_large = self.z(norms, guard) > guard.threshold * jnp.maximum(1, spread)
        return too_large & (self.count >= guard.warmup)

    def after(self, norms: Array, guard: Guard) -> "Detector":
        """The detector that has seen these norms, too."""
        gap = norms - self.mean
        mean = self.mean + guard.decay * gap
        renewed = self.variance + guard.decay * gap * (norms - mean)
        # A square that overflows would stay.
        renewed = jnp.where(jnp.isfinite(renewed), renewed, self.variance)
        seen = Detector(mean, (1 - guard.decay) * renewed, self.window, self.count + 1)
        window = self.window.at[self.count % guard.warmup].set(seen.z(norms, guard))
        return seen._replace(window=window)


def weigh(
    guard: Guard, group: Group, deltas: Tree, detector: Detector, takes_part: Array
) -> tuple[Array, Any]:
    """The weights of all workers' pseudo-gradients, and this worker's detector after them.

    Args:
      guard: the guard.
      group: the workers.
      deltas: this worker's pseudo-gradient.
      detector: of this worker.
      takes_part: bool scalar, whether this worker counts.

    Returns:
      (weights, detector). weights: float [W, B], equal on all workers; a column sums to 1,
      or to 0 if no worker is fit in that block.
    """
    norms = guard.norms(deltas)
    counts = takes_part & jnp.isfinite(norms).all()
    fit = counts & ~detector.is_anomaly(norms, guard)
    scores = group.gather(jnp.where(fit, -norms / guard.temperature, -jnp.inf))
    scores = jnp.where(jnp.isnan(scores), -jnp.inf, scores)  # of a worker that has failed
    best = scores.max(axis=0, keepdims=True)
    raw = jnp.exp(scores - jnp.where(jnp.isfinite(best), best, 0))
    # The largest term is 1, so that a sum below it is that of no worker.
    weights = raw / jnp.maximum(raw.sum(axis=0, keepdims=True), 1)
    seen = detector.after(norms, guard)
    return weights, jax.tree.map(lambda a, b: jnp.where(counts, a, b), seen, detector)
