"""Aggregations of gradients that hold against wrong workers."""

from lsgd_jax._src.methods.robust import cge as cge
from lsgd_jax._src.methods.robust import coordinate_median as coordinate_median
from lsgd_jax._src.methods.robust import geometric_median as geometric_median
from lsgd_jax._src.methods.robust import krum as krum
from lsgd_jax._src.methods.robust import licm as licm
from lsgd_jax._src.methods.robust import trimmed_mean as trimmed_mean
