"""The pages in docs/: programs that run, links that lead somewhere, numbers that hold."""

import collections
import re
import subprocess
import sys
import types

import numpy as np
import optax
import pytest
from outside import ROOT, loaded

import lsgd_jax as lj
from train.process import exit_status


DOCS = ROOT / "docs"
TOP = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
TOP += [ROOT / "tests/peers/README.md"]
PAGES = [*TOP, *sorted(DOCS.rglob("*.md"))]
NUMBER = re.compile(r"\d+(?:\.\d+)?")
NAMES = {"lj": lj, "optax": optax}
notebooks = loaded(DOCS / "notebooks.py")


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def blocks(page, language="python"):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.M)


def program(page):
    return "\n".join(blocks(page))


def trains(page):
    return re.search("^for ", program(page), re.M) or blocks(page, "text")


# Programs


PROGRAMS = [page for page in PAGES if blocks(page)]
ON_PODS = DOCS / "pods.md"  # tests/lsgd_jax/test_aot.py runs it
WITH_TESTS_OF_THEIR_OWN = ROOT / "README.md", DOCS / "recipes.md", ON_PODS


def test_pages_use_only_names_that_they_make(tmp_path):
    """A page is one program: its blocks, pasted in order, define or import all they use."""
    assert len(PROGRAMS) > 20
    for page in PROGRAMS:
        path = tmp_path / name_of(page).replace("/", "-").replace(".md", ".py")
        path.write_text(program(page))
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F63,F7,F82"]
    done = subprocess.run([*ruff, tmp_path], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PROGRAMS if not trains(page)], ids=name_of
)
def test_a_page_builds_what_it_shows(page):
    names = {}
    exec(program(page), names)
    if "tx" in names or page.parent.name == "methods":
        assert isinstance(names["tx"], optax.GradientTransformationExtraArgs)


def check_printed(printed, said):
    """Text must be equal, and numbers close: they differ between jax's versions."""
    assert NUMBER.sub("N", printed) == NUMBER.sub("N", said)
    found, expected = (np.array(NUMBER.findall(x), float) for x in (printed, said))
    np.testing.assert_allclose(found, expected, atol=0.002)


