"""The README: its programs run, its two forms agree, and it stays short."""

import pathlib
import re

import numpy as np

import lsgd_jax as lj


README = pathlib.Path(__file__).parents[1] / "README.md"


def test_a_step_with_a_method_around_it_and_its_chained_form_learn_the_same():
    around, chained = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert around.count("  # new") == 5
    names = {}
    exec(around, names)
    found = lj.consensus(names["state"].state["params"])
    np.testing.assert_allclose(found, 1, atol=0.1)
    exec(chained, names)
    np.testing.assert_allclose(lj.consensus(names["x"]), found, rtol=1e-5, atol=1e-6)


def test_it_is_short():
    assert len(README.read_text().splitlines()) <= 150


def test_the_citation_names_the_version():
    citation = (README.parent / "CITATION.cff").read_text()
    assert f"\nversion: {lj.__version__}\n" in citation
