"""Wire formats: how parameters travel in fewer bits than they have."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from lsgd_jax._src.checks import check_fraction, check_option, check_positive_int
from lsgd_jax._src.trees import finite_part
from lsgd_jax._src.wire.packing import joined


Bits = Literal["float32", "bfloat16", "int8", "int4"]
Format = Literal[Bits, "top-k"]
# A `Wire` by name, with the defaults for the rest.
WireFormat = Literal[Bits, "bfloat16-stochastic", "int8-stochastic", "int4-stochastic"]
Rounding = Literal["nearest", "stochastic"]
Aggregate = Literal["mean", "senders"]

LEVELS = {"int8": 127, "int4": 7}  # codes are integers from -levels to levels


@dataclasses.dataclass(frozen=True)
class Wire:
    r"""A wire format: the form in which a pull's parameters travel.

    'int8' and 'int4' are integers with a scale per block of b elements of a leaf:

    .. math::
      s = \max_{k \in \text{block}} |x_k| / L, \qquad c_k = \text{round}(x_k / s), \qquad
      Q(x)_k = s \, c_k, \qquad L = 127 \text{ or } 7

    so that :math:`|Q(x)_k - x_k| \le s / 2` (rounded to nearest). A leaf never shares a
    block with another one. Numbers that are not finite count as 0. 'bfloat16' has no
    scales. Leaves of one element, of integers and of bools travel as they are.

    'top-k' sends the k entries of largest magnitude of every chunk of C entries of a leaf,
    and 0 for the others. Each costs an index of ceil(log2 C) bits and a code of `bits`
    bits: the values of one leaf fall into 2^bits bins over six of their standard
    deviations, and each arrives as the mean of its bin. It is a format for differences with
    error feedback: for `diloco`, `slowmo`, `easgd`, `downpour`, `parle` and other rules
    whose `keeps` is ``("error",)``. `sparse_diloco` has the defaults of SparseLoCo.

    Means and sums have error feedback. With e the error of this worker's earlier messages
    (0 at first), v what it has to send now and β the `decay`, it sends
    :math:`s = Q(\beta e + v)` and keeps :math:`e \leftarrow \beta e + v - s`. From three
    workers on, each worker adds up 1/W of a large tree, rounds this share S of the sum, and
    adds :math:`S - Q(S)` to its e.

    Args:
      format: 'float32' (the parameters as they are), 'bfloat16', 'int8', 'int4' or
        'top-k'.
      rounding: 'nearest' (ties to even), or 'stochastic': up or down at random, so that
        the mean of Q(x) is x. Draws depend on seed, step, worker and leaf only, so that
        they are the same on every layout of devices. 'top-k' rounds to nearest.
      seed: seed of the draws.
      block: elements that share a scale, b.
      density: with 'top-k' the share of the entries that is sent, k / C, in (0, 1]; at
        least one entry of each chunk.
      chunk: with 'top-k' the entries from which k are chosen, C, along a leaf in row-major
        order; the last chunk of a leaf may be shorter. Ties go to the first entry.
      bits: with 'top-k' the bits of a value, from 1 to 8; None: values are not rounded.
      decay: how much of the error is kept until the next message, β in [0, 1].
      aggregate: with 'top-k' what a sum of W messages is divided by for their mean: by W
        ('mean'), or entry by entry by the number of workers that have sent it ('senders').

    Raises:
      ValueError: an unknown format, rounding or aggregate, a block or chunk below 1, a
        density or decay out of range, bits outside 1 to 8, 'top-k' with stochastic
        rounding.

    >>> import lsgd_jax as lj
    >>> tx = lj.local_sgd(period=8, wire=lj.Wire("int8", rounding="stochastic", seed=1))
    """

    format: Format = "float32"
    rounding: Rounding = "nearest"
    seed: int = 0
    block: int = 256
    density: float = 1 / 64
    chunk: int = 4096
    bits: int | None = 2
    decay: float = 1.0
    aggregate: Aggregate = "mean"

    def __post_init__(self):
        check_option("wire", self.format, get_args(Format))
        check_option("rounding", self.rounding, get_args(Rounding))
        check_positive_int("block", self.block)
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
        if self.is_sparse and self.rounding != "nearest":
            raise ValueError(
                "`rounding` must be 'nearest' with the format 'top-k', got "
                f"rounding={self.rounding!r}"
            )

    @property
    def is_sparse(self) -> bool:
        """Whether only some entries travel."""
        return self.format == "top-k"

    @classmethod
    def of(cls, wire: "Wire | WireFormat") -> "Wire":
        """Returns the `Wire` of a name: a format, or a format and its rounding.

        >>> import lsgd_jax as lj
        >>> lj.Wire.of("int8-stochastic") == lj.Wire("int8", rounding="stochastic")
        True
        """
        if isinstance(wire, Wire):
            return wire
        check_option("wire", wire, get_args(WireFormat))
        return cls(*cast(Any, wire.split("-")))


Runs = Sequence[tuple[int, int]]


class Coded(NamedTuple):
    """An array of n elements as it travels.

    Attributes:
      codes: int8 [n]; with 'int4' uint8 [ceil(n / 2)], two codes to a byte; with
        'bfloat16' uint16 [n], its words: sums of words with zeros are exact on every
        backend, while CPUs add bfloat16 in float32.
      scales: float32, one for each block; None with 'bfloat16'.
    """

    codes: Array
    scales: Array | None


def encode(
    x: Array, wire: Wire, key: Array | None = None, runs: Runs | None = None
) -> Coded:
    """Encodes an array of floats of any shape.

    Args:
      x: the array, flattened in row-major order.
      wire: a format of integers, or 'bfloat16'.
      key: random key for stochastic rounding; None rounds to nearest.
      runs: (start, size) of each leaf in a flat x. Leaves begin where a block begins, and
        the gaps between them do not travel. None: all of x travels.

    >>> import jax.numpy as jnp
    >>> encode(jnp.array([0.5, -1.0, 0.1]), Wire("int8")).codes.tolist()
    [64, -127, 13]
    """
    flat = finite_part(x.ravel().astype(jnp.float32))
    if wire.format == "bfloat16":
        return Coded(_only(_to_words(flat, key), runs), None)
    blocks = jnp.pad(flat, (0, -flat.size % wire.block)).reshape(-1, wire.block)
    codes, scales = _rounded(blocks, wire, key)
    codes = _only(codes.ravel()[: flat.size], runs)
    return Coded(_two_to_a_byte(codes) if wire.format == "int4" else codes, scales)


def decode(
    coded: Coded, wire: Wire, shape: tuple[int, ...], runs: Runs | None = None
) -> Array:
    """Decodes the message of an array x of this shape: Q(x) in float32.

    >>> import jax.numpy as jnp
    >>> coded = encode(jnp.array([0.5, -1.0, 0.1]), Wire("bfloat16"))
    >>> decode(coded, Wire("bfloat16"), (3,)).tolist()
    [0.5, -1.0, 0.10009765625]
    """
    codes, scales = coded
    size = math.prod(shape)
    travels = size if runs is None else sum(n for _, n in runs)
    if scales is None:
        return _spread(_of_words(codes), runs, 1).reshape(shape)
    if wire.format == "int4":
        codes = _out_of_bytes(codes, travels)
    steps = _spread(codes, runs, wire.block).astype(jnp.float32)
    return (steps * _of_elements(scales, size, wire)).reshape(shape)


def encode_blocks(blocks: Array, wire: Wire, key: Array | None = None) -> Coded:
    """Encodes finite blocks [..., b], each by itself: codes [..., .] and scales [...].

    >>> import jax.numpy as jnp
    >>> coded = encode_blocks(jnp.array([[0.5, -1.0], [1.0, 2.0]]), Wire("int8"))
    >>> coded.codes.tolist(), coded.scales.shape
    ([[64, -127], [64, 127]], (2,))
    """
    if wire.format == "bfloat16":
        return Coded(_to_words(blocks, key), None)
    codes, scales = _rounded(blocks, wire, key)
    return Coded(_two_to_a_byte(codes, -1) if wire.format == "int4" else codes, scales)


def decode_blocks(coded: Coded, wire: Wire) -> Array:
    """The blocks that arrive, in float32.

    >>> import jax.numpy as jnp
    >>> wire = Wire("int4", block=3)
    >>> decode_blocks(encode_blocks(jnp.array([[7.0, -2.0, 4.0]]), wire), wire).tolist()
    [[7.0, -2.0, 4.0]]
    """
    codes, scales = coded
    if scales is None:
        return _of_words(codes)
    if wire.format == "int4":
        codes = _out_of_bytes(codes, wire.block, -1)
    return codes.astype(jnp.float32) * scales[..., None]


def block_nbytes(wire: Wire) -> int:
    """The bytes of an encoded block with its scale.

    >>> block_nbytes(Wire("int8")), block_nbytes(Wire("int4"))
    (260, 132)
    """
    b = wire.block
    return {"bfloat16": 2 * b, "int8": b + 4, "int4": -(-b // 2) + 4}[wire.format]


def encode_whole(x: Array, wire: Wire, key: Array | None = None) -> Coded:
    """Encodes an array that may be sharded, without flattening it.

    Blocks lie along one axis and divide it. The codes keep the other axes.

    >>> import jax.numpy as jnp
    >>> coded = encode_whole(jnp.array([[0.5, -1.0], [1.0, 2.0]]), Wire("int8"))
    >>> coded.codes.tolist(), coded.scales.shape
    ([[[64, -127]], [[64, 127]]], (2, 1))
    """
    x = finite_part(x).astype(jnp.float32)
    if wire.format == "bfloat16":
        return Coded(_to_words(x, key), None)
    axis, size = _blocks_in(x.shape, wire)
    cut = x.shape[axis] // size, size
    blocks = x.reshape(*x.shape[:axis], *cut, *x.shape[axis + 1 :])
    codes, scales = _rounded(blocks, wire, key, axis + 1)
    is_half = wire.format == "int4"
    return Coded(_two_to_a_byte(codes, axis + 1) if is_half else codes, scales)


def decode_whole(coded: Coded, wire: Wire, shape: tuple[int, ...]) -> Array:
    """Decodes a message of `encode_whole` for an array x of this shape: Q(x) in float32.

    >>> import jax.numpy as jnp
    >>> coded = encode_whole(jnp.array([[7.0, -2.0, 4.0]]), Wire("int4"))
    >>> decode_whole(coded, Wire("int4"), (1, 3)).tolist()
    [[7.0, -2.0, 4.0]]
    """
    codes, scales = coded
    if scales is None:
        return _of_words(codes)
    axis, size = _blocks_in(shape, wire)
    if wire.format == "int4":
        codes = _out_of_bytes(codes, size, axis + 1)
    scales = jnp.expand_dims(scales, axis + 1)
    return (codes.astype(jnp.float32) * scales).reshape(shape)


def _blocks_in(shape: tuple[int, ...], wire: Wire) -> tuple[int, int]:
    """The axis along which blocks lie, and their size: the largest that divides it."""

    def largest(n: int) -> int:
        return max(b for b in range(1, min(n, wire.block) + 1) if n % b == 0)

    size, axis = max((largest(n), axis) for axis, n in enumerate(shape))
    return axis, size


def _rounded(
    blocks: Array, wire: Wire, key: Array | None, axis: int = -1
) -> tuple[Array, Array]:
    """The int8 codes of blocks along an axis, and their scales, which lack that axis.

    Codes are x / s, rounded to nearest, or at random with a key.
    """
    levels = LEVELS[wire.format]
    scales = jnp.abs(blocks).max(axis=axis) / levels
    steps = blocks / jnp.expand_dims(jnp.where(scales > 0, scales, 1), axis)
    if key is None:
        steps = jnp.round(steps)
    else:
        steps = jnp.floor(steps + jax.random.uniform(key, blocks.shape))
    return jnp.clip(steps, -levels, levels).astype(jnp.int8), scales


def _only(x: Array, runs: Runs | None) -> Array:
    """The elements of a flat x that travel."""
    if runs is None:
        return x
    return jnp.concatenate([x[start : start + size] for start, size in runs])


def _spread(x: Array, runs: Runs | None, align: int) -> Array:
    """The inverse of `_only`, with zeros in the gaps."""
    if runs is None:
        return x
    ends = np.cumsum([size for _, size in runs])
    return joined([x[end - size : end] for (_, size), end in zip(runs, ends)], align)


def _of_elements(scales: Array, size: int, wire: Wire) -> Array:
    """The scale of each element's block."""
    return jnp.broadcast_to(scales[:, None], (scales.size, wire.block)).ravel()[:size]


