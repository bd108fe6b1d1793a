"""Top-k: the largest entries of every chunk of a leaf, a few bits for each."""

import dataclasses
import math
from typing import ClassVar, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax

from lsgd_jax._src.checks import check_fraction, check_option, check_positive_int
from lsgd_jax._src.norms import norm, squares
from lsgd_jax._src.trees import widened
from lsgd_jax._src.wire.packing import Packing


Aggregate = Literal["mean", "senders"]

SIGMAS = 6  # the bins span so many standard deviations


@dataclasses.dataclass(frozen=True)
class TopK:
    """A wire format that sends the k largest entries of every chunk of C entries of a leaf.

    Each costs an index of ceil(log2 C) bits and a code of `bits` bits: the values of one
    leaf fall into 2^bits bins over six of their standard deviations, and each arrives as
    the mean of its bin. All other entries arrive as 0. It is a format for differences with
    error feedback, which is that of `Wire`: for `diloco`, `slowmo`, `easgd`, `downpour`,
    `parle` and other rules whose `keeps` is ``("error",)``. `sparse_diloco` has the
    defaults of SparseLoCo.

    Args:
      density: the share of the entries that is sent, k / C, in (0, 1]; at least one entry
        of each chunk.
      chunk: the entries from which k are chosen, C, along a leaf in row-major order; the
        last chunk of a leaf may be shorter. Ties go to the first entry.
      bits: the bits of a value, from 1 to 8; None: values are not rounded.
      decay: how much of the error is kept until the next message, in [0, 1].
      aggregate: what a sum of W messages is divided by for their mean: W ('mean'), or entry
        by entry the number of workers that have sent it ('senders').

    Raises:
      ValueError: an unknown aggregate, a chunk below 1, a density or decay out of range,
        bits outside 1 to 8.

    >>> import lsgd_jax as lj
    >>> tx = lj.diloco(30, wire=lj.TopK(density=1 / 64, decay=0.95))
    """

    density: float = 1 / 64
    chunk: int = 4096
    bits: int | None = 2
    decay: float = 1.0
    aggregate: Aggregate = "mean"

    is_sparse: ClassVar[bool] = True
    is_narrow: ClassVar[bool] = True
    rounding: ClassVar[str] = "nearest"
    align: ClassVar[int] = 1
    across: ClassVar[None] = None

    def __post_init__(self):
        check_positive_int("chunk", self.chunk)
        check_fraction("density", self.density)
        check_fraction("decay", self.decay)
        check_option("aggregate", self.aggregate, get_args(Aggregate))
        if self.density == 0:
            raise ValueError("`density` must be above 0, got density=0")
        if self.bits is not None:
            check_positive_int("bits", self.bits)
            if self.bits > 8:
                raise ValueError(f"`bits` must be at most 8, got bits={self.bits}")

    def layout(self, packing: Packing, b: int) -> "Chunks":
        """How the leaves of a buffer fall into chunks."""
        shape = packing.shape(b)
        leaves = len(packing.members[b])
        size = math.prod(shape) // leaves
        chunk = min(self.chunk, size)
        kept = min(max(1, round(self.density * self.chunk)), chunk)
        chunks, rest = divmod(size, chunk)
        return Chunks(shape, leaves, chunk, kept, chunks * kept + min(kept, rest))

    def rounded(
        self, x: Array, chunks: "Chunks", key: Array | None = None
    ) -> tuple["Entries", Array]:
        """The message of a buffer x of finite floats, leaf by leaf, and what arrives."""
        del key

        def leaf(flat: Array) -> Entries:
            flat = widened(flat)
            indices = None
            if chunks.count < flat.size:
                gap = -flat.size % chunks.chunk
                rows = jnp.pad(flat, (0, gap)).reshape(-1, chunks.chunk)
                # Behind the end of the leaf nothing is large enough to be sent.
                sizes = jnp.pad(jnp.abs(flat), (0, gap), constant_values=-1)
                _, found = lax.top_k(sizes.reshape(rows.shape), chunks.kept)
                chosen = jnp.take_along_axis(rows, found, axis=1)
                flat = chosen.ravel()[: chunks.count]
                indices = _to_bytes(found.ravel()[: chunks.count], chunks.index_bits)
            if self.bits is None:
                return Entries(indices, None, flat)
            codes, values = quantize(flat, self.bits)
            return Entries(indices, _to_bytes(codes, self.bits), values)

        message = jax.vmap(leaf)(x.reshape(chunks.leaves, -1))
        return message, self.decode(message, chunks)

    def decode(self, message: "Entries", chunks: "Chunks") -> Array:
        """Decodes the message of a buffer, in float32 at least."""

        def leaf(sent: Entries) -> Array:
            if self.bits is None or sent.codes is None:
                return chunks.spread(sent.values, sent)
            codes = _out_of_bytes(sent.codes, self.bits, chunks.count)
            return chunks.spread(sent.values[codes], sent)

        return jax.vmap(leaf)(message).reshape(chunks.shape)

    def senders(self, message: "Entries", chunks: "Chunks") -> Array:
        """1 for the entries of a buffer that are in the message, 0 for the others."""
        ones = jnp.ones([chunks.count], message.values.dtype)
        return jax.vmap(lambda sent: chunks.spread(ones, sent))(message).reshape(
            chunks.shape
        )


