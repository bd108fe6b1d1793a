"""Tells that the workers of a node never meet, though a method exchanges between nodes.

``lj.diloco(axes="node")`` takes the mean over worker 0 of all nodes, over worker 1 of all
nodes, and so on. It is the upper half of a method with two levels. Without a collective
along 'local', the nodes together train as many models as one node has workers.

Nodes that never meet are no such fault: methods along 'local' alone train an instance in
every node.
"""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence

from jax.extend.core import Jaxpr

from lsgd_jax._src.exchange.noted import Exchanged
from lsgd_jax._src.wire.collectives import parts_of, unsplit
from lsgd_jax._src.workers.uniform import SILENT, axes_of, equations


class Meetings:
    """The axes along which the programs of a `Workers` communicate."""

    def __init__(self) -> None:
        self._met: set[str] = set()
        self._has_told = False

    def check(
        self, jaxpr: Jaxpr, exchanges: Sequence[Exchanged], axes: Mapping[str, int]
    ) -> None:
        """Warns once if the workers of a node never meet in a program that exchanges.

        Gradients may be averaged in a program of their own, so programs that were traced
        before count, too.

        Args:
          jaxpr: the program of one worker.
          exchanges: the exchanges in it.
          axes: the names and sizes of the axes of workers, on the mesh and vmapped.
        """
        # A mean of scalars is one of losses or metrics, unless the model is scalar itself.
        is_scalar = bool(exchanges) and not any(each.has_arrays for each in exchanges)
        self._met.update(_met(jaxpr, with_scalars=is_scalar))
        exchanged = {parts_of(axis)[0] for each in exchanges for axis in each.axes}
        local = parts_of("local")[0]
        count = math.prod(size for name, size in axes.items() if unsplit(name) == local)
        is_apart = exchanged and count > 1 and local not in exchanged | self._met
        # A silent program does not have the collectives of its other phases.
        is_silent = all(each.is_silent for each in exchanges)
        if self._has_told or is_silent or not is_apart:
            return
        warnings.warn(_advice(exchanged, local, count), stacklevel=2)
        self._has_told = True


def _met(jaxpr: Jaxpr, with_scalars: bool) -> Iterator[str]:
    """Yields the axes of collectives that carry arrays, or also of those of scalars."""
    for eqn in equations(jaxpr):
        carries_arrays = any(getattr(x.aval, "ndim", 0) for x in eqn.invars)
        if eqn.primitive.name not in SILENT and (with_scalars or carries_arrays):
            yield from map(unsplit, axes_of(eqn))


def _advice(exchanged: set[str], local: str, count: int) -> str:
    along = " and ".join(map(repr, sorted(exchanged)))
    return (
        f"the workers of a node never meet: the method exchanges along {along}, and "
        f"nothing communicates along {local!r}, so {count} models train apart; average "
        f"gradients inside the node with `optax.chain(lj.allreduce(axes={local!r}), ..., "
        f"lj.diloco(axes={along}))`, or in the optimizer of the step that `lj.around` or "
        "`lj.outer` stands around, or leave out `axes=`, so that the method reaches all "
        "workers"
    )
