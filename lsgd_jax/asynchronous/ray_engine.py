"""Asynchronous workers on Ray; needs the extra `async`."""

from typing import TYPE_CHECKING

from lsgd_jax._src.asynchronous.ray.cluster import cluster as cluster
from lsgd_jax._src.asynchronous.ray.engine import ClusterOptions as ClusterOptions
from lsgd_jax._src.asynchronous.ray.engine import Outcome as Outcome
from lsgd_jax._src.asynchronous.ray.engine import Remote as Remote
from lsgd_jax._src.asynchronous.ray.engine import run as run
from lsgd_jax._src.asynchronous.ray.join import join as join
from lsgd_jax._src.moved import renamed as _renamed


if not TYPE_CHECKING:  # a type checker would accept any name
    __getattr__ = _renamed(__name__, Options=ClusterOptions)
