"""Clusters that others have published: their networks and the speeds of their workers."""

from collections.abc import Mapping
from typing import NamedTuple

from lsgd_jax._src.asynchronous.simulated.network import Network
from lsgd_jax._src.asynchronous.simulated.speeds import Speeds


class World(NamedTuple):
    """A published cluster.

    Attributes:
      network: its links.
      speeds: how long steps take.
      nodes, locals: the grid of workers.
      parameters: number of parameters of the model that was trained.
    """

    network: Network
    speeds: Speeds
    nodes: int
    locals: int
    parameters: float


GBIT = 1e9 / 8  # bytes per second

# HALoS, 2025, arXiv:2506.04531; utnslab/halos, examples/env.yaml and pythia_70m_commons.sh:
# Gbit/s between four regions, and the speeds of the four workers of each.
_BETWEEN = (
    (100.0, 0.537, 0.935, 0.202),
    (0.537, 100.0, 0.386, 0.117),
    (0.935, 0.386, 100.0, 0.127),
    (0.202, 0.117, 0.127, 100.0),
)
_SPEEDS = (
    *(0.232, 0.907, 0.828, 0.347),
    *(0.574, 0.531, 0.722, 0.194),
    *(0.852, 0.132, 0.896, 0.107),
    *(0.827, 0.515, 0.527, 0.788),
)

WORLDS: Mapping[str, World] = {
    "halos": World(
        Network(
            0.127 * GBIT,  # the slowest link of the best ring
            0.0,
            100 * GBIT,
            0.0,
            between=[[GBIT * rate for rate in row] for row in _BETWEEN],
        ),
        Speeds(0.238391, {i: max(_SPEEDS) / speed for i, speed in enumerate(_SPEEDS)}),
        nodes=4,
        locals=4,
        parameters=70_426_624,  # Pythia-70M
    ),
}
