"""Where `Shared` and `Tree` once were."""

from lsgd_jax.shared import Shared, is_shared
from lsgd_jax.trees import Tree


__all__ = ["Grouped", "Shared", "Tree", "is_shared"]

Grouped = Shared
