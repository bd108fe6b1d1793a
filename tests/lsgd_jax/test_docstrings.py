"""Examples in docstrings can be pasted: they import or define every name they use."""

import ast
import builtins
import doctest
import inspect

import pytest

import lsgd_jax as lj


def examples():
    """The docstrings of what is public, by name."""
    modules = lj, lj.rules, lj.robust, lj.layouts, lj.contrib
    for name, value in (each for module in modules for each in vars(module).items()):
        if not name.startswith("_") and not inspect.ismodule(value):
            for test in doctest.DocTestFinder().find(value, name):
                if test.examples:
                    yield pytest.param(test, id=test.name)


@pytest.mark.parametrize("test", list(examples()))
def test_examples_define_or_import_what_they_use(test):
    program = ast.parse("".join(example.source for example in test.examples))
    nodes = list(ast.walk(program))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    known = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    known |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    known |= {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            known |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
    assert {node.id for node in names} <= known | set(dir(builtins))
