"""View: the leaves that a pull exchanges, of a worker that lies in a few buffers.

On a due step all leaves of a worker are packed once. The view of the whole worker is those
buffers. That of a part gets its leaves from them, and puts them back.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from lsgd_jax._src import trees
from lsgd_jax._src.exchange import parts
from lsgd_jax._src.trees import Tree
from lsgd_jax._src.wire.packing import Packing


class View(NamedTuple):
    """Some leaves of a worker, or all of them.

    u is the update of the worker, or y itself.

    Attributes:
      worker: the buffers in which the whole worker lies.
      packing: the buffers of these leaves.
      x: the leaves before the step.
      xs: x in the buffers if pulls move the worker by updates of x, otherwise None.
      part: the leaves, or None for all.
      is_update: whether u is an update of x.
    """

    worker: Packing
    packing: Packing
    x: Tree
    xs: list[Array] | None
    part: Any = None
    is_update: bool = False

    @classmethod
    def of(cls, x: Tree, is_update: bool, adds: bool) -> "View":
        """The view of a whole worker.

        is_update: whether u is an update of x, and not y itself.
        adds: whether pulls move the worker by updates of x.
        """
        packing = Packing(x)
        xs = packing.pack(x) if adds else None
        return cls(packing, packing, x, xs, is_update=is_update)

    def of_part(self, part: Any) -> "View":
        """The view of a part of this whole worker; None is all of it."""
        if part is None:
            return self
        x = parts.select(part, self.x)
        packing = Packing(x)
        xs = None if self.xs is None else packing.pack(x)
        return View(self.worker, packing, x, xs, part, self.is_update)

    @property
    def is_whole(self) -> bool:
        """Whether it has all leaves of the worker."""
        return self.part is None

    def get(self, worker: list[Array]) -> list[Array]:
        """Returns u of these leaves."""
        if self.is_whole:
            return worker
        # Packing again what was unpacked costs nothing: XLA joins the slices.
        return self.packing.pack(parts.select(self.part, self.worker.unpack(worker)))

    def put(self, worker: list[Array], u: list[Array]) -> list[Array]:
        """Returns the worker with u in place of these leaves."""
        if self.is_whole:
            return u
        own = self.packing.unpack(u)
        others = self.worker.unpack(worker)
        return self.worker.pack(parts.put_back(self.part, own, others))

    def y(self, u: list[Array]) -> Tree:
        """Returns the parameters: x + u in the dtypes of x, or u if it is y itself."""
        return self.packing.unpack(self._position(u))

    def all_finite(self, u: list[Array]) -> Array:
        """Whether all of y is finite."""
        y = self._position(u)
        # Leaves that keep their shapes may be sharded, as their paths tell.
        return trees.all_finite(self.packing.unpack(y) if self.packing.keeps_shapes else y)

    def _position(self, u: list[Array]) -> list[Array]:
        if self.xs is None:
            return u
        if self.is_update:
            return trees.plus(self.xs, u)
        # As in a chain, where nothing can be added to an x that is not finite.
        return jax.tree.map(lambda x, y: trees.where_finite(x, y, jnp.nan), self.xs, u)
