"""Where a worker stands among all workers."""

from typing import NamedTuple


class Place(NamedTuple):
    """Where a worker stands in the node x local grid.

    Attributes:
      index: node · locals + local.
      nodes, locals: the size of the grid.
    """

    index: int
    nodes: int
    locals: int

    @property
    def workers(self) -> int:
        """W, how many workers there are."""
        return self.nodes * self.locals

    def group(self, axes: str | tuple[str, ...]) -> list[int]:
        """The workers that differ from this one along these axes only, in order.

        >>> Place(index=4, nodes=2, locals=3).group("local")
        [3, 4, 5]
        >>> Place(index=4, nodes=2, locals=3).group("node")
        [1, 4]
        """
        names = (axes,) if isinstance(axes, str) else axes
        node, local = divmod(self.index, self.locals)
        nodes = range(self.nodes) if "node" in names else [node]
        locals = range(self.locals) if "local" in names else [local]
        return [n * self.locals + i for n in nodes for i in locals]
