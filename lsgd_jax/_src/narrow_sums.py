"""Sums of encoded buffers whose cost does not grow with the number of workers.

All blocks of all buffers are cut into W shares of equal size. A worker sends each share of
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
from lsgd_jax._src.wire import Wire, block_nbytes, decode_blocks, encode_blocks


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
    size = line.channel.size
    sent = [encode_blocks(_blocks(x, wire), wire, key) for x, key in zip(buffers, keys)]
    counts = [coded.codes.shape[0] for coded in sent]
    share = -(-sum(counts) // size)

    def shares(*rows: Array) -> Array:
        joined = jnp.concatenate(rows)
        gap = [(0, size * share - len(joined)), *[(0, 0)] * (joined.ndim - 1)]
        return jnp.pad(joined, gap).reshape(size, share, *joined.shape[1:])

    messages = jax.tree.map(shares, *sent)
    arrived = jax.tree.map(line.transpose, messages)

    def add(i: Array, total: Array) -> Array:
        row = lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False)
        return total + decode_blocks(jax.tree.map(row, arrived), wire)

    nothing = jnp.zeros([share, wire.block], jnp.float32)
    total = finite_part(lax.fori_loop(0, size, add, nothing))
    coded = encode_blocks(total, wire, keys[-1])
    mine = jnp.arange(size)[:, None, None] == line.channel.index
    owed = jnp.where(mine, (total - decode_blocks(coded, wire))[None], 0)
    owed = owed.reshape(size * share, wire.block)
    flat = lambda x: line.gather(x).reshape(size * share, *x.shape[1:])
    rows = jax.tree.map(flat, coded)

    def of_buffer(x: Array, own: Any, end: int) -> tuple[Array, Array]:
        cut = lambda rows: rows[end - own.codes.shape[0] : end]
        whole = lambda blocks: blocks.ravel()[: x.size].reshape(x.shape)
        arrives = whole(decode_blocks(jax.tree.map(cut, rows), wire))
        return arrives, x - whole(decode_blocks(own, wire)) + whole(cut(owed))

    each = list(map(of_buffer, buffers, sent, itertools.accumulate(counts)))
    return [sums for sums, _ in each], [errors for _, errors in each]


def _blocks(x: Array, wire: Wire) -> Array:
    """The elements of x in rows of one block, with zeros behind the last one."""
    flat = x.ravel().astype(jnp.float32)
    return jnp.pad(flat, (0, -flat.size % wire.block)).reshape(-1, wire.block)
