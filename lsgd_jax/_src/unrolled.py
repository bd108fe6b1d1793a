"""Workers that share a device, one after the other where a vmapped network is slow."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.extend.core import ClosedJaxpr, Jaxpr, jaxpr_as_fun

from lsgd_jax._src.uniform import jaxprs_of


T = TypeVar("T")

# More workers than this on a device stay vmapped: compile time grows with their number.
MOST = 8


def unrolled(fn: Callable[..., T]) -> Callable[..., T]:
    r"""A function of one worker, compiled for each worker apart where they share a device.

    `Workers` vmaps what one worker computes over the workers of a device. That makes a
    grouped convolution of a convolution whose weights differ by worker, for which XLA has
    no fast kernels on CPUs. Around what takes a worker's gradient, this has the workers
    come one after the other in the compiled program:

    .. math::
      (f(a_1), \ldots, f(a_k)) \quad \text{in place of} \quad \text{vmap}(f)(a)

    The values are the same to rounding. It changes nothing where there are no convolutions,
    where the function communicates along the workers' axes, on a device of one worker or of
    more than 8 (compile time grows with their number), and outside `Workers.map`.

    Args:
      fn: a function of arrays, most often ``jax.value_and_grad(loss)``; it may close over
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
        if not _gains(closed.jaxpr):
            return fn(*args)
        leaves = closed.consts + jax.tree.leaves(args)
        results = _one_after_the_other(closed.jaxpr)(*leaves)
        return jax.tree.unflatten(jax.tree.structure(shapes), results)

    return call


def _one_after_the_other(jaxpr: Jaxpr) -> Callable[..., list[Any]]:
    """A function that evaluates a jaxpr: (constants and inputs) -> outputs."""
    count = len(jaxpr.constvars)

    @jax.jit  # lowered once, called for each worker
    def once(*leaves: Any) -> list[Any]:
        return jaxpr_as_fun(ClosedJaxpr(jaxpr, leaves[:count]))(*leaves[count:])

    @custom_vmap
    def evaluate(*leaves: Any) -> list[Any]:
        return once(*leaves)

    @evaluate.def_vmap
    def _(size: int, batched: Sequence[bool], *leaves: Any) -> tuple[list[Any], list[bool]]:
        if size > MOST:
            axes = [0 if of_worker else None for of_worker in batched]
            results = jax.vmap(once, axes, 0, axis_size=size)(*leaves)
        else:
            of = lambda i: [x[i] if own else x for x, own in zip(leaves, batched)]
            # Each may stand for the workers of another axis, which come one by one as well.
            each = [evaluate(*of(i)) for i in range(size)]
            results = [jnp.stack(values) for values in zip(*each)]
        return results, [True] * len(results)

    return evaluate


def _gains(jaxpr: Jaxpr) -> bool:
    """Whether there are convolutions, and nothing that needs the other workers."""
    primitives = list(_primitives(jaxpr))
    talks = any("axis_index" in name or axes for name, axes in primitives)
    return not talks and any(name == "conv_general_dilated" for name, _ in primitives)


def _primitives(jaxpr: Jaxpr) -> Iterator[tuple[str, bool]]:
    """The name of each primitive, and whether it names axes of workers."""
    for eqn in jaxpr.eqns:
        named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        named = named if isinstance(named, tuple) else (named,)
        yield eqn.primitive.name, any(isinstance(axis, str) for axis in named)
        for inner in jaxprs_of(eqn):
            yield from _primitives(inner)
