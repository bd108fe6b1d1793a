"""The links between the chips of a slice that a collective can use."""

from collections.abc import Sequence


Place = tuple[int, ...]


def share(kind: str, places: Sequence[Place], sizes: Place, links: int) -> float:
    """Returns the share of its links that each chip of a group can use.

    On an axis a chip has one link, and two where the group goes around a torus.

    Args:
      kind: that of the collective, such as 'all-gather'.
      places: of the group's chips in their slice.
      sizes: of the slice.
      links: of a chip, four or six.

    >>> row = [(x, 0) for x in range(16)]
    >>> share("all-gather", row, (16, 16), 4), share("all-gather", row[:4], (4, 4), 4)
    (0.5, 0.25)
    """
    is_cubes = all(n % 4 == 0 for n in sizes)
    used = 0.0
    longest = 1
    for size, column in zip(sizes, zip(*places)):
        own = sorted(set(column))
        if len(own) > 1:
            # Tori of TPUs are rings of 16 chips, or with six links cubes of 4 x 4 x 4.
            is_torus = is_cubes if links == 6 else size == 16
            goes_around = is_torus and len(own) == size
            # Groups that lie between each other share links.
            used += (1 + goes_around) / min(b - a for a, b in zip(own, own[1:]))
            longest = max(longest, len(own))
    if longest == 1:  # two devices of one chip
        return 1.0
    if kind == "collective-permute":
        used = 1.0
    elif "all-to-all" in kind:  # messages travel a quarter of the way around
        used *= min(1.0, 4 / longest)
    return min(1.0, used / links)
