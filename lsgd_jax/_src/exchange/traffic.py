"""Traffic counters of a pull, exact and part of its state.

The step count does not give them: a run may resume with another period, another wire format
or another number of workers.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from lsgd_jax._src.shared import Axes, Shared


LIMB = 2**30  # bytes are counted in two int32: an exchange may send more than 2**31


class Traffic(NamedTuple):
    """Traffic counters of one pull, identical on all workers.

    Attributes:
      exchanges: int32 scalar, the number of exchanges so far.
      bytes_sent: int32 [2], bytes that each worker has sent: 2**30 times the first plus
        the second; bytes_each: likewise for one exchange, 0 before the first.
      every, sends_at: int32 scalars; workers communicate at t ≡ sends_at (mod every), as
        long as the period is the same; [F] for fragments that are stacked.
      axes: the mesh axes of the group, as the keys of a dictionary without leaves.
    """

    exchanges: Shared[Array]
    bytes_sent: Shared[Array]
    bytes_each: Shared[Array]
    every: Shared[Array]
    sends_at: Shared[Array]
    axes: dict[str, None]

    @classmethod
    def zero(cls, axes: Axes, every: Any, sends_at: Any) -> "Traffic":
        """Returns the counters before the first step."""
        names = (axes,) if isinstance(axes, str) else axes
        return cls(
            exchanges=Shared(jnp.int32(0)),
            bytes_sent=Shared(jnp.zeros([2], jnp.int32)),
            bytes_each=Shared(jnp.zeros([2], jnp.int32)),
            every=Shared(jnp.int32(every)),
            sends_at=Shared(jnp.int32(sends_at)),
            axes=dict.fromkeys(names),
        )

    def of(self, every: Any, sends_at: Any) -> "Traffic":
        """Returns the counters of a pull whose period may have changed since `init`.

        every, sends_at: see `Schedule.message_steps`.
        """
        at = jnp.asarray(sends_at, jnp.int32)
        period = jnp.broadcast_to(jnp.asarray(every, jnp.int32), at.shape)
        return self._replace(every=Shared(period), sends_at=Shared(at))

    def sent(self, bytes_each: float) -> "Traffic":
        """Returns the counters after one more exchange of so many bytes."""
        after = self.each(bytes_each)
        # By hand, because jax has int64 only in the 64-bit mode. Two limbs below 2³⁰ do not
        # overflow.
        high, low = self.bytes_sent.value + after.bytes_each.value
        return after._replace(
            exchanges=Shared(self.exchanges.value + jnp.int32(1)),
            bytes_sent=Shared(jnp.stack([high + low // LIMB, low % LIMB])),
        )

    def each(self, bytes_each: float) -> "Traffic":
        """Returns the counters of a pull that sends so many bytes per exchange."""
        limbs = jnp.array(divmod(round(bytes_each), LIMB), jnp.int32)
        shape = self.bytes_each.value.shape
        return self._replace(bytes_each=Shared(jnp.broadcast_to(limbs, shape)))


def total(limbs: Any) -> int:
    """Returns the number that two limbs represent.

    >>> total([3, 5])
    3221225477
    """
    high, low = np.asarray(limbs).tolist()
    return high * LIMB + low
