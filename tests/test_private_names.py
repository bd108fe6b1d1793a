"""Private names of other packages, which the code uses because nothing public does it."""

import ast

import pytest
from outside import ROOT


PACKAGES = "lsgd_jax", "train", "paper", "configs", "benchmarks", "examples"

PRIVATE = {
    "jax._src.compiler",
    "jax._src.core.get_axis_env",
    "jax._src.core.remove_explicit_mesh_axis_names",
    "jax._src.core.trace_ctx",
    "jax._src.distributed",
    "orbax.checkpoint._src.serialization.type_handlers",
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

FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef


@pytest.fixture
def trees():
    """The syntax trees of all files of the packages."""
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return [ast.parse(path.read_text()) for path in paths]


def is_private(name):
    words = [x for x in name.split(".") if x != "_"]  # by itself it is no name
    return any(x.startswith("_") and not x.startswith("__") for x in words)


def defined(trees):
    """Returns the names that this repository defines."""
    for tree in trees:
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


def test_private_names_of_other_packages_are_listed_here(trees):
    ours = {*defined(trees)}
    found = {name for tree in trees for name in private_names(tree, ours)}
    # A longer name begins with a listed one, and its parts are names as well.
    known = {x for x in found for y in PRIVATE if f"{x}.".startswith(f"{y}.")}
    parts = {x for x in found for y in PRIVATE if y.startswith(f"{x}.")}
    assert not found - known - parts, "use something public, or list it here"
    assert all(any(f"{x}.".startswith(f"{y}.") for x in found) for y in PRIVATE), "gone"
