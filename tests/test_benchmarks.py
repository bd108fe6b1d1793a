"""The benchmarks, in their smallest form."""

import importlib
import sys

import pytest
from outside import ROOT, python

from train import compare
from train.task.experiment import make_optimizer


sys.path.append(str(ROOT / "benchmarks"))  # as for a script
races = importlib.import_module("races")
halos = importlib.import_module("halos")


SCRIPTS = {path.stem for path in (ROOT / "benchmarks").glob("*.py")} - {"torch_process"}


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_a_script_finds_what_it_imports(name):
    importlib.import_module(name)


# races.py


@pytest.mark.slow
@pytest.mark.parametrize(
    "group, number, windows",
    [("one-machine", 8, 24_000), ("replicas", 16, 690 * 48)],
)
def test_every_entrant_of_a_race_is_valid(group, number, windows, tmp_path):
    steps = ["--steps", "690"] if group == "replicas" else []
    given = ["text", "--entrants", group, "--out", str(tmp_path), *steps]
    options, rest = races.parse([*given, "--rates", "0.01"])
    asked = [(name, 0.01) for name in races.entrants(options)]
    configs, _ = compare.parse(races.command(asked, options, rest, seeds=1))
    tokens = set()
    for config in configs.values():
        make_optimizer(config)
        workers = config.workers.nodes * config.workers.locals
        tokens.add(config.steps * config.batch_size * workers)
    assert len(configs) == number and tokens == {windows}


# halos.py


@pytest.mark.slow
def test_servers_in_the_world_of_halos_are_as_fast_as_in_its_own_simulator():
    """Steps per second. Messages of a server that share links slow it further."""
    one, regional = halos.METHODS.values()
    alone = sum(1 / (0.238391 * slow) for slow in halos.WORLD.speeds.slow.values())
    assert alone == pytest.approx(41.53, abs=0.01)
    assert halos.released(regional) == pytest.approx(40.64, abs=0.01)
    assert halos.simulated(regional, 60.0) == pytest.approx(40.64, rel=0.01)
    assert halos.released(one) == pytest.approx(24.02, abs=0.01)
    # Four workers share the link of each region to the server.
    assert 24.02 / 1.5 < halos.simulated(one, 200.0) < 24.02 / 1.2


# gpu.py


GPU = ROOT / "benchmarks" / "gpu.py"
QUICK = ["--only", "memory", "models"]
REST = ["--only", "workers", "pulls"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options, parts",
    [
        (QUICK, ["memory"] * 2 + ["models"]),
        (REST, ["workers"] * 3 + ["pulls"] * 3),
    ],
    ids=["quick", "rest"],
)
def test_a_gpu_table_on_cpus(options, parts):
    done = python(GPU, "--sizes", "small", *options, timeout=600)
    assert done.returncode == 0, done.stderr
    said, _, head, _, *rows = done.stdout.splitlines()
    assert "Backend cpu" in said and "small sizes" in said
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[0] for row in rows] == parts and head.count("|") == 7
    for _, _, value, _, other, ratio in rows:
        if not other:  # no figures of the chip are known
            continue
        assert float(value.split()[0]) > 0 and float(other.split()[0]) > 0
        assert float(ratio.split()[0]) > 0
    if options is QUICK:
        assert rows[0][1] == "diloco: planned by the compiler, donated"
        # An anchor and a momentum, once for all workers.
        assert float(rows[0][-1]) < 1 and float(rows[1][-1]) == 2


@pytest.mark.slow
def test_full_sizes_need_a_gpu():
    done = python(GPU, timeout=600)
    assert done.returncode == 1 and not done.stdout
    assert "error: no GPU was found, the backend is cpu" in done.stderr
