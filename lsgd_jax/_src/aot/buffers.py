"""The largest buffers of a compiled program, at the moment when most memory is in use."""

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

from lsgd_jax._src.aot.hlo import HloModule, Instruction, nbytes


# Results that lie in the memory of operands.
ALIASES = "bitcast", "optimization-barrier", "tuple", "while", "send"
ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([\d,]*)(?::([^}]*))?\})?")
TILE = re.compile(r"T\(([\d,]+)\)")
OPERATOR = re.compile(r'op_name="([^"]*)"')
OUTPUTS = re.compile(r"\{(\d*)\}: \(\d+, \{[\d,]*\}, \w+-alias\)")


class Buffer(NamedTuple):
    """A temporary of a program.

    Attributes:
      bytes: its size in HBM, with the padding of tiles.
      shape: such as ``f32[8,128]``.
      name: that of the instruction whose result it is.
      operator: where the instruction comes from, as in a profile; '' if XLA does not tell.
    """

    bytes: int
    shape: str
    name: str
    operator: str


def largest(text: str) -> list[Buffer]:
    """Returns the temporaries that are alive when most memory is in use, largest first.

    The order of the lines is that of execution. XLA may also reuse memory in ways that the
    text does not show, so that the sum is an estimate.
    """
    program = HloModule(text)
    aliased = set(OUTPUTS.findall(text.partition("\n")[0]))
    lines = program.computations.get(program.entry, [])
    root = lines[-1].operands if lines else ()
    donated = [name for i, name in enumerate(root) if str(i) in aliased]
    return sorted(_alive(program, program.entry, donated), key=lambda x: -x.bytes)


def _alive(program: HloModule, name: str, without: Iterable[str] = ()) -> list[Buffer]:
    """The buffers of a computation at its peak, without those of its arguments."""
    lines = program.computations.get(name, [])
    done = {line.operands[0]: line.type for line in lines if line.opcode.endswith("-done")}
    owners: dict[str, tuple[str, ...]] = {}  # name -> instructions that hold its memory
    last: dict[str, int] = {}
    for i, line in enumerate(lines):
        owners[line.name] = _owners(line, owners)
        for used in (line.name, *line.operands):
            last |= dict.fromkeys(owners.get(used, ()), i)
    own = {x for used in without for x in owners.get(used, ())}
    best: list[Buffer] = []
    live: dict[str, Buffer] = {}
    for i, line in enumerate(lines):
        if owners[line.name] == (line.name,) and line.name not in own:
            # The type of a start contains its operands, too.
            type = done.get(line.name, line.type)
            size = _size(type)
            if size:
                found = OPERATOR.search(line.attributes)
                shape = re.sub(r"\{[^}]*\}", "", type)
                operator = found.group(1) if found else ""
                live[line.name] = Buffer(size, shape, line.name, operator)
        called = line.called if line.opcode in ("while", "conditional", "call") else ()
        inner = max((_alive(program, x) for x in called), key=_total, default=[])
        if _total(live.values()) + _total(inner) > _total(best):
            best = [*live.values(), *inner]
        live = {name: x for name, x in live.items() if last[name] > i}
    return best


def _owners(line: Instruction, owners: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    if line.opcode in ("parameter", "constant"):
        return ()

    def of(name):
        return owners.get(name, ())

    if line.opcode == "get-tuple-element" or line.opcode.endswith("-done"):
        return of(line.operands[0]) if line.operands else ()
    if line.opcode == "dynamic-update-slice":
        return of(line.operands[0])
    if line.opcode in ALIASES or "output_to_operand_aliasing=" in line.attributes:
        return tuple(x for name in line.operands for x in of(name))
    return (line.name,)


def _size(type: str) -> int:
    """The bytes of a type in HBM, without those that lie in a memory of the chip.

    >>> _size("f32[4,100]{1,0:T(8,128)}"), _size("bf16[8,128]{1,0:T(8,128)(2,1)S(1)}")
    (4096, 0)
    """
    total = 0
    for kind, dims, order, layout in ARRAY.findall(type):
        if "S(" in layout:
            continue
        sizes = [int(n) for n in dims.split(",") if n]
        tile = TILE.search(layout)
        minor = [int(n) for n in order.split(",") if n]
        widths = [int(n) for n in tile.group(1).split(",")][::-1] if tile else []
        for dim, width in zip(minor, widths):
            sizes[dim] = math.ceil(sizes[dim] / width) * width
        total += nbytes(f"{kind}[{','.join(map(str, sizes))}]")
    return total


def _total(buffers: Iterable[Buffer]) -> int:
    return sum(x.bytes for x in buffers)
