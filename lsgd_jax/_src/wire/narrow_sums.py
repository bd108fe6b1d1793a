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

from lsgd_jax._src.trees import finite_part
from lsgd_jax._src.wire.blocks import array_of, rows_of
from lsgd_jax._src.wire.codec import folded
from lsgd_jax._src.wire.wire import (
    Coded,
    Wire,
    block_nbytes,
    dequantized,
    noise,
    packed,
    quantized,
    unpacked,
)


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
    size, me, block = group.size, group.index, wire.block
    blocks = [rows_of(x.astype(jnp.float32), block, size) for x in buffers]
    counts = [len(x) // size for x in blocks]  # of a share
    sent = [quantized(x, wire, noise(x.shape, wire, key)) for x, key in zip(blocks, keys)]
    left = [x - dequantized(coded) for x, coded in zip(blocks, sent)]

    def travels(coded: Coded) -> Coded:
        return Coded(packed(coded.codes, wire), coded.scales)

    def arrives(coded: Coded) -> Array:
        return dequantized(Coded(unpacked(coded.codes, wire, block), coded.scales))

    by_owner = lambda rows: rows.reshape(size, -1, *rows.shape[1:])
    joined = lambda *rows: jnp.concatenate(list(map(by_owner, rows)), axis=1)
    shares = jax.tree.map(joined, *map(travels, sent))
    arrived = jax.tree.map(group.transpose, shares)

    def add(i: Array, total: Array) -> Array:
        row = lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False)
        return total + arrives(jax.tree.map(row, arrived))

    nothing = jnp.zeros([sum(counts), block], jnp.float32)
    total = finite_part(lax.fori_loop(0, size, add, nothing))
    drawn = zip(counts, [key for key in keys if key is not None])
    again = [noise((n, block), wire, folded(key, 1)) for n, key in drawn]
    coded = quantized(total, wire, jnp.concatenate(again) if again else None)
    error = total - dequantized(coded)
    rows = jax.tree.map(group.gather, travels(coded))

    def sum_of(x: Array, count: int, end: int) -> Array:
        cut = lambda rows: rows[:, end - count : end].reshape(-1, *rows.shape[2:])
        return array_of(arrives(jax.tree.map(cut, rows)), x.shape)

    def error_of(x: Array, left: Array, count: int, end: int) -> Array:
        own = lax.dynamic_slice_in_dim(left, me * count, count) + error[end - count : end]
        left = lax.dynamic_update_slice_in_dim(left, own, me * count, 0)
        return array_of(left, x.shape)

    ends = list(itertools.accumulate(counts))
    sums = map(sum_of, buffers, counts, ends)
    errors = map(error_of, buffers, left, counts, ends)
    return list(sums), list(errors)
