"""The pages in docs/: what the quick start prints, and that the reference is complete."""

import ast
import pathlib
import re
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lsgd_jax as lj


DOCS = pathlib.Path(__file__).parents[1] / "docs"
NUMBER = re.compile(r"\d+(?:\.\d+)?")


@pytest.mark.slow  # test_readme runs a shorter program in the same form
def test_the_quick_start_prints_what_it_says():
    page = (DOCS / "quick_start.md").read_text()
    code = "\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL))
    said = "".join(re.findall(r"```text\n(.*?)```", page, re.DOTALL))
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert NUMBER.sub("N", done.stdout) == NUMBER.sub("N", said)
    printed, expected = (
        np.array(NUMBER.findall(text), float) for text in (done.stdout, said)
    )
    np.testing.assert_allclose(printed, expected, atol=0.002)


def test_the_reference_names_all_that_is_public():
    public = {
        name
        for name, x in vars(lj).items()
        if not name.startswith("_") and not isinstance(x, types.ModuleType)
    }
    pages = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    documented = set(
        re.findall(r"auto(?:function|class|data):: (\w+)$", pages, re.MULTILINE)
    )
    assert public <= documented


def blocks(page):
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.mark.parametrize(
    "page", sorted((DOCS / "methods").glob("*.md")), ids=lambda page: page.stem
)
def test_the_page_of_a_family_builds_its_methods(page):
    (code,) = blocks(page)
    names = {"lj": lj, "optax": optax}
    exec(code, names)
    assert isinstance(names["tx"], optax.GradientTransformationExtraArgs)
    assert (DOCS / "pictures" / f"{page.stem}.svg").exists()


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [1, 2, 3])
def test_a_recipe_trains(recipe, capsys):
    code = blocks(DOCS / "recipes.md")
    names = {}
    exec(code[0], names)
    exec(code[recipe], names)
    losses = [float(x) for x in re.findall(r"\d\.\d+", capsys.readouterr().out)]
    x, y = names["draw"]()
    assert losses[-1] < 0.25 * np.square(y).mean()


def test_the_outer_optimizer_around_one_worker_is_that_of_the_page():
    (code,) = blocks(DOCS / "one_machine.md")
    loss_of = lambda x, batch: ((x - batch) ** 2).sum()
    start = jnp.arange(4.0)
    names = {"jax": jax, "lj": lj, "optax": optax, "loss_of": loss_of, "params": start}
    exec(code, names)
    x, opt_state, outer_state = start, names["opt_state"], names["outer_state"]
    for _ in range(20):
        before, gradient = x, jax.grad(loss_of)(x, 1.0)
        updates, _ = names["tx"].update(gradient, opt_state, x)
        x, opt_state, outer_state, _ = names["train_step"](x, opt_state, outer_state, 1.0)
    gap = start - (before + updates)
    np.testing.assert_allclose(x, start - 0.7 * (0.5 * gap + gap), rtol=1e-5)


def test_code_on_all_pages_is_python():
    code = [block for page in DOCS.rglob("*.md") for block in blocks(page)]
    assert len(code) > 20
    for block in code:
        ast.parse(block)
