"""The README: its programs run, its two forms agree, and it stays short."""

import pathlib
import re

import jax
import numpy as np

import lsgd_jax as lj


README = pathlib.Path(__file__).parents[1] / "README.md"


def test_a_loop_with_outer_and_its_chained_form_learn_the_same():
    around, chained = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert around.count("  # new") == 6
    names = {}
    exec(around, names)
    found = lj.consensus(names["x"])
    np.testing.assert_allclose(found, 1, atol=0.1)
    exec(chained, names)
    workers = names["workers"]
    x = workers.replicate(np.zeros(3, np.float32))
    state = workers.map(names["tx"].init)(x)
    step = workers.map(names["train_step"])
    for key in jax.random.split(jax.random.key(0), 100):
        x, state = step(x, state, workers.put(jax.random.split(key, 8)))
    np.testing.assert_allclose(lj.consensus(x), found, rtol=1e-5, atol=1e-6)


def test_it_is_short():
    assert len(README.read_text().splitlines()) <= 150


def test_the_citation_names_the_version():
    citation = (README.parent / "CITATION.cff").read_text()
    assert f"\nversion: {lj.__version__}\n" in citation
