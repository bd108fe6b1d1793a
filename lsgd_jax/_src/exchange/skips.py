"""Steps without a gradient, drawn from the number of the step alone.

All workers draw alike, and so does a host that counts the steps. It knows before a step
whether it needs a batch, a forward pass and the base optimizer.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Skips:
    """A share of the steps, which compute no gradient. The first step has one.

    Args:
      probability: p in [0, 1), with which a step is one of them.
      seed: of the draws.

    Raises:
      ValueError: a probability outside [0, 1), a seed that is no int.
    """

    probability: float
    seed: int = 0

    def __post_init__(self):
        if not 0 <= self.probability < 1:
            raise ValueError(
                f"`probability` must be in [0, 1), got probability={self.probability!r}"
            )
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"`seed` must be an int, got seed={self.seed!r}")

    def at(self, t: Any) -> Any:
        """Whether step t = 1, 2, … is one of them; an int, or an int32 array.

        An array of NumPy is answered on the host, by one of its own.
        """
        if self.probability == 0:
            return False
        limit = np.uint32(self.probability * 2**32)
        seed = np.uint32(self.seed % 2**32)
        if isinstance(t, int):
            return t > 1 and bool(_hash(np.full([1], t, np.uint32), seed)[0] < limit)
        if isinstance(t, np.ndarray):
            return (t > 1) & (_hash(t.astype(np.uint32), seed) < limit)
        return (t > 1) & (_hash(jnp.asarray(t).astype(jnp.uint32), seed) < limit)


def _hash(t: Any, seed: np.uint32) -> Any:
    """A number of 32 bits for each t, by the rounds of a hash function without a table."""
    x = t * np.uint32(0x9E3779B1) ^ seed
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))
