"""Contents that travel between workers: trees of arrays, as they are or encoded.

A worker's parameters travel in their own dtypes, differences of parameters in float32 or
wider, and in a narrow format what the codec makes of them. No worker has to know what a
peer has missed, as it would if differences to earlier messages traveled; in DiLoCo, where
they do, a message says what it builds on. The sender keeps the quantization error where it
would be lost otherwise (sums, the anchors of fragments, both sides of an exchange).
"""

import functools
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from lsgd_jax._src.layouts import on_one_device
from lsgd_jax._src.trees import Tree, floats
from lsgd_jax._src.wire.codec import Codec, draws
from lsgd_jax._src.wire.wire import Wire, WireFormat


class Snapshot(NamedTuple):
    """A worker as others see it.

    Attributes:
      params: its parameters, or what it contributes in their place; a tree of floats.
      measure: the number that decides how much is taken from it, such as dpwa's clock.
    """

    params: Tree
    measure: float

    @property
    def vector(self) -> np.ndarray:
        """The parameters as one vector, float32 [n]."""
        return as_vector(self.params)


# Trees in the host's memory


def on_host(params: Tree) -> Tree:
    """Returns the leaves that hold floats, in the host's memory; see `trees.floats`."""
    return jax.tree.map(np.asarray, floats(params))


def combined(fn: Callable[..., Any], *trees: Tree) -> Tree:
    """Returns fn of corresponding leaves, computed in float32 or wider.

    >>> import operator
    >>> combined(operator.sub, {"a": np.float32([2, 3])}, {"a": np.float32([1, 1])})
    {'a': array([1., 2.], dtype=float32)}
    """

    def wide(x):
        return np.asarray(x, np.promote_types(x.dtype, np.float32))

    with np.errstate(invalid="ignore", over="ignore"):
        return jax.tree.map(lambda *x: np.asarray(fn(*map(wide, x))), *trees)


def finite(tree: Tree) -> bool:
    """Returns whether a tree is finite, in one pass and without a copy."""
    sums = (np.sum(x, dtype=np.float64) for x in jax.tree.leaves(tree))
    return all(np.isfinite(x) for x in sums)


def as_vector(tree: Tree, dtype: Any = np.float32) -> np.ndarray:
    """Returns the leaves that hold floats one after the other, as a vector [n]."""
    leaves = [np.asarray(x, dtype).ravel() for x in jax.tree.leaves(on_host(tree))]
    return np.concatenate([np.zeros(0, dtype), *leaves])


def of_vector(vector: np.ndarray, like: Tree) -> Tree:
    """Returns the tree of such a vector, with shapes and dtypes as in `like`.

    >>> tree = {"a": np.ones(2), "b": np.array([[1, 2]], np.float32)}
    >>> of_vector(as_vector(tree), tree)["b"].tolist()
    [[1.0, 2.0]]
    """
    leaves, treedef = jax.tree.flatten(like)
    slices = np.split(vector, np.cumsum([x.size for x in leaves])[:-1])
    each = zip(slices, leaves)
    return treedef.unflatten(s.reshape(x.shape).astype(x.dtype) for s, x in each)


# In one buffer, because a call with many arrays takes ten times as long


class Buffered(NamedTuple):
    """A content whose arrays lie one after the other in one buffer."""

    buffer: np.ndarray
    sizes: list[int]
    pickled: bytes


def buffered(content: Any) -> Buffered:
    """Returns a content in one buffer.

    >>> unbuffered(buffered(Snapshot({"a": np.arange(2)}, 0.5)))
    Snapshot(params={'a': array([0, 1])}, measure=0.5)
    """
    found: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(content, protocol=5, buffer_callback=found.append)
    arrays = [np.frombuffer(x.raw(), np.uint8) for x in found]
    buffer = np.concatenate([np.zeros(0, np.uint8), *arrays])
    return Buffered(buffer, [x.size for x in arrays], pickled)


def unbuffered(content: Buffered) -> Any:
    """Returns the content, with its arrays on the memory of the buffer."""
    arrays = np.split(content.buffer, np.cumsum(content.sizes, dtype=int)[:-1])
    return pickle.loads(content.pickled, buffers=arrays)


# In the format of a wire


class Packed(NamedTuple):
    """An encoded tree: the arrays of a `Codec`'s message, and their tree's shapes."""

    message: Any
    like: Tree
    wire: Wire


def check_wire(wire: Wire | WireFormat) -> None:
    """Raises ValueError for a wire format in which whole parameters cannot travel."""
    if Wire.of(wire).is_sparse:
        raise ValueError(
            "`wire` must not be 'top-k' where parameters travel whole, because it sends "
            f"differences only, got wire={wire!r}"
        )


def pack(tree: Tree, wire: Wire, number: int = 0, index: int = 0) -> Any:
    """Returns a tree as it travels; one that is not finite as it is, so that it is seen.

    Args:
      tree: of arrays in the host's memory.
      wire: the format.
      number: of the message, which decides the draws of stochastic rounding. A worker that
        sends a tree again and again must draw anew each time; otherwise some trees would
        never move.
      index: of the worker, whose draws are its own.

    >>> vector = np.linspace(-1, 1, 512, dtype=np.float32)
    >>> packed = pack(vector, Wire("int8"))
    >>> float(abs(unpack(packed) - vector).max()) <= 1 / 254
    True
    >>> nbytes(packed)
    520
    """
    if wire.format == "float32" or not finite(tree):
        return tree
    message = _encode(wire, tree, np.int32(number), np.int32(index))
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    return Packed(jax.tree.map(np.asarray, message), like, wire)


def unpack(content: Any) -> Any:
    """Returns the content that was packed; of a `Snapshot` with its parameters unpacked."""
    if isinstance(content, Snapshot):
        return content._replace(params=unpack(content.params))
    if not isinstance(content, Packed):
        return content
    leaves, treedef = jax.tree.flatten(content.like)
    tree = _decode(content.wire, treedef, tuple(leaves), content.message)
    return jax.tree.map(np.asarray, tree)


def nbytes(content: Any) -> int:
    """Returns the bytes of all arrays in a content that travels."""
    return sum(getattr(x, "nbytes", 0) for x in jax.tree.leaves(content))


@functools.partial(jax.jit, static_argnums=0)
def _encode(wire: Wire, tree: Tree, number: Any, index: Any) -> Any:
    key = None if wire.rounding == "nearest" else draws(wire.seed, number, index)
    with on_one_device():
        return Codec(tree, wire).encode(tree, key)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _decode(wire: Wire, treedef: Any, leaves: tuple[Any, ...], message: Any) -> Tree:
    with on_one_device():
        return Codec(treedef.unflatten(leaves), wire).decode(message)
