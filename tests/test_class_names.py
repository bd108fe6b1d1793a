"""A class name means one thing in the whole repository."""

import ast
import collections

from outside import ROOT


PACKAGES = "lsgd_jax", "train", "paper"


def files_of_classes():
    """Returns for each class name the files that define it."""
    files = collections.defaultdict(list)
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef):
                    files[node.name].append(str(path.relative_to(ROOT)))
    return files


def test_each_class_name_stands_once():
    files = files_of_classes()
    twice = {name: where for name, where in files.items() if len(where) > 1}
    assert not twice
