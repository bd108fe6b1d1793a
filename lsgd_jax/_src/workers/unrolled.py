"""Runs workers that share a device one after the other if a vmapped network is slow."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from lsgd_jax._src.workers.uniform import axes_of, equations


T = TypeVar("T")

# More workers per device stay vmapped, because compile time grows with their number.
MOST = 8


def unrolled(fn: Callable[..., T]) -> Callable[..., T]:
    r"""Compiles a function of one worker separately for each worker of a device.

    `Workers` vmaps the function of one worker over the workers of a device. A convolution
    whose weights differ between workers thereby becomes a grouped convolution, for which
    XLA has no fast kernels on CPUs. Wrapped around the function that computes a worker's
    gradient, `unrolled` runs the workers one after the other in the compiled program:

    .. math::
      (f(a_1), \ldots, f(a_k)) \quad \text{in place of} \quad \text{vmap}(f)(a)

    The values are equal up to rounding. The function stays vmapped if it has no
    convolutions, if it communicates along the workers' axes, if a device has one worker or
    more than 8 (compile time grows with their number), and outside `Workers.map`.

    Args:
      fn: a function of arrays, most often ``jax.value_and_grad(loss)``. It may close over
        traced values, and must not be differentiated.

    >>> import jax, jax.numpy as jnp
    >>> import lsgd_jax as lj
    >>> workers = lj.Workers(nodes=1, locals=2, devices=jax.devices()[:1])
    >>> square = lj.unrolled(jax.value_and_grad(lambda x: x**2))
    >>> [part.tolist() for part in workers.map(square)(workers.put(jnp.array([1.0, 3.0])))]
    [[1.0, 9.0], [2.0, 6.0]]
    """

    @functools.wraps(fn)
    def call(*args: Any) -> T:
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        eqns = list(equations(closed.jaxpr))
        convolves = any(eqn.primitive.name == "conv_general_dilated" for eqn in eqns)
        if not convolves or any(map(axes_of, eqns)):
            return fn(*args)
        leaves = closed.consts + jax.tree.leaves(args)
        results = _one_after_the_other(closed.jaxpr)(*leaves)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return call


def _one_after_the_other(jaxpr: Jaxpr) -> Callable[..., list[Any]]:
    """Returns a function that evaluates a jaxpr: (constants and inputs) -> outputs."""
    count = len(jaxpr.constvars)

    @jax.jit  # lowered once, called for each worker
    def once(*leaves: Any) -> list[Any]:
        return jaxpr_as_fun(ClosedJaxpr(jaxpr, leaves[:count]))(*leaves[count:])

    evaluate = custom_vmap(once)

    @evaluate.def_vmap
    def _(size: int, batched: Sequence[bool], *leaves: Any) -> tuple[list[Any], list[bool]]:
        if size > MOST:
            axes = [0 if of_worker else None for of_worker in batched]
            results = jax.vmap(once, axes, 0, axis_size=size)(*leaves)
        else:

            def of(i):
                return [x[i] if own else x for x, own in zip(leaves, batched)]

            # Under two vmapped axes, each call is itself unrolled over the other axis.
            each = [evaluate(*of(i)) for i in range(size)]
            results = [jnp.stack(values) for values in zip(*each)]
        return results, [True] * len(results)

    return evaluate
