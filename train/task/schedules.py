"""The schedule of the learning rate."""

import optax

from train.config.schema import OptimizerConfig


def learning_rate(options: OptimizerConfig, steps: int) -> optax.ScalarOrSchedule:
    r"""The learning rate: a number, or a schedule η_k, where k counts steps from 0.

    With the learning rate η, T steps in total, w steps of warm-up and the final fraction f:

    .. math::
      \eta_k = \eta \, \frac{k + 1}{w} \quad (k < w), \qquad
      \eta_k = \eta \Big( f + (1 - f) \frac{1 + \cos \pi x}{2} \Big), \quad
      x = \frac{k - w}{T - w} \quad \text{(cosine)}, \\
      \eta_k = \eta \sqrt{\frac{\max(w, 1)}{k + 1}} \quad
      \text{(inverse-sqrt; Vaswani et al., NeurIPS 2017, section 5.3)}

    The schedule 'drops' multiplies η by a factor at the given steps instead. The rate is
    never 0, because SlowMo divides by it.

    Args:
      options: the options of the optimizer.
      steps: T.

    >>> options = OptimizerConfig(learning_rate=0.5, schedule="drops", drop_at=(10,))
    >>> rate = learning_rate(options, steps=20)
    >>> [round(float(rate(step)), 3) for step in (0, 9, 10)]
    [0.5, 0.5, 0.05]
    """
    peak = options.learning_rate
    warmup = options.warmup_steps
    match options.schedule:
        case "constant":
            after = optax.constant_schedule(peak)
        case "drops":
            at = [step - warmup for step in options.drop_at]
            drops = dict.fromkeys(at, options.drop_factor)
            after = optax.piecewise_constant_schedule(peak, drops)
        case "cosine":
            final = options.final_fraction
            after = optax.cosine_decay_schedule(peak, steps - warmup, final)
        case "inverse-sqrt":

            def after(k):
                return peak * (max(warmup, 1) / (k + warmup + 1)) ** 0.5

    if not warmup:
        return peak if options.schedule == "constant" else after
    rising = optax.linear_schedule(peak / warmup, peak, warmup - 1)
    return optax.join_schedules([rising, after], [warmup])
