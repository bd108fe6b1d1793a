"""Rules for all files: imports lead downwards, and every thing has one name."""

import ast
import graphlib
import pathlib
import re

import pytest
from outside import ROOT


CODE = sorted(
    p for top in ("lsgd_jax", "train", "paper") for p in (ROOT / top).rglob("*.py")
)
WRITTEN = sorted(
    path
    for top in "lsgd_jax train paper configs tests benchmarks examples docs".split()
    for path in (ROOT / top).rglob("*")
    if path.suffix in (".py", ".md") and path != pathlib.Path(__file__)
)
WRITTEN += [*ROOT.glob("*.md"), ROOT / "conftest.py"]

SRC = ROOT / "lsgd_jax/_src"

# From the ground upwards. Modules outside these folders are the library's ground, and the
# trainer's top: the commands.
LAYERS = (
    "wire",
    "exchange",
    "workers",
    "methods",
    "contrib",
    "asynchronous.engine",
    "asynchronous.methods",
    "asynchronous.simulated",
    "asynchronous.ray",
    "aot",
)
ROOMS = "process", "metrics", "data", "config", "launch", "cluster", "task", "run"

# The modules that a package must not import. Other packages may import everything.
NOT_ABOVE = {
    "lsgd_jax": ("train", "paper", "configs", "flax", "orbax", "grain"),
    "train": ("paper",),
}

# Words for which the field has another term: the wrong word, and the right one.
WORDS = {
    r"everybody|nobody|somebody|anybody": "all workers, no worker, any worker",
    r"signs? of life": "heartbeat",
    r"last words?\b": "failure notice",
    r"heal(s|ed|ing)?\b": "restored",
    r"under way": "in flight",
    r"hands? to": "sends",
    r"passes for|pass for": "is emulated as",
    r"centres?|(?-i:[Gg]rey)|neighbours?|colours?": "US spelling",
    r"workers?'s? ways?\b": "pseudo-gradient, trajectory",
}


def name_of(path):
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imported(path):
    """Yields the modules that a file imports anywhere, `from a import b` as a.b."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            yield from (f"{node.module}.{name.name}" for name in node.names)


def inside(module, package):
    return module == package or module.startswith(f"{package}.")


@pytest.mark.parametrize("path", CODE, ids=name_of)
def test_imports_lead_downwards(path):
    wrong = [
        f"{name_of(path)} imports {module}"
        for package, above in NOT_ABOVE.items()
        if inside(name_of(path), package)
        for module in imported(path)
        if any(inside(module, other) for other in above)
    ]
    if inside(name_of(path), "train"):
        private = [m for m in imported(path) if m.startswith("lsgd_jax.")]
        wrong += [f"{name_of(path)} imports {m}, not lsgd_jax itself" for m in private]
    assert not wrong


@pytest.mark.parametrize("path", sorted(SRC.rglob("*.py")), ids=name_of)
def test_each_layer_of_the_library_imports_only_lower_ones(path):
    def layer(module):
        inner = module.removeprefix("lsgd_jax._src.")
        found = [i for i, folder in enumerate(LAYERS) if inside(inner, folder)]
        return max(found, default=-1)

    own = layer(name_of(path))
    assert not [m for m in imported(path) if m.startswith("lsgd_jax.") and layer(m) > own]


@pytest.mark.parametrize("room", ROOMS)
def test_each_room_of_the_trainer_imports_only_lower_ones(room):
    above = {f"train.{other}" for other in ROOMS[ROOMS.index(room) + 1 :]}
    above |= {name_of(p) for p in ROOT.glob("train/*.py")} - {f"train.{x}" for x in ROOMS}
    found = [
        f"{name_of(path)} imports {module}"
        for path in CODE
        if inside(name_of(path), f"train.{room}")
        for module in imported(path)
        if any(inside(module, other) for other in above - {"train"})
    ]
    assert not found


def test_no_import_leads_in_a_circle():
    """Imports under `if TYPE_CHECKING` and inside functions count as well."""
    files = {name_of(path): path for path in CODE}

    def module(name):
        return name if name in files else name.rpartition(".")[0]

    imports = {name: set(map(module, imported(path))) for name, path in files.items()}
    graphlib.TopologicalSorter(imports).prepare()  # its error names the circle


def test_no_module_state_is_rebound_in_the_trainer():
    found = [
        f"{name_of(path)}:{node.lineno}: global {', '.join(node.names)}"
        for path in CODE
        if inside(name_of(path), "train")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Global)
    ]
    assert not found


def test_each_module_has_a_test_file_or_a_row_in_contributing():
    page = (ROOT / "CONTRIBUTING.md").read_text().partition("## Find the tests")[2]
    rows = [line for line in page.partition("\n## ")[0].splitlines() if line[:3] == "| `"]
    cells = [[re.findall("`(.+?)`", cell) for cell in row.split(" | ")] for row in rows]
    assert all(list(ROOT.glob(path)) for row in cells for cell in row for path in cell)
    named = {path for files, _ in cells for file in files for path in ROOT.glob(file)}
    for path in CODE:
        name = name_of(path).replace("lsgd_jax._src", "lsgd_jax").split(".")
        mirror = ROOT.joinpath("tests", *name[:-1], f"test_{name[-1]}.py")
        private = inside(name_of(path), "train") or SRC in path.parents
        if private and path.name != "__init__.py":
            assert mirror.exists() or path in named, f"no row or file has tests of {path}"


@pytest.mark.parametrize("pattern", WORDS)
def test_one_word_for_one_thing(pattern):
    word = re.compile(rf"\b({pattern})", re.IGNORECASE)
    found = [
        f"{path.relative_to(ROOT)}:{i}: {line.strip()}"
        for path in WRITTEN
        for i, line in enumerate(path.read_text().splitlines(), start=1)
        if word.search(line)
    ]
    assert not found, f"better: {WORDS[pattern]}"
