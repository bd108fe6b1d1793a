"""Makes a table whole before a lookup, where XLA would abort the process.

XLA's partitioner aborts on many lookups in a sharded table if some mesh axes are manual and
at least two others are larger than 1, which is the mesh of `Workers.map` with two axes
inside a worker. The rows may be sharded over one of the two axes, or the columns over the
axis of the indices (tests/lsgd_jax/workers/test_lookups.py has a program). Nothing tells
how XLA will shard a table on automatic axes. So every table is whole on each device, except
along the batch dimensions of the lookup.
"""

from typing import Any

import jax
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import PartitionSpec as Spec

from lsgd_jax._src.layouts import inside_axes


def with_whole_tables(jaxpr: Any) -> Any:
    """Returns a jaxpr with whole tables; also takes any parameter of an equation."""
    if isinstance(jaxpr, Jaxpr):  # in jax 0.12 a ClosedJaxpr, too
        return jaxpr.replace(eqns=list(map(_equation, jaxpr.eqns)))
    if isinstance(jaxpr, ClosedJaxpr):
        return jaxpr.replace(jaxpr=with_whole_tables(jaxpr.jaxpr))
    if type(jaxpr) in (tuple, list):
        return type(jaxpr)(map(with_whole_tables, jaxpr))
    return jaxpr


def _equation(eqn: Any) -> Any:
    name = eqn.primitive.name
    if name == "gather" or name.startswith("scatter"):
        with eqn.ctx.manager:
            return _on_whole_table(eqn) if len(inside_axes()) > 1 else eqn
    if name == "pallas_call":
        return eqn
    params = {name: with_whole_tables(x) for name, x in eqn.params.items()}
    return eqn.replace(params=params)


def _on_whole_table(eqn: Any) -> Any:
    """The same lookup, or the sum of its gradients, with a table that is not sharded."""
    batch = eqn.params["dimension_numbers"].operand_batching_dims

    def run(table: jax.Array, *operands: jax.Array) -> jax.Array:
        result = eqn.primitive.bind(_whole(table, batch), *operands, **eqn.params)
        return result if eqn.primitive.name == "gather" else _whole(result, batch)

    shapes = (x.aval for x in eqn.invars)
    (whole,) = jax.make_jaxpr(jax.jit(run))(*shapes).jaxpr.eqns
    return whole.replace(invars=eqn.invars, outvars=eqn.outvars)


def _whole(x: jax.Array, kept: tuple[int, ...]) -> jax.Array:
    """The array, sharded along the kept dimensions only."""
    sharding = jax.typeof(x).sharding
    if sharding.mesh.explicit_axes:
        own = (*sharding.spec, *[None] * x.ndim)
        entries = [own[d] if d in kept else None for d in range(x.ndim)]
        return jax.reshard(x, Spec(*entries))
    each = (Spec.UNCONSTRAINED if d in kept else None for d in range(x.ndim))
    return lax.with_sharding_constraint(x, Spec(*each))
