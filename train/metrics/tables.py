"""Tables of results, as CSV and as Markdown."""

import csv
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any


Rows = Sequence[dict[str, Any]]
NEVER = ", never exchanged"  # mark beside the bytes of a run that has sent none


def markdown(rows: Rows) -> str:
    """The rows as a Markdown table. All must have the same columns.

    >>> print(markdown([{"method": "lsgd", "seeds": 3}]), end="")
    | method | seeds |
    | --- | --- |
    | lsgd | 3 |
    """
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(row.values() for row in rows)]

    def escaped(line: Iterable[Any]) -> str:
        return " | ".join(str(cell).replace("|", r"\|") for cell in line)

    return "".join(f"| {escaped(line)} |\n" for line in lines)


def write_csv(rows: Rows, path: pathlib.Path) -> None:
    """Writes the rows as CSV with a header. All must have the same columns."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
