"""Command lines and tables of the benchmarks."""

import argparse
import contextlib
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Returns a parser that explains a script by its docstring."""
    return argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def add_torch(options: argparse.ArgumentParser) -> None:
    """Adds the option that names an interpreter with PyTorch."""
    options.add_argument(
        "--torch", default=sys.executable, metavar="PYTHON", help="one with PyTorch"
    )


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Ends the program if data, options, packages or programs are missing or wrong."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def row(*cells: object) -> None:
    """Prints a row of a Markdown table."""
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def head(*titles: str) -> None:
    """Prints the head of a Markdown table."""
    row(*titles)
    row(*["---"] * len(titles))


def median(values: Sequence[float], digits: int = 1, best: Any = min) -> str:
    """Formats the median and, in brackets, the least or another best value."""
    return f"{statistics.median(values):.{digits}f} ({best(values):.{digits}f})"
