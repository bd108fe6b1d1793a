"""Sums of encoded buffers whose cost does not grow with the number of workers.

The blocks of each buffer are cut into W shares of equal size. A worker sends each share of
its message to the share's owner (all-to-all), adds up the W messages of its own share in
float32, encodes the sum, and sends it to all workers (all-gather):

    worker i sends Q(x_i);  the owner of a share sends Q(Σ_i Q(x_i)), which all workers take

The error of the first rounding belongs to its worker, and that of the second to the owner
of the share: Σ_i x_i = sum + Σ_i error_i.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from lsgd_jax._src.trees import Tree, finite_part
from lsgd_jax._src.wire.wire import Wire, block_nbytes, decode_blocks, encode_blocks


# A gather of so many bytes takes no longer than the second round of messages.
SMALL = 2**16


def pays(tree: Tree, wire: Wire, size: int) -> bool:
    """Whether shares bring a worker fewer bytes than a gather of all workers' messages.

    A gather brings W messages of m bytes, and shares bring two messages that are padded to
    m' bytes, W shares of whole blocks: W m > max(2 m', 64 KiB). The answer depends on the
    shapes of the leaves alone, so that it is the same on all layouts of devices.

    >>> import lsgd_jax as lj
    >>> [pays(jnp.zeros(10**5), lj.Wire("int8"), size) for size in (2, 3, 32)]
    [False, True, True]
    """
    sizes = [x.size for x in jax.tree.leaves(tree)]
    blocks = sum(-(-n // wire.block) for n in sizes)
    each = block_nbytes(wire)
    message = sum(sizes) / wire.block * each
    padded = -(-blocks // size) * size * each
    return size * message > max(2 * padded, SMALL)


def add_up(
    buffers: Sequence[Array], wire: Wire, keys: Sequence[Array | None], line: Any
) -> tuple[list[Array], list[Array]]:
    """Sums over all workers, of float buffers of any shapes.

    Args:
      buffers: finite; 0 for a worker that does not take part.
      wire: a format of integers, or 'bfloat16'.
      keys: for each buffer and for the sum a random key, None to round to nearest.
      line: the `codec.Line` that carries the messages.

    Returns:
      (sums, errors): the sums in float32, the same bits on all workers; this worker's
      errors, of its message and of the sum of its share.
    """
    size, me = line.channel.size, line.channel.index
    blocks = [_blocks(x, wire, size) for x in buffers]
    sent = [encode_blocks(x, wire, key) for x, key in zip(blocks, keys)]
    left = [x - decode_blocks(coded, wire) for x, coded in zip(blocks, sent)]

    by_owner = lambda rows: rows.reshape(size, -1, *rows.shape[1:])
    joined = lambda *rows: jnp.concatenate(list(map(by_owner, rows)), axis=1)
    arrived = jax.tree.map(lambda *rows: line.transpose(joined(*rows)), *sent)

    def add(i: Array, total: Array) -> Array:
        row = lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False)
        return total + decode_blocks(jax.tree.map(row, arrived), wire)

    counts = [len(x) // size for x in blocks]
    nothing = jnp.zeros([sum(counts), wire.block], jnp.float32)
    total = finite_part(lax.fori_loop(0, size, add, nothing))
    coded = encode_blocks(total, wire, keys[-1])
    error = total - decode_blocks(coded, wire)
    rows = jax.tree.map(line.gather, coded)

    def of_buffer(x: Array, left: Array, count: int, end: int) -> tuple[Array, Array]:
        cut = lambda rows: rows[:, end - count : end].reshape(-1, *rows.shape[2:])
        whole = lambda blocks: blocks.ravel()[: x.size].reshape(x.shape)
        own = lax.dynamic_slice_in_dim(left, me * count, count) + error[end - count : end]
        left = lax.dynamic_update_slice_in_dim(left, own, me * count, 0)
        return whole(decode_blocks(jax.tree.map(cut, rows), wire)), whole(left)

    each = list(map(of_buffer, buffers, left, counts, itertools.accumulate(counts)))
    return [sums for sums, _ in each], [errors for _, errors in each]


def _blocks(x: Array, wire: Wire, size: int) -> Array:
    """x in rows of one block, in a multiple of `size` rows, with zeros behind its end."""
    flat = x.ravel().astype(jnp.float32)
    return jnp.pad(flat, (0, -flat.size % (wire.block * size))).reshape(-1, wire.block)
