"""Whole vectors of parameters on the wire between asynchronous workers."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lsgd_jax._src.codec import Codec, draws
from lsgd_jax._src.layouts import on_one_device
from lsgd_jax._src.wire import Wire, WireFormat


class Snapshot(NamedTuple):
    """A worker as others see it.

    Attributes:
      vector: its parameters, float32 [n].
      step: steps that it had taken.
      measure: decides how much is taken from it (dpwa: its clock or its loss).
      loss: its score, the mean of its last losses.
    """

    vector: Any
    step: int
    measure: float
    loss: float


class Packed(NamedTuple):
    """A vector of `size` elements as it travels: the arrays of a `Codec`'s message."""

    message: Any
    size: int


@dataclasses.dataclass(frozen=True)
class Compression:
    """The wire format of vectors that travel whole, float32 [n].

    No worker has to know what a peer has missed, as it would if differences traveled. The
    sender keeps the quantization error where it would be lost otherwise (sums, the anchor
    of DiLoCo, both sides of an exchange). A vector that is not finite travels as it is, so
    that whoever receives it can tell.

    Args:
      format: 'float32' (exact), 'bfloat16', 'int8', 'int4', one of the last three with
        '-stochastic', or a `Wire`.
      index: of the worker, whose draws are its own.

    Raises:
      ValueError: an unknown format, or 'top-k', which needs a difference to send.

    >>> vector = np.linspace(-1, 1, 512, dtype=np.float32)
    >>> wire = Compression("int8")
    >>> float(abs(wire.rounded(vector) - vector).max()) <= 1 / 254
    True
    >>> wire.nbytes(wire.pack(vector))
    520
    """

    format: Wire | WireFormat = "float32"
    index: int = 0

    def __post_init__(self):
        if self.wire.is_sparse:
            raise ValueError(
                "`wire` must not be 'top-k' where parameters travel whole, got "
                f"wire={self.format!r}"
            )

    @property
    def wire(self) -> Wire:
        """The format."""
        return Wire.of(self.format)

    @property
    def is_narrow(self) -> bool:
        """Whether anything is rounded."""
        return self.wire.format != "float32"

    def rounded(self, vector: np.ndarray, turn: int = 0) -> np.ndarray:
        """Q(x): the float32 vector that arrives when x is sent.

        turn: decides what is drawn. A worker that sends a vector again and again draws anew
          each time; otherwise some vectors would never move.
        """
        return self.unpack(self.pack(vector, turn))

    def pack(self, content: Any, turn: int = 0) -> Any:
        """A float32 vector as it is sent; all else as it is."""
        is_vector = isinstance(content, np.ndarray) and content.dtype == np.float32
        if not self.is_narrow or not is_vector or content.size == 1 or not finite(content):
            return content
        message = _encode(self.wire, content, np.int32(turn), np.int32(self.index))
        return Packed(jax.tree.map(np.asarray, message), content.size)

    def unpack(self, content: Any) -> Any:
        """The content that was packed."""
        if isinstance(content, Snapshot):
            return content._replace(vector=self.unpack(content.vector))
        if not isinstance(content, Packed):
            return content
        return np.asarray(_decode(self.wire, content.size, content.message))

    @staticmethod
    def nbytes(content: Any) -> int:
        """Bytes of all arrays of what travels."""
        return sum(getattr(x, "nbytes", 0) for x in jax.tree.leaves(content))


def finite(vector: np.ndarray) -> bool:
    """Whether all of a float32 vector is; in one pass, without a copy."""
    return bool(np.isfinite(np.sum(vector, dtype=np.float64)))


@functools.partial(jax.jit, static_argnums=0)
def _encode(wire: Wire, vector: Any, turn: Any, index: Any) -> Any:
    key = None if wire.rounding == "nearest" else draws(wire, turn, index)
    with on_one_device():
        return Codec(vector, wire).encode(vector, key=key)[0]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _decode(wire: Wire, size: int, message: Any) -> Any:
    like = jax.ShapeDtypeStruct((size,), jnp.float32)
    with on_one_device():
        return Codec(like, wire).decode(message)
