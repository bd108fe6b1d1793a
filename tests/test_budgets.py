"""Budgets for how well the code reads. They may become tighter, and never looser."""

import ast
import collections
import io
import sys
import tokenize

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from outside import ROOT

import lsgd_jax as lj


PACKAGES = "lsgd_jax", "train", "paper", "configs", "benchmarks", "examples"

# `local_sgd(4).update` while it is traced; `optax.adamw` enters 12 functions, 6 deep.
FUNCTIONS, DEPTH = 86, 14

# Functions per 1,000 lines of code; model code bases have 48 to 100.
FUNCTIONS_PER_1000 = {"lsgd_jax": 122, "lsgd_jax/_src/wire": 158}

# Lines of comments per 1,000 lines of code, at least.
COMMENTS_PER_1000 = {
    "lsgd_jax/_src/exchange": 40,
    "lsgd_jax/_src/wire": 40,
    "lsgd_jax/_src/asynchronous": 40,
}

# Cyclomatic complexity of a function with its closures, comprehensions and boolean
# operators. Ruff, which counts none of the three, holds a lower number.
COMPLEXITY = 19

# What is private to other packages and used all the same, because nothing public does it.
PRIVATE = {
    "jax._src.core.get_axis_env",
    "jax._src.core.remove_explicit_mesh_axis_names",
    "jax._src.core.trace_ctx",
    "ray._private.ray_constants",
    "ray._private.utils",
    "ray._private.worker",
    "tyro._errors",
    # Of Ray: the node of this process, and an argument of `ray.init`.
    "_global_node",
    "_node_ip_address",
}

# The public names of Python that begin with an underscore.
PUBLIC = {"_asdict", "_exit", "_fields", "_make", "_replace"}

TREES = {
    path: ast.parse(path.read_text())
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}
FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


def below(package):
    """Returns the files of a package."""
    return [path for path in TREES if (ROOT / package) in path.parents]


def lines_of(path):
    """Returns the numbers of the lines of code, and of those with comments.

    Blank lines, docstrings and imports are no code.
    """
    other, code, comments = set(), set(), set()
    for node in ast.walk(TREES[path]):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        is_text = is_text and isinstance(node.value.value, str)
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            other |= {*range(node.lineno, node.end_lineno + 1)}
    quiet = "NL NEWLINE INDENT DEDENT ENDMARKER COMMENT".split()
    quiet = [getattr(tokenize, name) for name in quiet]
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in quiet:
            code |= {*range(token.start[0], token.end[0] + 1)}
    return code - other, comments


def entered(call):
    """Returns the functions of the library that a call enters, and the deepest stack.

    Lambdas count for the depth. Comprehensions are frames of their own in some versions of
    Python only, and do not count.
    """
    seen, stack, deepest = collections.Counter(), [], []

    def profile(frame, event, _):
        nonlocal deepest
        code = frame.f_code
        name = code.co_qualname.rpartition(".")[2]
        if "/lsgd_jax/_src/" not in code.co_filename or name.endswith(("comp>", "expr>")):
            return
        if event == "call":
            stack.append(f"{code.co_filename.rpartition('_src/')[2]}: {code.co_qualname}")
            seen[stack[-1]] += name != "<lambda>"
            deepest = max(deepest, list(stack), key=len)
        elif event == "return":
            stack.pop()

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return sorted(+seen), deepest


def test_the_update_of_the_simplest_method():
    tx, x, found = lj.local_sgd(4), {"w": jnp.ones(3)}, None

    def step(x):
        nonlocal found
        state = tx.init(x)
        found = entered(lambda: tx.update(x, state, x, value=jnp.float32(1)))
        return x

    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("node", "local"))
    alone = jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    jax.jit(alone).trace(x)
    functions, deepest = found
    listed = "\n".join(functions)
    assert len(functions) <= FUNCTIONS, f"{len(functions)} functions:\n{listed}"
    assert len(deepest) <= DEPTH, f"{len(deepest)} deep:\n" + "\n".join(deepest)
    assert "exchange/kernel.py: land" in functions


@pytest.mark.parametrize("package", FUNCTIONS_PER_1000)
def test_functions_per_1000_lines_of_code(package):
    lines = sum(len(lines_of(path)[0]) for path in below(package))
    nodes = [node for path in below(package) for node in ast.walk(TREES[path])]
    functions = sum(isinstance(node, FUNCTION) for node in nodes)
    found = (
        f"{functions} functions in {lines} lines of code: {1000 * functions / lines:.1f}"
    )
    assert 1000 * functions <= FUNCTIONS_PER_1000[package] * lines, found


@pytest.mark.parametrize("package", COMMENTS_PER_1000)
def test_comments_per_1000_lines_of_code(package):
    code, comments = zip(*map(lines_of, below(package)))
    lines, comments = sum(map(len, code)), sum(map(len, comments))
    found = f"{comments} comments in {lines} lines: {1000 * comments / lines:.1f}"
    assert 1000 * comments >= COMMENTS_PER_1000[package] * lines, found


def complexity(function):
    """Returns the cyclomatic complexity: one more than the number of decisions."""
    one = ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler
    decisions = 0
    for node in ast.walk(function):
        decisions += isinstance(node, (*one, ast.Assert, ast.match_case))
        decisions += len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0
        decisions += 1 + len(node.ifs) if isinstance(node, ast.comprehension) else 0
    return 1 + decisions


def test_no_function_is_too_complex():
    found = {
        f"{path.relative_to(ROOT)}: {node.name}": complexity(node)
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, FUNCTION) and complexity(node) > COMPLEXITY
    }
    assert not found


def is_private(name):
    return any(x.startswith("_") and not x.startswith("__") for x in name.split("."))


def defined():
    """Returns the names that this repository defines."""
    for tree in TREES.values():
        for node in ast.walk(tree):
            if isinstance(node, FUNCTION | ast.ClassDef):
                yield node.name
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield node.attr
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id


def private_names(tree, ours):
    """Returns the private names of other packages in a file, by import and by access."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            full = ast.unparse(node)
            is_module = full.replace(".", "").isidentifier() and is_private(full)
            if is_module and full.partition(".")[0] in ("jax", "optax", "ray", "tyro"):
                names = [full]
            elif node.attr not in ours | PUBLIC:
                names = [node.attr]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            names = [x.value for x in node.args[1:2] if isinstance(x, ast.Constant)]
        elif isinstance(node, ast.Dict):
            keys = [x.value for x in node.keys if isinstance(x, ast.Constant)]
            names = [x for x in keys if isinstance(x, str) and x.startswith("_")]
        for name in names:
            if is_private(name) and name.partition(".")[0] not in PACKAGES:
                yield name


def test_private_names_of_other_packages_are_listed_here():
    ours = {*defined()}
    found = {name for tree in TREES.values() for name in private_names(tree, ours)}
    # A longer name begins with a listed one, and its parts are names as well.
    known = {x for x in found for y in PRIVATE if f"{x}.".startswith(f"{y}.")}
    parts = {x for x in found for y in PRIVATE if y.startswith(f"{x}.")}
    assert not found - known - parts, "use something public, or list it here"
    assert all(any(f"{x}.".startswith(f"{y}.") for x in found) for y in PRIVATE), "gone"
