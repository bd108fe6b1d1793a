"""How the learning rate changes over a run."""

import math
from typing import Any

import jax.numpy as jnp
import optax

from train.config import OptimizerConfig


def learning_rate(options: OptimizerConfig, steps: int) -> optax.ScalarOrSchedule:
    r"""The learning rate, a schedule of the steps already taken if it is not constant.

    With η the learning rate, T the steps of the run, w the warm-up's, f the final fraction,
    the rate of the first step being that at k = 0:

    .. math::
      \eta_k = \eta \, \frac{k + 1}{w} \quad (k < w), \qquad
      \eta_k = \eta \Big( f + (1 - f) \frac{1 + \cos \pi x}{2} \Big), \quad
      x = \frac{k - w}{T - w} \quad \text{(cosine)}

    'drops' multiplies η by the factor at each of the steps named instead. No step has a
    rate of 0, by which SlowMo would divide.

    Args:
      options: those of the optimizer.
      steps: T.

    >>> options = OptimizerConfig(learning_rate=0.5, schedule="drops", drop_at=(10,))
    >>> rate = learning_rate(options, steps=20)
    >>> [round(float(rate(step)), 3) for step in (0, 9, 10)]
    [0.5, 0.5, 0.05]
    """
    after = _after_warmup(options, steps)
    warmup, peak = options.warmup_steps, options.learning_rate
    if not warmup:
        return after
    rest = after if callable(after) else optax.constant_schedule(after)

    def rising(k: Any) -> Any:
        return jnp.where(k < warmup, peak * (k + 1) / warmup, rest(k))

    return rising


def _after_warmup(options: OptimizerConfig, steps: int) -> optax.ScalarOrSchedule:
    peak, final, warmup = (
        options.learning_rate,
        options.final_fraction,
        options.warmup_steps,
    )
    if options.schedule == "drops":
        drops = dict.fromkeys(options.drop_at, options.drop_factor)
        return optax.piecewise_constant_schedule(peak, drops)
    if options.schedule == "constant":
        return peak

    def cosine(k: Any) -> Any:
        done = jnp.clip((k - warmup) / (steps - warmup), 0, 1)
        return peak * (final + (1 - final) * (1 + jnp.cos(math.pi * done)) / 2)

    return cosine
