"""Asynchronous workers on Ray; needs the extra `async`."""

from lsgd_jax._src.asynchronous.ray.cluster import cluster as cluster
from lsgd_jax._src.asynchronous.ray.engine import Options as Options
from lsgd_jax._src.asynchronous.ray.engine import Outcome as Outcome
from lsgd_jax._src.asynchronous.ray.engine import Remote as Remote
from lsgd_jax._src.asynchronous.ray.engine import run as run
from lsgd_jax._src.asynchronous.ray.join import join as join
