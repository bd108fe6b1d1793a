"""The benchmark of GPUs, run on CPUs with small sizes."""

import os
import pathlib
import subprocess
import sys

import pytest


ROOT = pathlib.Path(__file__).parents[1]
QUICK = ["--only", "pulls", "memory", "processes"]
REST = ["--only", "workers", "processes", "--processes", "2"]


def run(*options):
    return subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "gpu.py", *options],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.parametrize(
    "options, parts",
    [
        (QUICK, ["pulls"] * 3 + ["memory"] * 2 + ["processes"]),
        pytest.param(REST, ["workers"] * 3 + ["processes"] * 3, marks=pytest.mark.slow),
    ],
    ids=["quick", "rest"],
)
def test_it_prints_one_table(options, parts):
    done = run("--small", *options)
    assert done.returncode == 0, done.stderr
    said, _, head, _, *rows = done.stdout.splitlines()
    assert "Backend cpu" in said and "small sizes" in said
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[0] for row in rows] == parts and head.count("|") == 7
    for _, measured, value, _, other, ratio in rows:
        if measured.startswith("skipped"):
            continue
        assert float(value.split()[0]) > 0 and float(other.split()[0]) > 0
        assert float(ratio.split()[0]) > 0
    if options is QUICK:
        assert rows[-1][1].startswith("skipped")
        assert rows[-3][1] == "diloco: planned by the compiler, donated"
        # An anchor and a momentum, once for all workers.
        assert float(rows[-3][-1]) < 1 and float(rows[-2][-1]) == 2


def test_full_sizes_need_a_gpu():
    done = run()
    assert done.returncode == 1 and not done.stdout
    assert "error: no GPU was found, the backend is cpu" in done.stderr
