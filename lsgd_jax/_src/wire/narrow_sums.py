"""Sums of encoded buffers whose cost does not grow with the number of workers.

Each buffer is cut into W shares of equal size. A worker sends each share of its message to
the share's owner (all-to-all), adds up the W messages of its own share in float32, encodes
the sum, and sends it to all workers (all-gather):

    worker i sends Q(x_i);  the owner of a share sends Q(Σ_i Q(x_i)), which all workers take

The error of the first rounding belongs to its worker, and that of the second to the owner
of the share: Σ_i x_i = sum + Σ_i error_i.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from lsgd_jax._src.trees import Tree, finite_part
from lsgd_jax._src.wire.blocks import Layout
from lsgd_jax._src.wire.codec import Message, folded
from lsgd_jax._src.wire.packing import Cut
from lsgd_jax._src.wire.shares import second_round
from lsgd_jax._src.wire.wire import Wire


# A gather of so many bytes takes no longer than the second round of messages.
SMALL = 2**16


def pays(sizes: Sequence[int], wire: Wire, workers: int) -> bool:
    """Whether shares bring a worker fewer bytes than a gather of all workers' messages.

    A gather brings W messages of m bytes, and shares bring two messages that are padded to
    m' bytes, W shares of whole blocks: W m > max(2 m', 64 KiB). The answer depends on the
    sizes of the leaves alone, so that it is the same on all layouts of devices.

    >>> import lsgd_jax as lj
    >>> [pays([10**5], lj.Wire("int8"), workers) for workers in (2, 3, 32)]
    [False, True, True]
    >>> pays([5 * 10**4], lj.Wire("int4"), workers=3)
    True
    """
    b = wire.block
    blocks = sum(-(-n // b) for n in sizes)
    # The bytes of an encoded block with its scale.
    each = {"bfloat16": 2 * b, "int8": b + 4, "int4": -(-b // 2) + 4}[wire.format]
    message = sum(sizes) / b * each
    padded = -(-blocks // workers) * workers * each
    return workers * message > max(2 * padded, SMALL)


def add_up(
    buffers: Sequence[Array],
    keys: Sequence[Array | None],
    beside: Tree,
    wire: Wire,
    group: Any,
) -> tuple[list[Array], list[Array], Tree]:
    """Sums buffers over all workers, in two messages.

    Args:
      buffers: finite floats of any shape; 0 for a worker that does not take part.
      keys: for each buffer a random key, None to round to nearest.
      beside: a small tree that is gathered with the sums.
      wire: a format of integers, or 'bfloat16'.
      group: the `Group` of the workers.

    Returns:
      (sums, errors, rows): the sums in float32, the same bits on all workers; this worker's
      errors, of its messages and of the sums of its shares; all workers' trees `beside`.
    """
    summed = [ShareSum(x, key, wire, group) for x, key in zip(buffers, keys, strict=True)]
    arrived = group.transpose([each.message for each in summed])
    totals = [each.total(second_round(rows)) for each, rows in zip(summed, arrived)]
    coded, rows = group.gather(([sent for sent, _ in totals], beside))
    sums = [each.sums(message) for each, message in zip(summed, coded)]
    errors = [each.errors(left) for each, (_, left) in zip(summed, totals)]
    return sums, errors, rows


class ShareSum:
    """The sum of one buffer over all workers, of which each adds up its share.

    Args:
      x, key, wire, group: see `add_up`.

    Attributes:
      message: Q(x), by shares, [W, ...].
    """

    def __init__(self, x: Array, key: Array | None, wire: Wire, group: Any):
        self._wire = wire
        self._group = group
        self._key = key
        self._cut, self._layout = shares(x.shape, group.size, wire)
        rows = self._cut.rows(x.astype(jnp.float32))
        sent, given = wire.rounded(rows, self._layout, key)
        # XLA would take the difference once the messages have arrived, and hold both rows.
        self.message, self._left = lax.optimization_barrier((sent, rows - given))

    def total(self, arrived: Message) -> tuple[Message, Array]:
        """Q(S) and S - Q(S) of this worker's share S = Σ_i Q(x_i), of W messages."""

        def add(i: Array, total: Array) -> Array:

            def row(x):
                return lax.dynamic_index_in_dim(x, i, keepdims=False)

            return total + self._decoded(jax.tree.map(row, arrived))

        nothing = jnp.zeros(self._cut.part, jnp.float32)
        total = finite_part(lax.fori_loop(0, self._group.size, add, nothing))
        again = None if self._key is None else folded(self._key, 1)
        coded, given = self._wire.rounded(total, self._layout, again)
        return coded, total - given

    def sums(self, messages: Message) -> Array:
        """The sum of the buffer, from the messages of all shares."""
        return self._cut.array(self._decoded(messages))

    def errors(self, of_total: Array) -> Array:
        """The errors that are this worker's, with that of the sum of its share."""
        index = self._group.index
        own = lax.dynamic_index_in_dim(self._left, index, keepdims=False) + of_total
        errors = lax.dynamic_update_index_in_dim(self._left, own, index, 0)
        return self._cut.array(errors)

    def _decoded(self, message: Message) -> Array:
        return self._wire.decode(message, self._layout)


def shares(shape: tuple[int, ...], workers: int, wire: Wire) -> tuple[Cut, Layout]:
    """How a buffer is cut into a share for each worker, and a share into blocks.

    Shares of a large leaf that are too small for blocks along an axis are flat.

    >>> import lsgd_jax as lj
    >>> cut, layout = shares((4096, 512), 8, lj.Wire("int8"))
    >>> cut.part, layout
    ((512, 512), Along(shape=(512, 512), axis=0, block=256))
    """
    cut = wire.cut(shape, workers)
    layout = wire.along_leading(cut.part)
    if layout is not None:
        return cut, layout
    cut = Cut.flat(shape, workers, wire.block)
    return cut, wire.along(cut.part)
