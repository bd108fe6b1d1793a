"""What the axes of the workers are called where a function of one worker is traced."""

from collections.abc import Sequence

from jax import lax


# With several workers on a device, `Workers` may split an axis in two: the devices
# along it, and the slots of one device (a vmapped axis).
DEVICE, SLOT = "{}_device", "{}_slot"


def names_here(axes: Sequence[str]) -> tuple[str, ...]:
    """The names under which JAX knows the axes here, without those of size 1."""
    found = []
    for axis in axes:
        whole, *parts = parts_of(axis)
        known = [whole] if bound(whole) else list(filter(bound, parts))
        if not known:
            raise NameError(
                f"no axis {axis!r} here: call this inside `Workers.map` (or "
                f"`jax.shard_map`), on a mesh that has an axis {axis!r}"
            )
        found += known
    return tuple(name for name in found if lax.axis_size(name) > 1)


def parts_of(axis: str) -> tuple[str, str, str]:
    """The axis itself, and what it is called if it is split."""
    return axis, DEVICE.format(axis), SLOT.format(axis)


def bound(axis: str) -> bool:
    """Whether the axis has a meaning where we are traced."""
    try:
        lax.axis_size(axis)
    except NameError:
        return False
    return True
