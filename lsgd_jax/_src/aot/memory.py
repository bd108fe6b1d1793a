"""Memory of a compiled program, and XLA's message about a program that does not fit."""

import re
from typing import Any, NamedTuple


UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
SIZE = r"([\d.]+)([KMGT]?)"
EXCEEDED = re.compile(rf"[Ee]xceeded [^.]*? by {SIZE}")
NEEDED = re.compile(rf"\({SIZE}\) exceeds [^(]*\({SIZE}\)")


class Memory(NamedTuple):
    """Bytes of HBM per device.

    Attributes:
      arguments, outputs: the inputs and results of a step.
      aliased: the outputs that reuse the memory of a donated argument.
      temporaries: what the step needs in addition.
      code: the program itself. Every program that is loaded keeps its own.
    """

    arguments: int
    outputs: int
    aliased: int
    temporaries: int
    code: int = 0

    @property
    def data(self) -> int:
        """The largest number of bytes that are in use at once, without the code."""
        return self.arguments + self.outputs - self.aliased + self.temporaries

    @property
    def peak(self) -> int:
        """The bytes in use if no other program is loaded."""
        return self.data + self.code


def memory_of(compiled: Any) -> Memory | None:
    """The memory of a compiled program, if the backend tells."""
    stats = compiled.memory_analysis()
    if stats is None:
        return None
    names = "argument", "output", "alias", "temp", "generated_code"
    return Memory(*(int(getattr(stats, f"{name}_size_in_bytes")) for name in names))


def excess(error: Exception) -> int | None:
    """The bytes that are missing, if XLA's message tells.

    >>> excess(ValueError("temporaries (64.00G) exceeds available HBM (15.75G)")) / 2**30
    48.25
    >>> excess(ValueError("Exceeded hbm capacity by 512.0M.")) / 2**20
    512.0
    """
    found = EXCEEDED.search(str(error))
    if found:
        return _bytes(*found.groups())
    found = NEEDED.search(str(error))
    if found:
        needed, unit, available, of = found.groups()
        return _bytes(needed, unit) - _bytes(available, of)
    return None


def _bytes(number: str, unit: str) -> int:
    return round(float(number.rstrip(".")) * UNITS[unit])
