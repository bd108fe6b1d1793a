"""Wire formats: how parameters travel in fewer bits than they have."""

import dataclasses
from typing import Any, ClassVar, Literal, NamedTuple, cast, get_args

import jax
import jax.numpy as jnp
from jax import Array, lax

from lsgd_jax._src.checks import check_fraction, check_option, check_positive_int
from lsgd_jax._src.shared import Axes
from lsgd_jax._src.wire.blocks import Along, BlockRows, Elements, Layout
from lsgd_jax._src.wire.packing import Cut, Packing, is_large
from lsgd_jax._src.wire.top_k import TopK


Format = Literal["float32", "bfloat16", "int8", "int4"]
# A `Wire` by name, with the defaults for the rest.
WireFormat = Literal[Format, "bfloat16-stochastic", "int8-stochastic", "int4-stochastic"]
Rounding = Literal["nearest", "stochastic"]

# Codes are integers from -levels to levels, times a scale that a block shares.
LEVELS = {"int8": 127, "int4": 7}


@dataclasses.dataclass(frozen=True)
class Wire:
    r"""A wire format: the form in which a pull's parameters travel.

    'int8' and 'int4' are integers with a scale per block of b elements of a leaf:

    .. math::
      s = \max_{k \in \text{block}} |x_k| / L, \qquad c_k = \text{round}(x_k / s), \qquad
      Q(x)_k = s \, c_k, \qquad L = 127 \text{ or } 7

    so that :math:`|Q(x)_k - x_k| \le s / 2` (rounded to nearest). A leaf never shares a
    block with another one. A block lies in the flattened leaf. In a leaf of more than
    131,072 elements it lies along an axis before the last one, if this axis can be cut into
    blocks of b / 2 to b elements. Numbers that are not finite count as 0. 'bfloat16' has no
    scales. Leaves of one element, of integers and of bools travel as they are. `TopK` is a
    format that sends only the largest entries.

    Means and sums have error feedback. With e the error of this worker's earlier messages
    (0 at first), v what it has to send now and β the `decay`, it sends
    :math:`s = Q(\beta e + v)` and keeps :math:`e \leftarrow \beta e + v - s`. From three
    workers on, each worker adds up 1/W of a large tree, rounds this share S of the sum, and
    adds :math:`S - Q(S)` to its e.

    Args:
      format: 'float32' (the parameters as they are), 'bfloat16', 'int8' or 'int4'.
      rounding: 'nearest' (ties to even), or 'stochastic': up or down at random, so that
        the mean of Q(x) is x. Draws depend on seed, step, worker, leaf and shard only, so
        that they are the same on every layout of workers on devices.
      seed: seed of the draws.
      block: elements that share a scale, b.
      decay: how much of the error is kept until the next message, β in [0, 1].
      across: the mesh axes of the slow network, such as 'node': means and sums are taken
        on two levels. The workers inside a node add up in float32, each of them a share of
        the parameters. The shares are encoded for the mean across nodes, which every worker
        takes of its own share, and gathered inside the node in float32. None: the messages
        of all workers are encoded. Asynchronous workers have one level.

    Raises:
      ValueError: an unknown format or rounding, a block below 1, a decay out of range.

    >>> import lsgd_jax as lj
    >>> tx = lj.local_sgd(period=8, wire=lj.Wire("int8", rounding="stochastic", seed=1))
    """

    format: Format = "float32"
    rounding: Rounding = "nearest"
    seed: int = 0
    block: int = 256
    decay: float = 1.0
    across: Axes | None = None

    is_sparse: ClassVar[bool] = False

    def __post_init__(self):
        check_option("wire", self.format, get_args(Format))
        check_option("rounding", self.rounding, get_args(Rounding))
        check_positive_int("block", self.block)
        check_fraction("decay", self.decay)

    @classmethod
    def of(cls, wire: "Wire | TopK | WireFormat") -> Any:
        """Returns the `Wire` of a name, a format or a format and its rounding.

        A `Wire` or `TopK` is returned as it is.

        >>> import lsgd_jax as lj
        >>> lj.Wire.of("int8-stochastic") == lj.Wire("int8", rounding="stochastic")
        True
        """
        if isinstance(wire, str) and wire in BY_NAME:
            return BY_NAME[wire]
        if not isinstance(wire, Wire | TopK):
            check_option("wire", wire, tuple(BY_NAME))
        return wire

    @property
    def is_narrow(self) -> bool:
        """Whether parameters are encoded."""
        return self.format != "float32"

    @property
    def align(self) -> int:
        """Leaves that share a buffer begin at multiples of this."""
        return self.block if self.format in LEVELS else 1

    def layout(self, packing: Packing, b: int) -> Layout:
        """How the elements of a buffer fall into blocks."""
        shape = packing.shape(b)
        if packing.keeps_shapes:
            return self.along(shape)
        leading = self.along_leading(shape) if is_large(shape) else None
        return leading or BlockRows.of(packing, b, self.block)

    def along(self, shape: tuple[int, ...]) -> Along | Elements:
        """The blocks of an array that keeps its shape."""
        return Along.of(shape, self.block) if self.format in LEVELS else Elements(shape)

    def along_leading(self, shape: tuple[int, ...]) -> Along | Elements | None:
        """The blocks of an array that keeps its shape, along an axis before the last.

        None without such an axis, and where blocks of half the size would not divide it.
        """
        if len(shape) == 1:
            return None
        if self.format not in LEVELS:
            return Elements(shape)
        along = Along.of(shape, self.block, end=-1)
        return along if 2 * along.block >= self.block else None

    def cut(self, shape: tuple[int, ...], parts: int) -> Cut:
        """How a buffer is cut into parts: a large leaf along an axis, others into blocks.

        Flattened, XLA for TPUs would lay a large leaf out anew.
        """
        if is_large(shape) and len(shape) > 1:
            return Cut.of(shape, parts)
        return Cut.flat(shape, parts, self.block)

    def rounded(
        self, x: Array, layout: Layout, key: Array | None = None
    ) -> tuple["Coded", Array]:
        """The message of a buffer x of finite floats, and Q(x) in float32.

        With a random key it rounds stochastically, without one to nearest.

        Q(x) is decoded from codes that are not packed yet: XLA for TPUs would write down
        what it unpacks.
        """
        blocks = layout.blocks(x.astype(jnp.float32))
        noise = None
        if key is not None and self.format in LEVELS:
            noise = jax.random.uniform(key, blocks.shape, jnp.float32)
        elif key is not None:
            noise = jax.random.bits(key, blocks.shape, jnp.uint16)
        coded = quantized(blocks, self, noise, layout.along)
        sent = packed(layout.sent(coded.codes), self, layout.along)
        return Coded(sent, coded.scales), layout.array(dequantized(coded, layout.along))

    def decode(self, message: "Coded", layout: Layout) -> Array:
        """Decodes the message of a buffer x: Q(x) in float32."""
        codes = layout.arrived(unpacked(message.codes, self, layout.width, layout.along))
        return layout.array(dequantized(Coded(codes, message.scales), layout.along))


