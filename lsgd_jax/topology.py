"""Graphs of workers for gossip."""

from lsgd_jax._src.topology import Graph as Graph
from lsgd_jax._src.topology import Topology as Topology
from lsgd_jax._src.topology import bipartite_exponential as bipartite_exponential
from lsgd_jax._src.topology import complete as complete
from lsgd_jax._src.topology import exponential as exponential
from lsgd_jax._src.topology import from_edges as from_edges
from lsgd_jax._src.topology import matchings as matchings
from lsgd_jax._src.topology import metropolis as metropolis
from lsgd_jax._src.topology import ring as ring
