"""train.compare: same budget and data for every method, table, figure, resuming."""

import csv

import pytest
import tiny

from train import config as configuration
from train.metrics import log
from train.tools import compare


OPTIONS = (
    "--workers.nodes 1 --workers.locals 2 --batch-size 8 --steps 6 --test-every 3 "
    "--log-every 3 --checkpoint-every 6"
).split()


def command(out, *methods, seeds=1):
    return ["digits", "--methods", ",".join(methods), "--seeds", str(seeds), "--out", out]


@pytest.fixture
def quick(monkeypatch):
    tiny.install(set=monkeypatch.setattr)


def test_a_comparison_and_resuming_it(quick, tmp_path, capsys):
    out = tmp_path / "out"
    variant = ["--variant", "often=--method easgd --method.period 2"]
    assert compare.main([*command(str(out), "allreduce"), *variant, *OPTIONS]) == 0
    printed = capsys.readouterr().out
    table = (out / "compare.md").read_text()
    assert printed.endswith(table) and table.count("\n") == 4
    assert (out / "compare.png").read_bytes()[:4] == b"\x89PNG"
    assert configuration.read(out / "often-0" / "config.json").method.period == 2
    with open(out / "compare.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == ["allreduce", "often"]
    for row in rows:
        last = log.read(out / f"{row['method']}-0")["test"][-1]
        assert row["test error, %"] == f"{last['center_error']:.2f}"
        assert row["MB sent per worker"] == f"{last['bytes_sent'] / 1e6:.1f}"

    # One method more: what has ended is not trained again, what is missing is.
    more = [*command(str(out), "allreduce", "independent"), *variant, *OPTIONS]
    assert compare.main(more) == 0
    starts = lambda name: len(log.read(out / f"{name}-0")["start"])
    assert [starts(x) for x in ("often", "allreduce", "independent")] == [1, 1, 1]


def test_a_variant_has_options_of_its_own(tmp_path):
    variants = ["--variant", "a=--method slowmo --method.beta 0.7", "--variant", "b="]
    arguments = [*command(str(tmp_path), "slowmo"), *variants, "--steps", "9"]
    configs, _ = compare.parse(arguments)
    assert [name for name, _ in configs] == ["slowmo", "a", "b"]
    assert [config.steps for config in configs.values()] == [9, 9, 9]
    assert (configs["slowmo", 0].method.beta, configs["a", 0].method.beta) == (0.5, 0.7)
    assert configs["b", 0].method.name == "lsgd"


def test_the_same_seeds_and_so_the_same_data_for_every_method(tmp_path):
    configs, _ = compare.parse(command(str(tmp_path), "lsgd", "sgp", seeds=2))
    assert list(configs) == [("lsgd", 0), ("lsgd", 1), ("sgp", 0), ("sgp", 1)]
    assert [config.seed for config in configs.values()] == [0, 1, 0, 1]
    assert len({(c.steps, c.batch_size, c.data) for c in configs.values()}) == 1


def test_runs_that_began_with_other_workers_are_not_compared(tmp_path, capsys):
    """They could be resumed, but not with the budget of the others."""
    (config,) = compare.parse(command(str(tmp_path), "lsgd"))[0].values()
    (tmp_path / "lsgd-0" / "checkpoints").mkdir(parents=True)
    configuration.write(config, tmp_path / "lsgd-0" / "config.json")
    assert list(compare.parse(command(str(tmp_path), "lsgd"))[0]) == [("lsgd", 0)]
    assert compare.main([*command(str(tmp_path), "lsgd"), "--workers.nodes", "1"]) == 2
    message = "another configuration: workers.nodes: the run has 2, the command says 1"
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("name", ["file", "x" * 300])
def test_a_folder_that_cannot_be_is_one_line(quick, tmp_path, capsys, name):
    (tmp_path / "file").touch()
    status = compare.main(["digits", "--methods=lsgd", "--out", str(tmp_path / name)])
    assert status in (1, 2)
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert captured.out == "" and [p.name for p in tmp_path.iterdir()] == ["file"]


def test_mean_and_standard_deviation_over_seeds():
    curves = {
        ("lsgd", seed): compare.Curve([9], [1.0], [2.0], [error])
        for seed, error in enumerate((10.0, 12.0, 14.0))
    }
    (row,) = compare.summarize(curves)
    assert row["test error, %"] == "12.00 ± 2.00" and row["seeds"] == 3


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "the following arguments are required"),
        (["digits", "--out", "out"], "`methods` or `variant` must name what to compare"),
        ([*command("out", "lsgd"), "--variant=lsgd="], "`variant` must be NAME=OPTIONS"),
        ([*command("out", "lsgd"), "--variant=x=--seed 1"], "--seed is set by the compar"),
        (command("out", "nonsense"), "`method` must be one of lsgd, easgd"),
        (command("out", "lsgd", seeds=0), "`seeds` must be a positive int, got seeds=0"),
        ([*command("out", "lsgd"), "--seed", "3"], "--seed is set by the comparison"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(
    arguments, message, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert compare.main(arguments) == 2
    captured = capsys.readouterr()
    assert message in captured.err and captured.err.count("\n") == 1
    assert not list(tmp_path.iterdir())