@pytest.mark.slow  # test_readme runs a program in the same form
@pytest.mark.parametrize(
    "page",
    [page for page in PROGRAMS if trains(page) and page not in WITH_TESTS_OF_THEIR_OWN],
    ids=name_of,
)
def test_a_page_trains_and_prints_what_it_says(page):
    command = [sys.executable, "-W", "error", "-c", program(page)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    if said := "".join(blocks(page, "text")):
        check_printed(done.stdout, said)


RECIPES = DOCS / "recipes.md"


@pytest.mark.slow  # `test_readme.py` runs programs in the same form
@pytest.mark.parametrize("recipe", range(1, len(blocks(RECIPES))))
def test_a_recipe_trains_and_prints_what_it_says(recipe, capsys):
    code, names = blocks(RECIPES), {}
    exec(code[0], names)
    exec(code[recipe], names)
    check_printed(capsys.readouterr().out, blocks(RECIPES, "text")[recipe - 1])


def test_commands_name_programs_that_exist():
    pages = set(PAGES) - {ROOT / "CHANGELOG.md"}
    written = "\n".join(page.read_text() for page in sorted(pages))
    files = re.findall(r"\bpython ((?:benchmarks|examples|docs)/[a-z_/]+\.py)", written)
    modules = re.findall(r"\bpython -m (train|paper)(\.\w+)?", written)
    assert len(files) > 10 and len(modules) > 10
    for file in files:
        assert (ROOT / file).exists(), file
    for package, module in set(modules):
        command = ROOT / package / (module[1:] or "__main__")
        found = command.with_suffix(".py"), command / "__main__.py"
        assert any(path.exists() for path in found), package + module


@pytest.mark.parametrize("name", notebooks.PAGES)
def test_a_notebook_has_the_program_of_its_page(name):
    page = DOCS / f"{name}.md"
    cells = notebooks.notebook(page.read_text())["cells"]
    code = ["".join(x["source"]) for x in cells if x["cell_type"] == "code"]
    prose = "".join("".join(x["source"]) for x in cells if x["cell_type"] == "markdown")
    assert code == [block.strip("\n") for block in blocks(page)]
    assert all(set(x) >= {"id", "metadata"} for x in cells) and ".md" not in prose


# Links


def slug(heading):
    """The anchor that code hosts give a heading."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).replace("`", "")
    return re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")


def anchors(page):
    if included := re.match(r"```\{include\} (\S+)", page.read_text()):
        page = page.parent / included[1]
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.M)
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", text, re.M)}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(\s*(?!http)([^)\s]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


# Names


def test_the_reference_names_each_public_name_once():
    """A change of these pages is a change of the API and belongs in CHANGELOG.md."""
    public = {
        f"{module.__name__}.{name}"
        for module in public_modules()
        for name, x in vars(module).items()
        if not name.startswith("_") and not isinstance(x, types.ModuleType)
        if name not in ("Any", "TYPE_CHECKING")
    }
    documented = collections.Counter()
    for page in (DOCS / "api").glob("*.md"):
        module = None
        directive = r"\.\. (?:py:)?(currentmodule|auto\w+|data):: ([\w.]+)"
        for kind, name in re.findall(directive, page.read_text()):
            if kind == "currentmodule":
                module = name
            else:
                documented[f"{module}.{name}"] += 1
    assert documented == dict.fromkeys(public, 1)


def public_modules():
    asynchronous = lj.asynchronous, lj.asynchronous.simulator, lj.asynchronous.ray_engine
    others = lj.aot, lj.checks, lj.contrib, lj.layouts, lj.robust, lj.rules, lj.topology
    return (lj, *asynchronous, *others)


def has_member(made, name):
    described = re.findall(r"\w+", made.__doc__ or "")  # attributes of instances
    return hasattr(made, name) or name in {
        *described,
        *getattr(made, "__annotations__", ()),
    }


def test_pages_and_docstrings_name_only_members_that_exist():
    public = [thing for module in public_modules() for thing in vars(module).items()]
    classes = {name: x for name, x in public if isinstance(x, type)}
    pages = [page for page in PAGES if page.name != "CHANGELOG.md"]  # it names removed ones
    missing = set()
    for path in (*pages, *(ROOT / "lsgd_jax").rglob("*.py")):
        for name, member in re.findall(r"`(?:\w+\.)*([A-Z]\w+)\.(\w+)`", path.read_text()):
            if name in classes and not has_member(classes[name], member):
                missing.add(f"{name_of(path)}: {name}.{member}")
    assert not missing


def test_the_table_of_exit_statuses_has_them_all():
    page = (DOCS / "faults.md").read_text()
    listed = {int(row) for row in re.findall(r"^\| (\d+) \| ", page, re.M)}
    assert listed >= {x for x in vars(exit_status).values() if isinstance(x, int)} - {
        exit_status.SIGNALED
    }


# Methods


def test_every_line_that_builds_a_method_builds_it():
    pages = ROOT / "README.md", DOCS / "choosing.md", *(DOCS / "methods").glob("*.md")
    written = "".join(page.read_text() for page in pages)
    lines = set(re.findall(r"`((?:lj|optax)\.(?:contrib\.)?[a-z_]+\([^`]*\))`", written))
    complete = [x for x in lines if not re.search(r"\.\.\.|params|state", x)]
    built = [eval(line, dict(NAMES)) for line in sorted(complete)]
    transformations = [tx for tx in built if isinstance(tx, optax.GradientTransformation)]
    assert len(transformations) >= 19


@pytest.mark.slow  # the conformance table compares what states count with programs
def test_the_table_gives_the_bytes_of_an_exchange():
    """The coefficient of P per exchange and peer, up to 8 bytes of scores and counts.

    A sparse message also has a table of values, and indices of whole bits. Robust
    aggregates also send the result of a share, and distances between workers: the
    geometric median three sums per worker in each of 32 iterations.
    """
    page = (DOCS / "methods/index.md").read_text().split("## Memory")[0]
    rows = re.findall(r"^\| `(lj\.[^`]*)`(?:[^|]*\|){3} ([^|]*) \|$", page, re.M)
    workers, P = lj.Workers(2, 4), 10 * 4096
    params = workers.put({"w": np.ones((8, P), np.float32)})
    assert len(rows) >= 22
    for line, written in rows:
        tx = eval(line, dict(NAMES))
        step = lambda x, tx=tx: tx.update(x, tx.init(x), x, value=x["w"].sum())[1]
        levels = lj.diagnostics(workers.map(step)(params))
        neighbors = 2 if "neighbor" in written else 1
        each = float(re.match(r"[\d.]+", written)[0]) * neighbors
        more = 0.04 * each * P if "sparse" in line else 8 * neighbors
        if "(1 + 1/W)" in written:
            each, more = each * (1 + 1 / 8), 4 * 3 * 8 * 32 + 8
        for level in levels:
            assert 0 <= level.payload - each * P <= more, line
        assert ("/τ" in written) == any(level.period > 1 for level in levels), line