class Chunks(NamedTuple):
    """How a buffer of leaves of one size falls into chunks, of which entries are sent.

    Attributes:
      shape: of the buffer.
      leaves: their number.
      chunk: elements in a chunk, C; the last one of a leaf may have fewer.
      kept: entries that are sent of a whole chunk, k.
      count: entries that are sent of a leaf.

    >>> wire, packing = TopK(density=0.5, chunk=4, bits=None), Packing(jnp.zeros(10))
    >>> chunks = wire.layout(packing, 0)
    >>> chunks.count, chunks.index_bits
    (6, 2)
    >>> x = jnp.array([0.5, -3.0, 1.0, 2.0, 1, 0, 0, 1, 7, 0])
    >>> sent, arrived = wire.rounded(x, chunks)
    >>> arrived.tolist()
    [0.0, -3.0, 0.0, 2.0, 1.0, 0.0, 0.0, 1.0, 7.0, 0.0]
    """

    shape: tuple[int, ...]
    leaves: int
    chunk: int
    kept: int
    count: int

    @property
    def index_bits(self) -> int:
        """Bits of an index."""
        return (self.chunk - 1).bit_length()

    def spread(self, values: Array, sent: "Entries") -> Array:
        """The values at their places in a flat leaf of zeros.

        A place is a chunk and an index in it, because a leaf may have 2³¹ entries and more.
        """
        if sent.indices is None:
            return values
        size = math.prod(self.shape) // self.leaves
        number = -(-size // self.chunk)
        gap = number * self.kept - self.count
        found = _out_of_bytes(sent.indices, self.index_bits, self.count)
        # Behind the last entry of the last chunk nothing was sent: no index of a chunk.
        columns = jnp.pad(found, (0, gap), constant_values=self.chunk)
        chosen = jnp.pad(values, (0, gap)).reshape(number, self.kept)
        rows = lax.broadcasted_iota(jnp.int32, chosen.shape, 0)
        nothing = jnp.zeros([number, self.chunk], values.dtype)
        placed = nothing.at[rows, columns.reshape(chosen.shape)].set(chosen, mode="drop")
        return placed.ravel()[:size]


class Entries(NamedTuple):
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
    deviation = norm(squares(centered) / max(v.size - 1, 1))
    width = SIGMAS * deviation / bins
    width = jnp.where((width > 0) & jnp.isfinite(width), width, 1)
    codes = jnp.clip(jnp.round(bins // 2 - centered / width), 0, bins - 1).astype(jnp.uint8)
    members = codes[None] == jnp.arange(bins, dtype=jnp.uint8)[:, None]
    sums = jnp.where(members, centered[None], 0).sum(axis=1)
    counts = jnp.maximum(members.sum(axis=1), 1).astype(sums.dtype)
    return codes, shift + sums / counts


# Bytes hold one bit of each of 8 numbers, an eighth of the array apart: an axis of 8 or of
# some bits at the end would be padded to 128 on TPUs.


def _to_bytes(numbers: Array, bits: int) -> Array:
    """uint8 [bits, ceil(n / 8)], the bits of n numbers.

    >>> _to_bytes(jnp.array([1, 2, 3]), bits=2).tolist()
    [[5], [6]]
    """
    columns = jnp.pad(numbers, (0, -numbers.size % 8)).reshape(1, 8, -1)
    digits = columns >> jnp.arange(bits, dtype=numbers.dtype).reshape(-1, 1, 1) & 1
    places = jnp.arange(8, dtype=jnp.uint8).reshape(1, -1, 1)
    bytes_ = digits.astype(jnp.uint8) << places
    return bytes_.sum(axis=1, dtype=jnp.uint8)


def _out_of_bytes(packed: Array, bits: int, count: int) -> Array:
    """int32 [count], the numbers that `_to_bytes` has packed."""
    digits = packed[:, None] >> jnp.arange(8, dtype=jnp.uint8).reshape(1, -1, 1) & 1
    places = jnp.arange(bits, dtype=jnp.int32).reshape(-1, 1, 1)
    numbers = (digits.astype(jnp.int32) << places).sum(axis=0)
    return numbers.ravel()[:count]
