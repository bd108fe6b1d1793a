"""Makes notebooks of pages: `python docs/notebooks.py FOLDER` writes them.

A Python block becomes a cell, and so does the text between two of them. The expected
output of a block stays in the text. The site offers the notebooks for download, and the
tests of the pages run their code.
"""

import json
import pathlib
import re
import sys


HERE = pathlib.Path(__file__).parent
PAGES = "quick_start", "own_loop"
BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.DOTALL | re.MULTILINE)
CONTENTS = re.compile(r"^```\{toctree\}\n.*?^```\n", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\[([^]]*)\]\((?!http)[^)]*\)")  # leads nowhere outside of the site


def notebook(text: str) -> dict:
    """Returns a page in the format of Jupyter notebooks, version 4.5."""
    text = LINK.sub(r"\1", CONTENTS.sub("", text))
    prose_and_code = BLOCK.split(text)  # in turn, prose first
    cells = [
        cell(part, is_code=i % 2 == 1, name=f"cell-{i}")
        for i, part in enumerate(prose_and_code)
        if part.strip()
    ]
    python = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": python}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def cell(source: str, is_code: bool, name: str) -> dict:
    kind = {"cell_type": "code" if is_code else "markdown", "id": name, "metadata": {}}
    outputs = {"execution_count": None, "outputs": []} if is_code else {}
    return kind | outputs | {"source": source.strip("\n").splitlines(keepends=True)}


def write(folder: pathlib.Path) -> None:
    """Writes NAME.ipynb of every page in PAGES."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in PAGES:
        page = (HERE / f"{name}.md").read_text()
        (folder / f"{name}.ipynb").write_text(json.dumps(notebook(page), indent=1) + "\n")


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]))
