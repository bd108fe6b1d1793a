"""The published numbers, which the page of the planner's results shows beside ours."""

import pathlib
import re


PAGE = pathlib.Path(__file__).parents[1] / "docs/results/predictions.md"
CELL = re.compile(r"([-+]?[\d.]+)(?: ± [\d.]+)? \(([-+]?[\d.]+)\)")


def table(section: str, number: int = 0) -> list[list[str]]:
    """The rows of a table of a section, each with its cells."""
    text = PAGE.read_text().split(f"\n### {section}\n")[1].split("\n##")[0]
    tables = re.findall(r"((?:^\|.*\n)+)", text, re.M)
    rows = tables[number].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def numbers(cell: str) -> tuple[float, float]:
    """Ours and theirs."""
    match = CELL.fullmatch(cell)
    assert match, cell
    return float(match[1]), float(match[2])
