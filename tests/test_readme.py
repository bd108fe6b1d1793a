"""What the README shows works."""

import pathlib
import re
import subprocess
import sys

import numpy as np
import optax

import lsgd_jax as lj


ROOT = pathlib.Path(__file__).parents[1]
README = ROOT / "README.md"


def test_the_example_runs():
    (code,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len([line for line in code.splitlines() if line.strip()]) <= 18
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    printed = [float(x) for x in re.findall(r"\d\.\d+", done.stdout)]
    assert len(printed) == 3 and all(abs(x - 1) < 0.1 for x in printed), done.stdout


def test_links_lead_somewhere():
    links = re.findall(r"\]\((?!http)([^)#]+)\)", README.read_text())
    assert links and all((ROOT / link).exists() for link in links)


def test_every_line_that_builds_a_method_builds_it():
    lines = re.findall(r"`((?:lj|optax)\.[a-z_]+\([^`]*\))`", README.read_text())
    complete = [x for x in lines if not re.search(r"\.\.\.|params|opt_state", x)]
    built = [eval(line, {"lj": lj, "optax": optax}) for line in complete]
    transformations = [tx for tx in built if isinstance(tx, optax.GradientTransformation)]
    assert len(transformations) >= 19


def test_the_table_gives_the_bytes_of_an_exchange():
    """4P per exchange and peer, up to 8 bytes of scores and counts."""
    rows = re.findall(r"\| ([^|]*) \| `(lj\.[^`]*)`", README.read_text())
    workers = lj.Workers(2, 4)
    params = workers.put({"w": np.ones((8, 1000), np.float32)})
    assert len(rows) == 23
    for written, line in rows:
        tx = eval(line, {"lj": lj, "optax": optax})
        step = lambda x, tx=tx: tx.update(x, tx.init(x), x, value=x["w"].sum())[1]
        levels = lj.diagnostics(workers.map(step)(params))
        neighbors = 2 if "neighbor" in written else 1
        for level in levels:
            assert 0 <= level.payload - 4 * 1000 * neighbors <= 8 * neighbors, line
        assert ("/τ" in written) == any(level.period > 1 for level in levels), line
