"""The optimizer of each worker: from options to an optax transformation."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from train.config.schema import OptimizerConfig


NEVER = np.iinfo(np.int32).max
# The decay rates of the two moments, where they are not those of Adam.
BETAS = {"lion": (0.9, 0.99)}


def make(
    options: OptimizerConfig, rate: optax.ScalarOrSchedule
) -> optax.GradientTransformation:
    """The optimizer, which skips gradients that are not finite and clips other gradients.

    Args:
      options: the options of the optimizer.
      rate: the learning rate from `schedules.learning_rate`.
    """
    parts = [_base(options, rate)]
    if options.clip is not None:
        parts.insert(0, optax.clip_by_global_norm(options.clip))
    # Otherwise a single NaN in a gradient would stay in the momentum forever.
    return optax.apply_if_finite(optax.chain(*parts), max_consecutive_errors=NEVER)


def _base(
    options: OptimizerConfig, rate: optax.ScalarOrSchedule
) -> optax.GradientTransformation:
    decay = options.weight_decay
    momentum = options.momentum
    nesterov = options.nesterov
    mask = matrices if options.decay_of == "matrices" else None
    b1, b2 = options.betas or BETAS.get(options.name, (0.9, 0.999))
    match options.name:
        case "sgd":
            sgd = optax.sgd(rate, momentum or None, nesterov=nesterov)
            return optax.chain(optax.add_decayed_weights(decay, mask), sgd)
        case "lars":
            return optax.lars(
                rate, decay, mask or True, momentum=momentum or 0.0, nesterov=nesterov
            )
        case "adamw":
            return optax.adamw(rate, b1, b2, options.eps, weight_decay=decay, mask=mask)
        case "lion":
            return optax.lion(rate, b1, b2, weight_decay=decay, mask=mask)
        case "muon":
            return optax.contrib.muon(
                rate,
                beta=0.95 if momentum is None else momentum,
                eps=options.eps,
                weight_decay=decay,
                adam_b1=b1,
                adam_b2=b2,
                adam_weight_decay=0.0 if mask else decay,
                muon_weight_dimension_numbers=_of_muon,
            )


def after_a_skip(state: Any) -> Any:
    """Returns the state of an optimizer after a step without a gradient.

    Its schedules count the step, so that they end with the run. Its moments and their bias
    corrections count gradients, and stay.

    >>> rate = optax.linear_schedule(1.0, 0.0, 10)
    >>> moments, scale = after_a_skip(optax.adam(rate).init(np.zeros(2)))
    >>> int(moments.count), int(scale.count)
    (0, 1)
    """
    return _with_counts(state, optax.safe_increment)


def at_step(state: Any, step: int) -> Any:
    """Returns the state of an optimizer that goes on at a step of another one.

    Its schedules take the step. Its moments and their bias corrections stay.

    >>> rate = optax.linear_schedule(1.0, 0.0, 10)
    >>> moments, scale = at_step(optax.adam(rate).init(np.zeros(2)), 7)
    >>> int(moments.count), int(scale.count)
    (0, 7)
    """
    return _with_counts(state, lambda count: jnp.full_like(count, step))


def _with_counts(state: Any, fn: Callable[[Any], Any]) -> Any:
    """The state with fn(count) in place of the count of each schedule."""

    def counted(node: Any) -> Any:
        if isinstance(node, optax.ScaleByScheduleState):
            return node._replace(count=fn(node.count))
        return node

    def is_schedule(node: Any) -> bool:
        return isinstance(node, optax.ScaleByScheduleState)

    return jax.tree.map(counted, state, is_leaf=is_schedule)


def matrices(params: Any) -> Any:
    """Whether each parameter is a matrix or a convolution, not a bias, scale or embedding.

    >>> matrices({"kernel": np.zeros((2, 2)), "bias": np.zeros(2)})
    {'bias': False, 'kernel': True}
    """

    def is_matrix(path: Any, x: Any) -> bool:
        return x.ndim > 1 and "embedding" not in jax.tree_util.keystr(path)

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def _of_muon(params: Any) -> Any:
    """The dimension numbers of muon for each parameter, or None for parameters of adamw."""

    def how(is_matrix, x):
        return optax.contrib.MuonDimensionNumbers() if is_matrix and x.ndim == 2 else None

    return jax.tree.map(how, matrices(params), params)
