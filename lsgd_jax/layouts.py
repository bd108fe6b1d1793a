"""Layouts of a worker's leaves over the devices that it has inside."""

from lsgd_jax._src.layouts import following as following
from lsgd_jax._src.layouts import inside_axes as inside_axes
from lsgd_jax._src.layouts import largest_dimension as largest_dimension
