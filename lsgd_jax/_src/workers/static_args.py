"""The arguments of a method that must be known before tracing."""

import inspect
from collections.abc import Callable
from typing import get_args

import optax


def static_args(method: Callable) -> tuple[str, ...]:
    """Returns the names of a method's arguments that must not be traced.

    Pass them to `optax.inject_hyperparams`, which makes a traced number of every other
    argument. Periods, windows and options must be known before tracing. Only arguments that
    take a schedule may be traced.

    Args:
      method: a factory of this library, such as `lsgd`.

    >>> import optax
    >>> import lsgd_jax as lj
    >>> lj.static_args(lj.easgd)
    ('period', 'order', 'axes', 'wire', 'fragments', 'delay', 'late', 'after', 'part',
     'scan_axis', 'memory', 'verify', 'check')
    >>> tx = optax.inject_hyperparams(lj.easgd, lj.static_args(lj.easgd))(beta=0.4)
    """
    schedule = set(get_args(optax.ScalarOrSchedule))
    return tuple(
        name
        for name, argument in inspect.signature(method).parameters.items()
        if not schedule <= set(get_args(argument.annotation))
    )
