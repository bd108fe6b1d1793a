"""train.simulate: its command line, its files, and wrong usage."""

import csv
import json

import numpy as np
import pytest
import tiny

import lsgd_jax as lj
from train import simulate
from train.config import methods


@pytest.fixture
def small(monkeypatch):
    tiny.install(tiny.Wide, set=monkeypatch.setattr)
    monkeypatch.setattr(simulate.compilation_cache, "use", lambda say: None)


# Seeks a point, with 0.3 MB of parameters, and compiles fast.
LINE = lj.asynchronous.Training(
    lambda i: (np.zeros(76_810, np.float32), (), i),
    lambda x, opt_state, own, t: (0.1 * (own - x), opt_state, own, np.sum((x - own) ** 2)),
)
GRID = "--workers.nodes 2 --workers.locals 2"
COMMON = f"digits {GRID} --steps 4 --batch-size 16 --step-ms 20".split()
PERIODS = "--method.local-period 2 --method.global-period 4".split()
LSGD = ["--method", "lsgd", *PERIODS]
ASYNC = ["--method", "async-lsgd", *PERIODS, "--method.wire", "int8"]


@pytest.mark.slow
def test_methods_are_compared_under_one_network(small, tmp_path, capsys):
    out = tmp_path / "out"
    line = [*COMMON, *LSGD, *ASYNC, "--slow", "3", "2", "--out", str(out), "--seed", "1"]
    assert simulate.main(line) == 0
    names = ["lsgd", "async-lsgd"]
    kept = json.loads((out / "simulated.json").read_text())
    found = {x["name"]: x for x in kept["methods"]}
    assert list(found) == names and kept["speeds"]["slow"] == {"3": 2.0}
    for name in names:
        with open(out / f"{name}.csv") as file:
            steps = list(csv.DictReader(file))
        assert len(steps) == 16
        times = [float(step["seconds"]) for step in steps]
        assert times == sorted(times) and times[-1] <= found[name]["seconds"]
        assert 0 <= found[name]["tested"]["error"] <= 100
        assert len(found[name]["waited"]) == 4 and sum(found[name]["bytes_sent"]) > 0
    assert found["async-lsgd"]["seconds"] < found["lsgd"]["seconds"]
    assert found["lsgd"]["seconds"] == pytest.approx(4 * 0.04, rel=0.2)
    assert (out / "simulated.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert "| lsgd |" in printed and "| async-lsgd |" in printed

    before = {path: path.read_bytes() for path in out.iterdir()}
    assert simulate.main(line) == 2  # nothing is overwritten
    assert "`out` must be a folder without simulated.json" in capsys.readouterr().err
    assert before == {path: path.read_bytes() for path in out.iterdir()}


def test_synchronous_methods_wait_and_the_same_seed_writes_the_same(monkeypatch, tmp_path):
    monkeypatch.setattr(simulate, "consensus", lambda config, workers: {"error": 50.0})
    monkeypatch.setattr(simulate.asynchronous, "training", lambda config, warn: LINE)
    monkeypatch.setattr(simulate.compilation_cache, "use", lambda say: None)
    monkeypatch.setattr(simulate, "draw", lambda runs, path: None)
    names = ["lsgd", "allreduce", "independent", "sgp"]
    seeded = "--network ethernet-100m --jitter 0.2 --seed 5".split()
    for out, others in (("a", names[1:]), ("b", ["sgp"])):
        line = [*COMMON, *LSGD, *(f"--method={name}" for name in others), *seeded]
        assert simulate.main([*line, "--out", str(tmp_path / out)]) == 0
    for name in ("lsgd", "sgp"):
        first, second = (tmp_path / out / f"{name}.csv" for out in ("a", "b"))
        assert first.read_bytes() == second.read_bytes() and first.stat().st_size > 500
    found = json.loads((tmp_path / "a" / "simulated.json").read_text())["methods"]
    waiting = {run["name"]: run["waiting"] for run in found}
    assert waiting["independent"] < 0.02 < 0.3 < min(waiting["allreduce"], waiting["sgp"])
    with open(tmp_path / "a" / "simulated.csv") as file:
        sent = {row["method"]: row["MB sent / worker"] for row in csv.DictReader(file)}
    assert list(sent) == names and sent["independent"] == "0, never exchanged"
    assert [name for name in names if "never" in sent[name]] == ["independent"]


@pytest.mark.parametrize("name", methods.METHODS)
def test_a_method_is_simulated_or_refused_in_one_line(name, refusal):
    row, line = methods.METHODS[name].row, [*COMMON, "--method", name]
    if row.around is not None:
        message = "`method` must not exchange the base optimizer's state"
    elif row.first is not None and name != "allreduce":
        message = "`method` must not aggregate gradients other than by their mean"
    elif name == "grawa":
        message = "asynchronous workers pass no gradient"
    elif name == "palsgd":
        message = "`method` must compute a gradient at every step to be simulated"
    else:
        _, configs = simulate.parse(line)
        assert isinstance(simulate.method(configs[name]).window, int)
        return
    assert message in refusal(simulate.main, line)


@pytest.mark.parametrize("mbit", ["--mbit", "--bandwidth-mbit"])
def test_options_after_a_method_belong_to_it(mbit):
    line = [*COMMON, *LSGD, "--method", "lsgd", "--seed", "3", "--network", "wan-1g"]
    options, configs = simulate.parse(
        [*line, "--latency-ms", "5", mbit, "80", "--stall", "0.1", "500"]
    )
    first, second = configs.values()
    assert list(configs) == ["lsgd", "lsgd-2"]
    assert (first.method.local_period, first.seed) == (2, 3)
    assert (second.method.local_period, second.seed) == (8, 3)
    assert (first.workers.nodes, first.workers.locals) == (2, 2)
    network, speeds = options.links(), options.paces()
    assert network.latency == 0.005 and network.bandwidth == 1e7
    assert (speeds.stall_probability, speeds.stall) == (0.1, 0.5)


@pytest.mark.parametrize(
    "options, message",
    [
        ("--method allreduce --optimizer.name adamw", "`optimizer.name` must be sgd"),
        ("--network ethernet", "`network` must be one of ethernet-100m"),
        ("--world mars", "`world` must be one of halos, got world='mars'"),
        ("--world halos", "`world` has 4 nodes of 4 workers, got workers.nodes=2"),
        ("--parameters 0", "`parameters` must be above 0, got parameters=0"),
        ("--slow 4 2", "`slow` must be workers from 0 to 3 with nonneg"),
        ("--slow 3", "--slow: "),
        ("--slow 1 0", r"`slow[1]` must be positive, got slow[1]=0.0"),
        ("--drop 1 -5", "nonnegative numbers, got drop=1 -5.0"),
        ("--stall often", "--stall needs a value"),
        ("--step-ms 0", "`step` must be positive"),
        ("--timeout 0", "`timeout` must be positive, got timeout=0.0"),
        ("--loss 2", "`loss` must be in"),
        (
            "--nonsense 1",
            "--nonsense; see python -m train.simulate --help and python -m tr",
        ),
        ("--methd x", "did you mean --method?; see python -m train.simulate --help and "),
        ("--stepms 3", "did you mean --step-ms?; see python -m train.simulate --help and "),
    ],
)
def test_wrong_usage(options, message, refusal):
    assert message in refusal(simulate.main, [*COMMON, *options.split()])
