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

from lsgd_jax._src.trees import finite_part
from lsgd_jax._src.wire.blocks import Layout
from lsgd_jax._src.wire.codec import folded
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
    """
    b = wire.block
    blocks = sum(-(-n // b) for n in sizes)
    # The bytes of an encoded block with its scale.
    each = {"bfloat16": 2 * b, "int8": b + 4, "int4": -(-b // 2) + 4}[wire.format]
    message = sum(sizes) / b * each
    padded = -(-blocks // workers) * workers * each
    return workers * message > max(2 * padded, SMALL)


def add_up(x: Array, key: Array | None, wire: Wire, group: Any) -> tuple[Array, Array]:
    """Sums a buffer over all workers.

    Args:
      x: finite floats of any shape; 0 for a worker that does not take part.
      key: a random key, None to round to nearest.
      wire: a format of integers, or 'bfloat16'.
      group: the `Group` of the workers.

    Returns:
      (sum, error): the sum in float32, the same bits on all workers; this worker's error,
      of its message and of the sum of its share.
    """
    cut, layout = shares(x.shape, group.size, wire)

    def decode(message):
        return wire.decode(message, layout)

    rows = cut.rows(x.astype(jnp.float32))
    sent, given = wire.rounded(rows, layout, key)
    # XLA would take the difference once the messages have arrived, and hold both rows.
    sent, left = lax.optimization_barrier((sent, rows - given))
    arrived = second_round(jax.tree.map(group.transpose, sent))

    def add(i: Array, total: Array) -> Array:

        def row(x):
            return lax.dynamic_index_in_dim(x, i, keepdims=False)

        return total + decode(jax.tree.map(row, arrived))

    nothing = jnp.zeros(rows.shape[1:], jnp.float32)
    total = finite_part(lax.fori_loop(0, group.size, add, nothing))
    again = None if key is None else folded(key, 1)
    coded, given = wire.rounded(total, layout, again)
    own = lax.dynamic_index_in_dim(left, group.index, keepdims=False)
    own = own + total - given
    errors = lax.dynamic_update_index_in_dim(left, own, group.index, 0)
    sums = decode(jax.tree.map(group.gather, coded))
    return cut.array(sums), cut.array(errors)


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
