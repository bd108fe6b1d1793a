"""Asynchronous workers on Ray; needs the extra `async`."""

from lsgd_jax._src.asynchronous.ray_cluster import cluster as cluster
from lsgd_jax._src.asynchronous.ray_engine import Options as Options
from lsgd_jax._src.asynchronous.ray_engine import Outcome as Outcome
from lsgd_jax._src.asynchronous.ray_engine import Remote as Remote
from lsgd_jax._src.asynchronous.ray_engine import run as run
from lsgd_jax._src.asynchronous.ray_join import join as join
