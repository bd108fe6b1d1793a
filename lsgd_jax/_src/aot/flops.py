"""Counts the floating-point operations of matrix products in a traced function.

XLA's own count (`cost_analysis`) takes the body of a loop once. It has none for GPUs.
"""

import math
from collections.abc import Iterable
from typing import Any


def flops(jaxpr: Any) -> int:
    """Operations of all products and convolutions, on all devices together.

    Takes a jaxpr, or a traced function: ``jitted.trace(*shapes)``. The body of a scan
    counts as often as it runs, that of another loop once, and of a condition the most
    expensive branch.

    >>> import jax, jax.numpy as jnp
    >>> f = lambda w, x: jax.lax.scan(lambda x, w: (x @ w @ w.T, None), x, w)
    >>> flops(jax.make_jaxpr(f)(jnp.ones((10, 4, 2)), jnp.ones((8, 4))))
    2560
    """
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return sum(map(_of_equation, inner.eqns))


def _of_equation(eqn: Any) -> int:
    name = eqn.primitive.name
    params = eqn.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        lhs = eqn.invars[0].aval.shape
        return 2 * eqn.outvars[0].aval.size * math.prod(lhs[d] for d in contracted)
    if name == "conv_general_dilated":
        kernel = eqn.invars[1].aval
        features = kernel.shape[params["dimension_numbers"].rhs_spec[0]]
        return 2 * eqn.outvars[0].aval.size * kernel.size // features
    if name == "pallas_call":
        return int(getattr(params.get("cost_estimate"), "flops", 0))
    inner = [flops(each) for each in _jaxprs(params.values())]
    if name == "cond":
        return max(inner)
    if name == "scan":
        return params["length"] * sum(inner)
    if name == "shard_map":
        sizes = params["mesh"].shape
        manual = params.get("newly_manual_axes", sizes)
        return math.prod(sizes[axis] for axis in manual) * sum(inner)
    return sum(inner)


def _jaxprs(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from _jaxprs(value)
        elif hasattr(value, "eqns") or hasattr(getattr(value, "jaxpr", None), "eqns"):
            yield value
