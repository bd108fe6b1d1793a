"""Asynchronous workers under simulated time."""

from lsgd_jax._src.asynchronous.simulated.simulator import Simulated as Simulated
from lsgd_jax._src.asynchronous.simulated.simulator import first_worker as first_worker
from lsgd_jax._src.asynchronous.simulated.simulator import run as run
