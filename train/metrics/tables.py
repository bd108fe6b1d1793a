"""Tables of results, as CSV, Markdown and LaTeX, and for a terminal."""

import csv
import pathlib
import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import rich.table
import rich.text


Rows = Sequence[dict[str, Any]]
NEVER = ", never exchanged"  # mark beside the bytes of a run that has sent none

# Characters that LaTeX reads as commands, or that its fonts may lack.
LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "&": r"\&",
        "%": r"\%",
        "$": r"\$",
        "#": r"\#",
        "_": r"\_",
        "{": r"\{",
        "}": r"\}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "±": r"$\pm$",
        "×": r"$\times$",
        "–": "--",
    }
)


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


def latex(rows: Rows) -> str:
    r"""The rows as a LaTeX table, which needs the package booktabs.

    All must have the same columns.

    >>> print(latex([{"method": "local_sgd", "error, %": "-2.0 ± 1.0"}]), end="")
    \begin{tabular}{lr}
    \toprule
    method & error, \% \\
    \midrule
    local\_sgd & $-$2.0 $\pm$ 1.0 \\
    \bottomrule
    \end{tabular}
    """

    def line(cells: Iterable[Any]) -> str:
        escaped = " & ".join(str(cell).translate(LATEX) for cell in cells)
        with_minus = re.sub(r"(?<!\S)-(?=\d)", "$-$", escaped)
        return rf"{with_minus} \\"

    lines = [
        rf"\begin{{tabular}}{{l{'r' * (len(rows[0]) - 1)}}}",
        r"\toprule",
        line(rows[0]),
        r"\midrule",
        *(line(row.values()) for row in rows),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "".join(f"{each}\n" for each in lines)


def aligned(rows: Rows) -> rich.table.Table:
    """The rows as a table for a console. The first column is text, the others are numbers.

    All must have the same columns. A header is no wider than its numbers, and the text is
    wrapped where the console is too narrow.
    """
    first, *others = rows[0]
    headers = [[first]]
    for name in others:
        widest = max(len(str(row[name])) for row in rows)
        headers.append(textwrap.wrap(name, widest, break_long_words=False))
    most = max(map(len, headers))
    table = rich.table.Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column, header in enumerate(headers):
        is_text = column == 0
        table.add_column(
            "\n" * (most - len(header)) + "\n".join(header),
            justify="left" if is_text else "right",
            no_wrap=not is_text,
        )
    for row in rows:
        table.add_row(*(rich.text.Text(str(cell)) for cell in row.values()))
    return table


def write_csv(rows: Rows, path: pathlib.Path) -> None:
    """Writes the rows as CSV with a header. All must have the same columns."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
