"""The arguments of a method that must be known before tracing."""

import inspect
from collections.abc import Callable
from typing import get_args

import optax


def static_args(method: Callable) -> tuple[str, ...]:
    """The names of a method's arguments that take no schedule, so that none is traced.

    For `optax.inject_hyperparams`, which makes a traced number of every other argument:
    periods, windows and what switches a part of the method on must be known before.

    Args:
      method: a factory of this library, such as `lsgd`.

    >>> import optax
    >>> import lsgd_jax as lj
    >>> lj.static_args(lj.easgd)
    ('period', 'order', 'check', 'axes', 'wire', 'part', 'memory')
    >>> tx = optax.inject_hyperparams(lj.easgd, lj.static_args(lj.easgd))(beta=0.4)
    """
    schedule = set(get_args(optax.ScalarOrSchedule))
    return tuple(
        name
        for name, argument in inspect.signature(method).parameters.items()
        if not schedule <= set(get_args(argument.annotation))
    )
