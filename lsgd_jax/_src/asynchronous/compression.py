"""Vectors as they travel between workers at their own pace: in fewer bits than float32."""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from lsgd_jax._src.asynchronous.snapshot import Snapshot
from lsgd_jax._src.wire import LEVELS, Wire, WireFormat


BLOCK = 256  # elements that share a scale
_LOW = np.uint32(0xFF)  # bits of a float32 that a scale does without


class Packed(NamedTuple):
    """A vector as it travels; pickled as it is.

    Attributes:
      codes: of bfloat16 its bits, uint16 [n]; of 'int8' int8 [n]; of 'int4' uint8
        [ceil(n / 2)], two codes to a byte.
      scales: float32 [ceil(n / 256)]; None of bfloat16.
      size: n.
    """

    codes: np.ndarray
    scales: np.ndarray | None
    size: int


@dataclasses.dataclass(frozen=True)
class Compression:
    r"""How vectors travel between workers at their own pace.

    The formats are those of lock step (`lsgd_jax.Wire`). 'int8' and 'int4' are integers
    with a scale per block of 256 elements of the vector,

    .. math::
      s = \lceil \max_{k \in \text{block}} |x_k| / L \rceil_{16}, \qquad
      Q(x)_k = s \, \text{round}(x_k / s), \qquad L = 127 \text{ or } 7

    so that :math:`|Q(x)_k - x_k| \le s / 2`. Scales are rounded up to 16 binary digits:
    then Q(Q(x)) = Q(x) to the bit, and who keeps what was sent has what the others have.
    '-stochastic' rounds up or down at random, so that the mean of Q(x) is x. A block in
    which something is not finite arrives as not finite. Vectors of one element travel as
    they are.

    Whole parameters travel, not differences to what others hold: none has to know what a
    peer has missed. What rounding takes away stays with the sender, where it would be lost
    otherwise (sums, the anchor of DiLoCo, both sides of an exchange).

    Args:
      format: 'float32' (nothing is rounded), 'bfloat16', 'int8', 'int4', or one of the
        last three with '-stochastic'.

    Raises:
      ValueError: an unknown format.

    >>> import numpy as np
    >>> wire = Compression("int8")
    >>> vector = np.linspace(-1, 1, 512, dtype=np.float32)
    >>> once = wire.rounded(vector)
    >>> float(abs(once - vector).max()) <= 1 / 254, bool((wire.rounded(once) == once).all())
    (True, True)
    >>> wire.nbytes(512), wire.pack(vector).codes.nbytes
    (520, 512)
    """

    format: WireFormat = "float32"

    def __post_init__(self):
        Wire.of(self.format)

    @property
    def is_narrow(self) -> bool:
        """Whether anything is rounded."""
        return self.format != "float32"

    @property
    def is_stochastic(self) -> bool:
        """Whether it is rounded at random."""
        return Wire.of(self.format).rounding == "stochastic"

    def nbytes(self, size: int) -> int:
        """Bytes of a vector of so many elements."""
        if not self.is_narrow or size == 1:
            return 4 * size
        if self._bits == "bfloat16":
            return 2 * size
        codes = size if self._bits == "int8" else -(-size // 2)
        return codes + 4 * -(-size // BLOCK)

    def rounded(self, vector: np.ndarray, turn: int = 0) -> np.ndarray:
        """Q(x): the float32 vector that arrives when x is sent.

        turn: decides, with the bits of x, what is drawn. Who sends a vector again and again
          draws anew each time: else there are some that never move.
        """
        return self.unpack(self.pack(vector, turn))

    def arrived(self, content: Any) -> Any:
        """What becomes of content on the way: `unpack` of what `pack` makes of it."""
        return self.unpack(self.pack(content)) if self.is_narrow else content

    def pack(self, content: Any, turn: int = 0) -> Any:
        """A vector, or what has one, as it is sent; all else as it is."""
        if isinstance(content, Snapshot):
            return content._replace(vector=self.pack(content.vector, turn))
        if not self.is_narrow or not isinstance(content, np.ndarray) or content.size == 1:
            return content
        drawn = turn if self.is_stochastic else None
        if self._bits == "bfloat16":  # as bits: Ray does not know the type
            return Packed(_bfloat16(content, drawn), None, content.size)
        codes, scales = _encoded(content, LEVELS[self._bits], drawn)
        codes = _two_to_a_byte(codes) if self._bits == "int4" else codes
        return Packed(codes, scales, content.size)

    @property
    def _bits(self) -> str:
        return Wire.of(self.format).format

    def unpack(self, content: Any) -> Any:
        """What was packed."""
        if isinstance(content, Snapshot):
            return content._replace(vector=self.unpack(content.vector))
        if not isinstance(content, Packed):
            return content
        codes, scales, size = content
        if scales is None:
            return codes.view(jnp.bfloat16).astype(np.float32)
        codes = _out_of_bytes(codes, size) if codes.dtype == np.uint8 else codes
        with np.errstate(invalid="ignore"):
            return (_blocks(codes) * scales[:, None]).ravel()[:size]


def aligned(size: int, parts: int) -> list[slice]:
    """So many slices of a vector, equal but for their bounds, which are those of blocks.

    What is rounded in slices is then what is rounded whole.

    >>> [(s.start, s.stop) for s in aligned(700, 2)]
    [(0, 256), (256, 700)]
    """
    blocks = np.linspace(0, -(-size // BLOCK), parts + 1).astype(int)
    bounds = np.minimum(blocks * BLOCK, size).tolist()
    return [slice(a, b) for a, b in zip(bounds, bounds[1:])]


def _blocks(x: np.ndarray) -> np.ndarray:
    return np.pad(x, (0, -x.size % BLOCK)).reshape(-1, BLOCK)


def _bfloat16(x: np.ndarray, turn: int | None) -> np.ndarray:
    """The bits of x as bfloat16, uint16 [n]; at random unless turn is None."""
    if turn is not None:
        bits = x.astype(np.float32).view(np.uint32)
        # The upper half stays; the lower one, by chance, carries into it.
        up = bits + (_random_bits(x, turn) >> np.uint32(16))
        x = np.where(np.isfinite(x), up & np.uint32(0xFFFF0000), bits).view(np.float32)
    return x.astype(jnp.bfloat16).view(np.uint16)


def _encoded(x: np.ndarray, levels: int, turn: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Codes int8 [n], and scales; at random unless turn is None."""
    blocks = _blocks(np.asarray(x, np.float32))
    largest = np.abs(blocks).max(axis=1)
    scales = _short(largest / np.float32(levels))
    with np.errstate(invalid="ignore"):  # of what is not finite any code will do
        steps = blocks / np.where(scales == 0, np.float32(1), scales)[:, None]
        codes = np.rint(steps)
        if turn is not None:
            drawn = np.floor(steps + _random_bits(blocks, turn) * np.float32(2**-32))
            # The largest of a block decides about the scale, when it is sent again.
            codes = np.where(np.abs(blocks) == largest[:, None], codes, drawn)
            codes = np.clip(codes, -levels, levels)
        return codes.astype(np.int8).ravel()[: x.size], scales


def _random_bits(x: np.ndarray, turn: int) -> np.ndarray:
    """Of each element of float32 a uint32 that its bits, its place and turn decide."""
    place = np.arange(x.size, dtype=np.uint32).reshape(x.shape)
    place += np.uint32(turn * 0x85EBCA6B % 2**32)
    bits = x.astype(np.float32).view(np.uint32) ^ (place * np.uint32(0x9E3779B9))
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):  # a mixing hash
        bits = (bits ^ (bits >> np.uint32(shift))) * np.uint32(factor)
    return bits ^ (bits >> np.uint32(16))


def _short(scales: np.ndarray) -> np.ndarray:
    """Rounded up to 16 binary digits, so that scale · code is exact for every code."""
    finite = np.isfinite(scales)
    bits = np.where(finite, scales, 0).astype(np.float32).view(np.uint32)
    rounded = ((bits + _LOW) & ~_LOW).view(np.float32)
    return np.where(finite, rounded, np.float32(np.nan))


def _two_to_a_byte(codes: np.ndarray) -> np.ndarray:
    """Codes from -8 to 7 as bytes: the first half of them below, the second one above."""
    half = -(-codes.size // 2)
    nibbles = np.pad(codes, (0, 2 * half - codes.size)).astype(np.uint8) & 15
    return nibbles[:half] | nibbles[half:] << 4


def _out_of_bytes(packed: np.ndarray, size: int) -> np.ndarray:
    nibbles = np.concatenate([packed & 15, packed >> 4])[:size]
    return (nibbles ^ 8).astype(np.int8) - np.int8(8)
