"""Top-k messages: the largest entries of every chunk of a leaf, a few bits for each."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from lsgd_jax._src.trees import finite_part, widened
from lsgd_jax._src.wire.wire import Wire


SIGMAS = 6  # the bins span so many standard deviations


class TopK(NamedTuple):
    """A leaf as it travels with the format 'top-k'.

    Attributes:
      indices: uint8 bytes, the place of each entry in its chunk, bit by bit; None if all
        entries are sent.
      codes: uint8 bytes, the bin of each entry, likewise; None without `bits`.
      values: the value of each bin, float32 at least; without `bits` that of each entry.
    """

    indices: Array | None
    codes: Array | None
    values: Array


class Shape(NamedTuple):
    """The numbers of a message, which the size of its leaf and the format decide.

    Attributes:
      chunk: elements in a chunk, C; the last one may have fewer.
      kept: entries that are sent of a whole chunk, k.
      count: entries that are sent altogether.
      index_bits: bits of an index.
    """

    chunk: int
    kept: int
    count: int
    index_bits: int

    @classmethod
    def of(cls, size: int, wire: Wire) -> "Shape":
        """The message of a leaf of `size` elements.

        >>> Shape.of(10, Wire("top-k", density=0.5, chunk=4))
        Shape(chunk=4, kept=2, count=6, index_bits=2)
        """
        chunk = min(wire.chunk, size)
        kept = min(max(1, round(wire.density * wire.chunk)), chunk)
        chunks, rest = divmod(size, chunk)
        count = chunks * kept + min(kept, rest)
        return cls(chunk, kept, count, (chunk - 1).bit_length())


def encode(x: Array, wire: Wire) -> TopK:
    """A leaf of floats as it travels.

    Args:
      x: the leaf, flat, [n]; what is not finite counts as 0.
      wire: a format 'top-k'.

    >>> wire = Wire("top-k", density=0.5, chunk=4, bits=None)
    >>> encode(jnp.array([0.5, -3.0, 1.0, 2.0]), wire).values.tolist()
    [-3.0, 2.0]
    """
    flat = finite_part(widened(x))
    shape = Shape.of(flat.size, wire)
    indices = None
    if shape.count < flat.size:
        # Behind the end of the leaf nothing is large enough to be sent.
        gap = -flat.size % shape.chunk
        sizes = jnp.pad(jnp.abs(flat), (0, gap), constant_values=-1)
        _, found = lax.top_k(sizes.reshape(-1, shape.chunk), shape.kept)
        found = found.ravel()[: shape.count]
        flat = flat[_positions(found, shape)]
        indices = _to_bytes(found, shape.index_bits)
    if wire.bits is None:
        return TopK(indices, None, flat)
    codes, values = quantize(flat, wire.bits)
    return TopK(indices, _to_bytes(codes, wire.bits), values)


def decode(message: TopK, wire: Wire, size: int) -> Array:
    """The flat leaf that arrives, [size], 0 where nothing was sent.

    >>> wire = Wire("top-k", density=0.5, chunk=4, bits=None)
    >>> decode(encode(jnp.array([0.5, -3.0, 1.0, 2.0]), wire), wire, 4).tolist()
    [0.0, -3.0, 0.0, 2.0]
    """
    values = message.values
    if wire.bits is not None:
        assert message.codes is not None
        count = Shape.of(size, wire).count
        values = values[_out_of_bytes(message.codes, wire.bits, count)]
    return _spread(values, message, wire, size)


def senders(message: TopK, wire: Wire, size: int) -> Array:
    """1 for the entries of a leaf that are in the message, 0 for the others: [size]."""
    count = Shape.of(size, wire).count
    return _spread(jnp.ones([count], message.values.dtype), message, wire, size)


def quantize(v: Array, bits: int) -> tuple[Array, Array]:
    r"""The bin of each value, and the mean of the values in each bin.

    B = 2^bits bins of equal width lie over six standard deviations σ around the mean s:

    .. math::
      c_k = \text{clip}\bigl(\text{round}(\tfrac{B}{2} - (v_k - s) \tfrac{B}{6 \sigma}), 0,
        B - 1\bigr)

    Bins count downwards because the released code rounds a - y, which is -v.

    >>> codes, values = quantize(jnp.array([1.0, 1.0, 3.0, 3.0]), bits=2)
    >>> values[codes].tolist()
    [1.0, 1.0, 3.0, 3.0]
    """
    bins = 2**bits
    shift = v.mean()
    centered = v - shift
    deviation = jnp.sqrt(jnp.square(centered).sum() / max(v.size - 1, 1))
    width = SIGMAS * deviation / bins
    width = jnp.where((width > 0) & jnp.isfinite(width), width, 1)
    codes = jnp.clip(jnp.round(bins // 2 - centered / width), 0, bins - 1).astype(jnp.uint8)
    members = codes[None] == jnp.arange(bins, dtype=jnp.uint8)[:, None]
    sums = jnp.where(members, centered[None], 0).sum(axis=1)
    counts = jnp.maximum(members.sum(axis=1), 1).astype(sums.dtype)
    return codes, shift + sums / counts


def _spread(values: Array, message: TopK, wire: Wire, size: int) -> Array:
    """The values at their places in a flat array of zeros."""
    if message.indices is None:
        return values
    shape = Shape.of(size, wire)
    found = _out_of_bytes(message.indices, shape.index_bits, shape.count)
    nothing = jnp.zeros([size], values.dtype)
    return nothing.at[_positions(found, shape)].set(values)


def _positions(found: Array, shape: Shape) -> Array:
    """Where in the flat array the entries lie that were found in its chunks."""
    chunk = jnp.arange(shape.count, dtype=jnp.int32) // shape.kept
    return chunk * shape.chunk + found.astype(jnp.int32)


# Bytes hold one bit of each of 8 numbers, an eighth of the array apart: an axis of 8 or of
# some bits at the end would be padded to 128 on TPUs.


def _to_bytes(numbers: Array, bits: int) -> Array:
    """uint8 [bits, ceil(n / 8)], the bits of n numbers.

    >>> _to_bytes(jnp.array([1, 2, 3]), bits=2).tolist()
    [[5], [6]]
    """
    columns = jnp.pad(numbers, (0, -numbers.size % 8)).reshape(1, 8, -1)
    digits = columns >> _along(0, bits, numbers.dtype) & 1
    bytes_ = digits.astype(jnp.uint8) << _along(1, 8, jnp.uint8)
    return bytes_.sum(axis=1, dtype=jnp.uint8)


def _out_of_bytes(packed: Array, bits: int, count: int) -> Array:
    """int32 [count], the numbers that `_to_bytes` has packed."""
    digits = packed[:, None] >> _along(1, 8, jnp.uint8) & 1
    numbers = (digits.astype(jnp.int32) << _along(0, bits, jnp.int32)).sum(axis=0)
    return numbers.ravel()[:count]


def _along(axis: int, size: int, dtype: Any) -> Array:
    """0, 1, … along one axis of three."""
    return jnp.arange(size, dtype=dtype).reshape(
        [size if i == axis else 1 for i in range(3)]
    )
