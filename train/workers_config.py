"""The grid of workers of a run, and the devices inside a worker."""

import dataclasses
import math

import lsgd_jax as lj


MOST_WORKERS = 2**16  # to place many more takes jax longer than any run


@dataclasses.dataclass(frozen=True)
class WorkersConfig:
    """The grid of workers. A run may be resumed with another one (see --resume)."""

    # Number of nodes (groups of workers with a fast interconnect).
    nodes: int = 2
    # Number of workers in each node.
    locals: int = 4
    # Devices of each worker, as mesh axes NAME=SIZE (such as fsdp=4): its parameters, its
    # optimizer's state and its batches are sharded over all of them.
    inside: tuple[str, ...] = ()

    def __post_init__(self):
        lj.checks.check_positive_int("workers.nodes", self.nodes)
        lj.checks.check_positive_int("workers.locals", self.locals)
        if self.nodes * self.locals > MOST_WORKERS:
            raise ValueError(
                f"`workers.nodes` times `workers.locals` must be at most {MOST_WORKERS:,}, "
                f"got {self.nodes} x {self.locals}"
            )
        pairs = [axis.partition("=") for axis in self.inside]
        names = {name for name, _, _ in pairs}
        sizes = all(size.isdecimal() and int(size) > 0 for _, _, size in pairs)
        named = all(name.isidentifier() for name in names) and len(names) == len(pairs)
        if not (sizes and named):
            raise ValueError(
                "`workers.inside` must be different names with sizes, such as fsdp=4, got "
                f"workers.inside={' '.join(self.inside)}"
            )

    @property
    def axes(self) -> dict[str, int]:
        """The axes inside a worker and their sizes.

        >>> WorkersConfig(inside=("fsdp=2", "model=4")).axes
        {'fsdp': 2, 'model': 4}
        """
        pairs = (axis.split("=") for axis in self.inside)
        return {name: int(size) for name, size in pairs}

    @property
    def devices_each(self) -> int:
        """How many devices a worker has."""
        return math.prod(self.axes.values())

    @property
    def devices(self) -> int:
        """How many devices there are for one of them per worker, or per part of one."""
        return self.nodes * self.locals * self.devices_each
