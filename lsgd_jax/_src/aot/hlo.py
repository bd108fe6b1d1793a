"""A reader of XLA's scheduled programs (HLO text), in which lines stand in run order."""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

from lsgd_jax._src.shared import REPAIR


BITS = {
    **dict.fromkeys(("pred", "s8", "u8"), 8),
    **dict.fromkeys(("s4", "u4", "f4e2m1fn"), 4),
    **dict.fromkeys(("s2", "u2"), 2),
    **dict.fromkeys(("f16", "bf16", "s16", "u16"), 16),
    **dict.fromkeys(("f32", "s32", "u32"), 32),
    **dict.fromkeys(("f64", "s64", "u64", "c64"), 64),
    "c128": 128,
}
ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
HEADER = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = ")
CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.-]+)"
)
BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
GEMM = re.compile(r'custom_call_target="(__cublas|__cudnn|tpu_custom_call|__triton)')


class Instruction(NamedTuple):
    """One line: ``%name = type opcode(operands), attributes``.

    `attributes` begin with the operands as they are written, for the values of constants.
    """

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    @property
    def nbytes(self) -> int:
        """The bytes of the result; those of a tuple are added."""
        return nbytes(self.type)

    @property
    def called(self) -> tuple[str, ...]:
        """The computations that it runs, without those of a reduction."""
        if self.opcode.startswith(("reduce", "all-reduce", "scatter", "sort", "select")):
            return ()
        names = CALLED.findall(self.attributes)
        for branches in BRANCHES.findall(self.attributes):
            names += [name.strip().lstrip("%") for name in branches.split(",")]
        return tuple(names)


class HloModule:
    """The computations of a compiled program.

    Attributes:
      computations: the instructions of each computation, by name.
      entry: the name of the computation that runs first.
    """

    def __init__(self, text: str):
        self.computations: dict[str, list[Instruction]] = {}
        self.entry = ""
        self._products: dict[str, int] = {}
        self._trips: dict[str, int] = {}
        current: list[Instruction] | None = None
        for line in text.splitlines():
            header = HEADER.match(line)
            if header:
                is_entry, name = header.group(1, 2)
                current = self.computations.setdefault(name, [])
                if is_entry:
                    self.entry = name
            elif line.startswith("}"):
                current = None
            elif current is not None:
                instruction = parsed(line)
                if instruction:
                    current.append(instruction)

    def products(self, computation: str) -> int:
        """How many matrix products and convolutions a computation runs."""
        if computation not in self._products:
            each = map(self.products_of, self.computations.get(computation, ()))
            self._products[computation] = sum(each)
        return self._products[computation]

    def products_of(self, instruction: Instruction) -> int:
        """How many matrix products and convolutions an instruction runs."""
        if instruction.opcode in ("dot", "convolution"):
            return 1
        if instruction.opcode == "custom-call" and GEMM.search(instruction.attributes):
            return 1
        inner = [self.products(name) for name in instruction.called]
        most = max(inner, default=0) if instruction.opcode == "conditional" else sum(inner)
        if instruction.opcode == "fusion":
            return min(1, most)
        return most * self.trips(instruction)

    def trips(self, loop: Instruction) -> int:
        """How often a loop runs its body; 1 if the program does not tell.

        TPU programs have no trip counts, so a loop ``for i in range(start, limit)`` is
        recognized by its condition.
        """
        if loop.opcode != "while":
            return 1
        known = TRIPS.search(loop.attributes)
        if known:
            return int(known.group(1))
        if loop.name not in self._trips:
            self._trips[loop.name] = self._counted(loop)
        return self._trips[loop.name]

    def _counted(self, loop: Instruction) -> int:
        found = re.search(r"\bcondition=%?([\w.-]+)", loop.attributes)
        condition = self.computations.get(found.group(1), []) if found else []
        names = {line.name: line for line in condition}
        last = condition[-1] if condition else loop
        if last.opcode != "compare" or "direction=LT" not in last.attributes:
            return 1
        counter, limit = (names.get(name) for name in last.operands)
        index = re.search(r"\bindex=(\d+)", counter.attributes) if counter else None
        stop = _constant(limit, names)
        if index is None or stop is None:
            return 1
        caller = next(
            lines for lines in self.computations.values() if any(x is loop for x in lines)
        )
        names = {line.name: line for line in caller}
        start = names.get(loop.operands[0])
        if start is not None and start.opcode == "tuple":
            start = names.get(start.operands[int(index.group(1))])
        first = _constant(start, names)
        return max(1, stop - (first or 0))

    def runs(
        self, name: str = "", times: int = 1, conditional: bool = False
    ) -> Iterator[tuple[list[Instruction], int, bool]]:
        """Yields all computations that run, how often, and whether under a condition.

        Fusions and asynchronous computations belong to the computation that calls them.
        """
        name = name or self.entry
        yield self.computations[name], times, conditional
        for each in self.computations[name]:
            # A worker is repaired in a loop that has no iterations while all workers agree.
            is_repair = each.opcode == "while" and REPAIR in each.attributes
            if each.opcode in ("while", "conditional", "call") and not is_repair:
                inside = conditional or each.opcode == "conditional"
                for called in each.called:
                    yield from self.runs(called, times * self.trips(each), inside)


def _constant(line: Instruction | None, names: dict[str, Instruction]) -> int | None:
    """The value of an integer, if it is a constant or a copy of one."""
    while line is not None and line.opcode in ("copy", "bitcast", "convert"):
        line = names.get(line.operands[0])
    if line is None or line.opcode != "constant":
        return None
    value = re.match(r"\((-?\d+)\)", line.attributes)
    return int(value.group(1)) if value else None


def parsed(line: str) -> Instruction | None:
    """Parses a line of a computation.

    >>> line = "  ROOT %d = f32[2,3]{1,0} dot(%a, %b), lhs_contracting_dims={1}"
    >>> parsed(line)[:4]
    ('d', 'f32[2,3]{1,0}', 'dot', ('a', 'b'))
    """
    start = LINE.match(line)
    if start is None:
        return None
    at = start.end()
    end = closing(line, at) if line[at] == "(" else line.find(" ", at)
    opcode, _, _ = line[end:].strip().partition("(")
    begin = line.find("(", end)
    if end < 0 or begin < 0:
        return None
    last = closing(line, begin)
    operands = tuple(re.findall(r"%([\w.-]+)", line[begin:last]))
    return Instruction(start.group(1), line[at:end], opcode, operands, line[begin:])


def closing(line: str, at: int) -> int:
    """The position behind the bracket that closes the one at this position."""
    depth = 0
    for i in range(at, len(line)):
        depth += (line[i] == "(") - (line[i] == ")")
        if depth == 0:
            return i + 1
    return len(line)


def nbytes(type: str) -> int:
    """The bytes of all arrays in a type, without tokens.

    >>> nbytes("(f32[7,8,128]{2,1,0:T(8,128)}, u32[]{:S(2)}, token[])")
    28676
    """
    total = 0
    for name, dims in ARRAY.findall(type):
        sizes = [int(size.lstrip("<=")) for size in dims.split(",") if size]
        total += BITS.get(name, 8 if name.startswith("f8") else 0) * math.prod(sizes)
    return (total + 7) // 8
