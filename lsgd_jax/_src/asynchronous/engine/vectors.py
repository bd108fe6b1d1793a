"""Parameters as one flat float32 vector, and the form in which such vectors travel.

Methods that move whole vectors send them in the format of their `wire`. No worker has to
know what a peer has missed, as it would if differences traveled. The sender keeps the
quantization error where it would be lost otherwise (sums, the anchor of DiLoCo, both sides
of an exchange).
"""

import contextlib
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lsgd_jax._src.asynchronous.engine.sharding import Sharding, cpu, sharding_of
from lsgd_jax._src.layouts import on_one_device
from lsgd_jax._src.trees import Tree, floats
from lsgd_jax._src.wire.codec import Codec, draws
from lsgd_jax._src.wire.wire import Wire, WireFormat


@dataclasses.dataclass(frozen=True)
class Flat:
    """Conversion between vectors and trees of one structure.

    Leaves that do not hold floats are not in the vector, see `trees.floats`.

    Args:
      treedef: the structure.
      shapes: shape of each leaf that holds floats.
      sharding: the layout of the tree on several devices, or None.

    >>> tree = {"a": jnp.zeros(2, jnp.bfloat16), "b": jnp.ones([1, 2]), "n": jnp.int32(3)}
    >>> flat = flat_of(tree)
    >>> flat.vector(tree).tolist()
    [0.0, 0.0, 1.0, 1.0]
    >>> flat.tree(flat.vector(tree))["b"].shape
    (1, 2)
    """

    treedef: Any
    shapes: tuple[tuple[int, ...], ...]
    sharding: Sharding | None = None

    @property
    def size(self) -> int:
        """Number of elements."""
        return sum(map(math.prod, self.shapes))

    def vector(self, tree: Tree) -> np.ndarray:
        """Returns the tree as float32 [size], in the host's memory."""
        if self.sharding is None:
            return np.asarray(_joined(floats(tree)))
        # No device of an island holds the whole vector.
        leaves = [np.asarray(x, np.float32) for x in jax.tree.leaves(floats(tree))]
        return np.concatenate([x.reshape(-1) for x in leaves])

    def on_host(self) -> contextlib.AbstractContextManager:
        """Computes with whole vectors on the CPU in the `with` block, if in an island."""
        if self.sharding is None:
            return contextlib.nullcontext()
        return jax.default_device(cpu())

    def placed(self, vector: Any) -> Any:
        """Returns a vector as compiled functions take it: in an island as placed shards."""
        return vector if self.sharding is None else self.sharding.put(self.tree(vector))

    def of_placed(self, placed: Any) -> Tree:
        """Returns the tree of a `placed` vector."""
        return self.tree(placed) if self.sharding is None else placed

    def tree(self, vector: Any) -> Tree:
        """Returns the tree with float32 leaves."""
        ends = np.cumsum([math.prod(shape) for shape in self.shapes], dtype=int)
        split = np.split if isinstance(vector, np.ndarray) else jnp.split
        slices = split(vector, ends[:-1])
        leaves = [x.reshape(shape) for x, shape in zip(slices, self.shapes)]
        return jax.tree.unflatten(self.treedef, leaves)


def flat_of(tree: Tree) -> Flat:
    """Returns the conversion for trees like this one."""
    leaves, treedef = jax.tree.flatten(floats(tree))
    shapes = tuple(jnp.shape(x) for x in leaves)
    return Flat(treedef, shapes, sharding_of(tree))


@jax.jit
def _joined(tree: Tree) -> Any:
    flat = [jnp.ravel(x).astype(jnp.float32) for x in jax.tree.leaves(tree)]
    return jnp.concatenate(flat) if flat else jnp.zeros([0])


def check_wire(wire: Wire | WireFormat) -> None:
    """Raises ValueError for a wire format in which whole vectors cannot travel."""
    if Wire.of(wire).is_sparse:
        raise ValueError(
            "`wire` must not be 'top-k' where parameters travel whole, because it sends "
            f"differences only, got wire={wire!r}"
        )


def finite(vector: np.ndarray) -> bool:
    """Returns whether a float32 vector is finite, in one pass and without a copy."""
    return bool(np.isfinite(np.sum(vector, dtype=np.float64)))


class Snapshot(NamedTuple):
    """A worker as others see it.

    Attributes:
      vector: its parameters, float32 [n].
      measure: the number that decides how much is taken from it, such as dpwa's clock.
    """

    vector: Any
    measure: float


class Packed(NamedTuple):
    """An encoded vector of `size` elements: the arrays of a `Codec`'s message."""

    message: Any
    size: int
    wire: Wire


def pack(content: Any, wire: Wire, turn: int = 0, index: int = 0) -> Any:
    """Returns a float32 vector as it travels, and any other content unchanged.

    A vector that is not finite travels as it is, so that its receiver can tell.

    Args:
      content: the vector, float32 [n].
      wire: the format.
      turn: decides the draws of stochastic rounding. A worker that sends a vector again and
        again must draw anew each time; otherwise some vectors would never move.
      index: of the worker, whose draws are its own.

    >>> vector = np.linspace(-1, 1, 512, dtype=np.float32)
    >>> packed = pack(vector, Wire("int8"))
    >>> float(abs(unpack(packed) - vector).max()) <= 1 / 254
    True
    >>> nbytes(packed)
    520
    """
    is_vector = isinstance(content, np.ndarray) and content.dtype == np.float32
    if wire.format == "float32" or not is_vector or content.size == 1:
        return content
    if not finite(content):
        return content
    message = _encode(wire, content, np.int32(turn), np.int32(index))
    return Packed(jax.tree.map(np.asarray, message), content.size, wire)


def unpack(content: Any) -> Any:
    """Returns the content that was packed; of a `Snapshot` with its vector unpacked."""
    if isinstance(content, Snapshot):
        return content._replace(vector=unpack(content.vector))
    if not isinstance(content, Packed):
        return content
    return np.asarray(_decode(content.wire, content.size, content.message))


def nbytes(content: Any) -> int:
    """Returns the bytes of all arrays in a content that travels."""
    return sum(getattr(x, "nbytes", 0) for x in jax.tree.leaves(content))


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
