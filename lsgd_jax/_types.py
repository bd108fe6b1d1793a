"""Moved: see `lsgd_jax.shared` and `lsgd_jax.trees`."""

from lsgd_jax.shared import Shared as Shared
from lsgd_jax.shared import is_shared as is_shared
from lsgd_jax.trees import Tree as Tree
