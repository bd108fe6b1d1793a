"""Counts the bytes that the kernels of a GPU program move between HBM and the chip.

XLA has no such count for GPUs. A kernel is a line of a scheduled program: a fusion, a
product or a copy. It reads its operands and writes its result; nothing stays on the chip.
"""

from lsgd_jax._src.aot.hlo import HloModule, Instruction, nbytes
from lsgd_jax._src.shared import REPAIR


FREE = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"),
    *("partition-id", "replica-id", "opt-barrier", "add-dependency", "send", "recv"),
    *("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "ragged-all-to-all"),
    *("collective-permute", "collective-broadcast"),
}
RENAMES = "bitcast", "reshape", "get-tuple-element"
SLICES = "dynamic-slice", "slice", "gather"
WORKSPACE = "__cublas"  # the last result of these calls is scratch memory, mostly unused


def moved(program: HloModule, computation: str = "") -> int:
    """Bytes that a device reads from and writes to HBM in a run of a computation.

    The body of a loop counts as often as it runs, and of a condition the branch that moves
    most. Collectives are left out: the network bounds them.

    >>> moved(HloModule('''
    ... ENTRY %main (x: f32[8,4], w: f32[4,2]) -> f32[8,2] {
    ...   %x = f32[8,4]{1,0} parameter(0)
    ...   %w = f32[4,2]{1,0} parameter(1)
    ...   ROOT %y = f32[8,2]{1,0} dot(%x, %w), lhs_contracting_dims={1}
    ... }'''))
    224
    """
    lines = program.computations[computation or program.entry]
    types = {line.name: line.type for line in lines}
    return sum(_of_line(program, line, types) for line in lines)


def _of_line(program: HloModule, line: Instruction, types: dict[str, str]) -> int:
    """Bytes of a line; `types` are those of its operands, by name."""
    opcode = line.opcode.removesuffix("-start")
    if opcode in FREE or opcode.endswith(("-done", "-update")) or REPAIR in line.attributes:
        return 0
    if opcode == "while":
        return program.trips(line) * moved(program, line.called[-1])
    if opcode == "conditional":
        return max(moved(program, branch) for branch in line.called)
    if opcode in ("call", "async"):
        return sum(moved(program, called) for called in line.called)
    if opcode != "fusion":
        read = {name: _read(name, types.get(name, ""), [line]) for name in line.operands}
        return sum(read.values()) + _written(line, types)
    fused = program.computations[line.called[0]]
    inner = {each.name: each for each in fused}
    read = [
        _read(each.name, each.type, fused) for each in fused if each.opcode == "parameter"
    ]
    root = fused[-1]
    roots = [inner[name] for name in root.operands] if root.opcode == "tuple" else [root]
    types = {each.name: each.type for each in fused}
    return sum(read) + sum(_written(_named(each, inner), types) for each in roots)


def _read(name: str, type: str, lines: list[Instruction]) -> int:
    """Bytes that these lines read of an array: all of it, or the slices that they use."""
    whole = nbytes(type)
    part = 0
    for line in lines:
        if name not in line.operands:
            continue
        if line.opcode in RENAMES:
            part += _read(line.name, type, lines)
        elif line.operands[0] == name and line.opcode in SLICES:
            part += line.nbytes
        elif line.operands[0] != name or line.opcode != "dynamic-update-slice":
            return whole
    return min(whole, part)


def _written(line: Instruction, types: dict[str, str]) -> int:
    """Bytes of a result; an update in place writes its update."""
    if line.opcode == "dynamic-update-slice":
        return nbytes(types.get(line.operands[1], ""))
    if line.opcode == "custom-call" and WORKSPACE in line.attributes:
        return nbytes(line.type) - nbytes(line.type[line.type.rfind(" ") :])
    return line.nbytes


def _named(line: Instruction, inner: dict[str, Instruction]) -> Instruction:
    """The line that computes a value, behind its other names."""
    while line.opcode in RENAMES and line.operands[0] in inner:
        line = inner[line.operands[0]]
    return line
