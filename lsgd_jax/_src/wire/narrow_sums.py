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
from lsgd_jax._src.wire.packing import Cut, is_large
from lsgd_jax._src.wire.wire import Wire, block_nbytes


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
    blocks = sum(-(-n // wire.block) for n in sizes)
    each = block_nbytes(wire)
    message = sum(sizes) / wire.block * each
    padded = -(-blocks // workers) * workers * each
    return workers * message > max(2 * padded, SMALL)


def add_up(
    buffers: Sequence[Array], keys: Sequence[Array | None], wire: Wire, group: Any
) -> tuple[list[Array], list[Array]]:
    """Sums over all workers, of float buffers of any shapes.

    Args:
      buffers: finite; 0 for a worker that does not take part.
      keys: for each buffer a random key, None to round to nearest.
      wire: a format of integers, or 'bfloat16'.
      group: the `Group` of the workers.

    Returns:
      (sums, errors): the sums in float32, the same bits on all workers; this worker's
      errors, of its message and of the sum of its share.
    """
    size, me = group.size, group.index
    cuts, layouts = zip(*(shares(x.shape, size, wire) for x in buffers))
    encode = lambda arrays, keys: list(map(wire.encode, arrays, layouts, keys))
    decode = lambda messages: list(map(wire.decode, messages, layouts))

    rows = [cut.rows(x.astype(jnp.float32)) for cut, x in zip(cuts, buffers)]
    sent = encode(rows, keys)
    left = map(jnp.subtract, rows, decode(sent))
    arrived = jax.tree.map(group.transpose, sent)

    def add(i: Array, totals: list[Array]) -> list[Array]:
        row = lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False)
        return list(map(jnp.add, totals, decode(jax.tree.map(row, arrived))))

    nothing = [jnp.zeros(x.shape[1:], jnp.float32) for x in rows]
    totals = list(map(finite_part, lax.fori_loop(0, size, add, nothing)))
    coded = encode(totals, [None if key is None else folded(key, 1) for key in keys])
    errors = map(jnp.subtract, totals, decode(coded))

    def add_own(left: Array, error: Array) -> Array:
        own = lax.dynamic_index_in_dim(left, me, keepdims=False) + error
        return lax.dynamic_update_index_in_dim(left, own, me, 0)

    whole = lambda rows: [cut.array(found) for cut, found in zip(cuts, rows)]
    sums = decode(jax.tree.map(group.gather, coded))
    return whole(sums), whole(map(add_own, left, errors))


def shares(shape: tuple[int, ...], workers: int, wire: Wire) -> tuple[Cut, Layout]:
    """How a buffer is cut into a share for each worker, and a share into blocks.

    A large leaf keeps its shape if it can. Flattened, XLA for TPUs would lay it out anew.

    >>> import lsgd_jax as lj
    >>> cut, layout = shares((4096, 512), 8, lj.Wire("int8"))
    >>> cut.part, layout
    ((512, 512), Along(shape=(512, 512), axis=0, block=256))
    """
    cut = Cut.of(shape, workers)
    if is_large(shape) and (layout := wire.along_leading(cut.part)):
        return cut, layout
    cut = Cut.flat(shape, workers, wire.block)
    return cut, wire.along(cut.part)
