"""Moves the trees of a pull between device memory and host memory.

The memory of an array is part of its type in jax, so a tree stays in place until it is
moved.
"""

from typing import Literal

import jax

from lsgd_jax._src.trees import Tree


Memory = Literal["device", "host"]
KIND = "pinned_host"


def to_host(tree: Tree) -> Tree:
    """Moves a tree to host memory; scalars stay on the device."""
    return _moved(tree, jax.memory.Space.Host)


def to_device(tree: Tree) -> Tree:
    """Moves a tree to the device's own memory."""
    return _moved(tree, jax.memory.Space.Device)


def check_host() -> None:
    """Raises ValueError if the devices cannot keep arrays in host memory."""
    device = jax.devices()[0]
    kinds = [memory.kind for memory in device.addressable_memories()]
    if KIND not in kinds:
        raise ValueError(
            f"`memory` must be 'device' on {device.platform}, which has no memory "
            f"{KIND!r} but {', '.join(map(repr, kinds))}; got memory='host'"
        )


def _moved(tree: Tree, space: jax.memory.Space) -> Tree:

    def move(x: jax.Array) -> jax.Array:
        return jax.device_put(x, space) if x.ndim else x

    return jax.tree.map(move, tree)
