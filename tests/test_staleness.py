"""The benchmark of staleness: equal simulated time, speeds and failures."""

import importlib.util
import pathlib
import sys

import numpy as np


FILE = pathlib.Path(__file__).parents[1] / "benchmarks" / "staleness.py"
SPEC = importlib.util.spec_from_file_location("staleness", FILE)
assert SPEC is not None and SPEC.loader is not None
benchmark = sys.modules["staleness"] = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(benchmark)


def test_a_table_with_a_row_per_method_and_a_figure(tmp_path, capsys):
    methods = ["lsgd", "decoupled-diloco"]
    options = "--seconds 4 --seeds 1 --rates 0.4 --error 50 --workers 4".split()
    asked = ["--methods", *methods, "--scenarios", "one straggler", "--out", str(tmp_path)]
    assert benchmark.main([*options, *asked]) == 0
    title, _, _, _, *rows = capsys.readouterr().out.strip().splitlines()
    assert title == "one straggler, 4 workers"
    cells = [row.strip("| ").split(" | ") for row in rows]
    assert [row[0] for row in cells] == methods
    assert all(float(row[2]) < 70 for row in cells)
    # In lock step all take as many steps as the slow worker; otherwise only it takes fewer.
    lock_step, decoupled = (float(row[-1]) for row in cells)
    assert lock_step < 40 and 78 < decoupled <= 84
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".png"}


def test_failures_follow_the_seed_and_are_followed_by_returns():
    scenario = benchmark.leaving_and_joining(8, 200.0, seed=0)
    assert scenario == benchmark.leaving_and_joining(8, 200.0, seed=0)
    assert scenario != benchmark.leaving_and_joining(8, 200.0, seed=1)
    (first, *_), (back, *_) = scenario.drops[0], scenario.joins[0]
    times = first - 0.01, first, back - 0.01, back
    assert [scenario.is_up(0, t) for t in times] == [True, False, False, True]


def test_steps_of_a_failed_worker_since_its_last_exchange_do_not_count(monkeypatch):
    """Worker 1 fails in its step 13 of a period of 8, and 4 of 12 steps are lost."""
    speeds = benchmark.at.Speeds(benchmark.STEP)
    fails = lambda *_: benchmark.Scenario(speeds, {1: [1.25]})
    entry = benchmark.METHODS["async-lsgd"]
    run = benchmark.measure(entry, fails, workers=2, seconds=2.0, seed=0, rate=0.1)
    steps = 19 + 8  # the last step of worker 0 ends with the run
    assert np.isclose(run.goodput, 100 * steps / 40, atol=3)
