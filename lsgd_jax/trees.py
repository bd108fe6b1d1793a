"""Arithmetic on whole pytrees, in float32 at least."""

from typing import Any


Tree = Any  # a pytree of arrays
