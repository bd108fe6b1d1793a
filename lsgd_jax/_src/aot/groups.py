"""The groups of devices that communicate, in the forms in which XLA writes them."""

import itertools
import math
import re

import numpy as np


Groups = list[tuple[int, ...]]
LISTED = re.compile(r"replica_groups=\{(\{.*?\})?\}(?:,|$)")
IOTA = re.compile(r"replica_groups=(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)")
MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](.*?)\{([^}]*)\}")
PAIRS = re.compile(r"source_target_pairs=\{(.*?\})\}")


def groups_of(attributes: str, count: int) -> Groups:
    """Returns the groups of a collective among `count` devices.

    >>> groups_of("replica_groups={{0,1},{2,3}}, x=1", 4)
    [(0, 1), (2, 3)]
    >>> groups_of("replica_groups=[2,2]<=[2,2]T(1,0)", 4)
    [(0, 2), (1, 3)]
    >>> groups_of("replica_groups=mesh['node'=2,'local'=2] {'node'}", 4)
    [(0, 2), (1, 3)]
    >>> groups_of("replica_groups={}", 4)
    [(0, 1, 2, 3)]
    """
    found = IOTA.search(attributes)
    if found:
        return [tuple(row) for row in _iota(found.group(1)).tolist()]
    found = MESH.search(attributes)
    if found:
        return _of_mesh(*found.groups())
    found = LISTED.search(attributes)
    if found:
        rows = re.findall(r"\{([\d,]+)\}", found.group(1) or "")
        return [_numbers(row) for row in rows] or [tuple(range(count))]
    return [tuple(range(count))]


def pairs_of(attributes: str) -> list[tuple[int, int]]:
    """Returns the senders and receivers of a permutation.

    >>> pairs_of("source_target_pairs={{0,3},{3,0}}, x={1}")
    [(0, 3), (3, 0)]
    """
    found = PAIRS.search(attributes)
    pairs = re.findall(r"\{(\d+),(\d+)\}", found.group(0)) if found else ()
    return [(int(a), int(b)) for a, b in pairs]


def _iota(text: str) -> np.ndarray:
    shape, _, source = text.partition("<=")
    dims, _, order = source.partition("T")
    ids = np.arange(math.prod(_numbers(dims))).reshape(_numbers(dims))
    return ids.transpose(_numbers(order) if order else None).reshape(_numbers(shape))


def _of_mesh(axes: str, devices: str, of: str) -> Groups:
    """Groups along the axes `of` of a mesh, of which the rest distinguish groups."""
    sizes = {name: int(size) for name, size in re.findall(r"'?([^',=]+)'?=(\d+)", axes)}
    ids = np.arange(math.prod(sizes.values()))
    iota = re.search(r"(\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)", devices)
    listed = re.search(r"\(([\d,]+)\)", devices)
    if iota:
        ids = _iota(iota.group(1)).reshape(-1)
    elif listed:
        ids = np.array(_numbers(listed.group(1)))
    # A part of an axis is written 'axis':(before)size; it splits the axis.
    grid = ids
    names = list(sizes)
    chosen = []
    for name in re.findall(r"'([^']+)'(?!:)", of):
        chosen.append(names.index(name))
    shape = list(sizes.values())
    for name, before, size in re.findall(r"'([^']+)':\((\d+)\)(\d+)", of):
        at = names.index(name)
        whole = shape[at]
        before = int(before)
        size = int(size)
        shape[at : at + 1] = [before, size, whole // before // size]
        names[at : at + 1] = [None, name, None]
        chosen = [c + 2 * (c > at) for c in chosen] + [at + 1]
    grid = ids.reshape(shape)
    rest = [i for i in range(len(shape)) if i not in chosen]
    members = math.prod(shape[i] for i in chosen)
    return [
        tuple(row) for row in grid.transpose(*rest, *chosen).reshape(-1, members).tolist()
    ]


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", text)))


def expanded(text: str) -> list[int]:
    """Numbers and ranges of a list.

    >>> expanded("1,2"), expanded("0:3")
    ([1, 2], [0, 1, 2, 3])
    """
    spans = re.findall(r"(\d+)(?::(\d+))?", text)
    each = (range(int(a), int(b or a) + 1) for a, b in spans)
    return list(itertools.chain(*each))