# Each is made and checked once, because every update asks for its format by name.
BY_NAME = {name: Wire(*cast(Any, name.split("-"))) for name in get_args(WireFormat)}


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


# Blocks [..., b, ...]: their elements lie along one axis, by default the last one


def quantized(
    blocks: Array, wire: Wire, noise: Array | None = None, axis: int = -1
) -> Coded:
    """Rounds finite blocks, each by itself: codes like them, not packed, and their scales.

    noise: of stochastic rounding, like the blocks: random words with 'bfloat16', otherwise
      uniform in [0, 1). Without noise it rounds to nearest.

    >>> import jax.numpy as jnp
    >>> coded = quantized(jnp.array([[0.5, -1.0], [1.0, 2.0]]), Wire("int8"))
    >>> coded.codes.tolist(), coded.scales.shape
    ([[64, -127], [64, 127]], (2,))
    """
    if wire.format == "bfloat16":
        largest = float(jnp.finfo(jnp.bfloat16).max)  # beyond, it would round to inf
        x = jnp.clip(blocks, -largest, largest)
        if noise is not None:
            # Noise is added to the lower half, which is cut off: its carry rounds up.
            bits = lax.bitcast_convert_type(x, jnp.uint32) + noise
            x = lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
        words = lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)
        return Coded(words, None)
    levels = LEVELS[wire.format]
    scales = jnp.abs(blocks).max(axis) / levels
    # A block of zeros has the scale 0, by which nothing can be divided.
    steps = blocks / jnp.expand_dims(jnp.where(scales > 0, scales, 1), axis)
    if noise is not None:
        noise = noise.astype(steps.dtype)
    steps = jnp.round(steps) if noise is None else jnp.floor(steps + noise)
    return Coded(jnp.clip(steps, -levels, levels).astype(jnp.int8), scales)


def dequantized(coded: Coded, axis: int = -1) -> Array:
    """The blocks that arrive, in float32, of codes that are not packed.

    >>> import jax.numpy as jnp
    >>> dequantized(quantized(jnp.array([[7.0, -2.0, 4.0]]), Wire("int4"))).tolist()
    [[7.0, -2.0, 4.0]]
    """
    codes, scales = coded
    if scales is None:
        return lax.bitcast_convert_type(codes, jnp.bfloat16).astype(jnp.float32)
    return codes.astype(jnp.float32) * jnp.expand_dims(scales, axis)


def packed(codes: Array, wire: Wire, axis: int = -1) -> Array:
    """Codes as they travel: with 'int4' two to a byte, otherwise as they are.

    The first half of the axis fills the lower four bits, the second the upper ones.
    """
    if wire.format != "int4":
        return codes
    missing = [(0, 0)] * codes.ndim
    missing[axis] = (0, codes.shape[axis] % 2)
    # Two's complement: the lower four bits hold -8 to 7.
    nibbles = jnp.pad(codes, missing).astype(jnp.uint8) & 15
    first, second = jnp.split(nibbles, 2, axis)
    return first | second << 4


def unpacked(codes: Array, wire: Wire, width: int, axis: int = -1) -> Array:
    """The inverse of `packed`, for an axis of `width` codes."""
    if wire.format != "int4":
        return codes
    nibbles = jnp.concatenate([codes & 15, codes >> 4], axis)
    nibbles = lax.slice_in_dim(nibbles, 0, width, axis=axis)
    return (nibbles ^ 8).astype(jnp.int8) - 8