def _to_words(x: Array, key: Array | None) -> Array:
    """Finite float32 as bfloat16 in uint16, rounded to nearest, or at random with a key."""
    largest = float(jnp.finfo(jnp.bfloat16).max)  # beyond, it would round to inf
    x = jnp.clip(x, -largest, largest)
    if key is not None:
        # Random bits are added to the lower half, which is cut off: its carry rounds up.
        bits = lax.bitcast_convert_type(x, jnp.uint32)
        bits += jax.random.bits(key, x.shape, jnp.uint16)
        x = lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
    return lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)


def _of_words(words: Array) -> Array:
    return lax.bitcast_convert_type(words, jnp.bfloat16).astype(jnp.float32)


def _two_to_a_byte(codes: Array, axis: int = 0) -> Array:
    """Packs codes from -8 to 7 into bytes, two halves of the axis side by side.

    The first half fills the lower four bits, the second half the upper ones.
    """
    size = codes.shape[axis]
    half = -(-size // 2)
    gap = 2 * half - size
    missing = [(0, gap * (i == axis % codes.ndim)) for i in range(codes.ndim)]
    nibbles = jnp.pad(codes, missing).astype(jnp.uint8) & 15
    first, second = jnp.split(nibbles, 2, axis)
    return first | second << 4


def _out_of_bytes(packed: Array, size: int, axis: int = 0) -> Array:
    nibbles = jnp.concatenate([packed & 15, packed >> 4], axis)
    nibbles = lax.slice_in_dim(nibbles, 0, size, axis=axis)
    return (nibbles ^ 8).astype(jnp.int8) - 8
