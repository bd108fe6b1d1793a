"""Permutations of workers: what they must be, and how arrays are sent along them."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax


Permutation = Sequence[tuple[int, int]]


def check_permutation(permutation: Permutation, size: int) -> None:
    """Raises ValueError unless sources and destinations are in range and occur once."""
    for side, indices in zip(("source", "destination"), zip(*permutation)):
        if len(set(indices)) < len(indices):
            raise ValueError(f"every {side} may occur once, got {permutation=}")
        if not all(0 <= i < size for i in indices):
            raise ValueError(
                f"indices must lie in 0..{size - 1} for a group of {size} "
                f"workers, got {permutation=}"
            )


def send_along(
    x: Array, permutation: Permutation, devices: tuple[str, ...], slots: Any
) -> Array:
    """`lax.ppermute` over a group of devices with several workers (slots) each.

    Args:
      x: what this worker sends.
      permutation: pairs of indices in the group.
      devices: the axes across devices.
      slots: the `Group` of the workers of one device.
    """
    if not slots.axes:
        return lax.ppermute(x, devices, permutation) if devices else x
    lanes: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for source, target in permutation:
        (d, s), (e, t) = divmod(source, slots.size), divmod(target, slots.size)
        lanes.setdefault((s, t), []).append((d, e))
    rows = slots.gather(x)  # every slot of this device
    arrived = jnp.zeros_like(rows)
    for (s, t), pairs in lanes.items():
        row = lax.ppermute(rows[s], devices, pairs) if devices else rows[s]
        arrived = arrived.at[t].add(row)
    return arrived[slots.index]
