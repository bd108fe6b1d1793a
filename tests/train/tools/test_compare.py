"""train.compare: same budget and data for every method, table, figure, going on."""

import csv

import pytest

from train import config as configuration
from train.metrics import log as records
from train.tools import compare


OPTIONS = (
    "--workers.nodes 1 --workers.locals 2 --batch-size 8 --steps 6 --test-every 3 "
    "--log-every 3 --checkpoint-every 6"
).split()


def command(out, *methods, seeds=1):
    return ["digits", "--methods", ",".join(methods), "--seeds", str(seeds), "--out", out]


def test_a_comparison_and_going_on_with_it(tmp_path, capsys):
    out = str(tmp_path / "out")
    assert compare.main([*command(out, "easgd", "allreduce"), *OPTIONS]) == 0
    printed = capsys.readouterr().out
    table = (tmp_path / "out" / "compare.md").read_text()
    assert printed.endswith(table) and table.count("\n") == 4
    assert (tmp_path / "out" / "compare.png").read_bytes()[:4] == b"\x89PNG"
    with open(tmp_path / "out" / "compare.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row["method"] for row in rows] == ["easgd", "allreduce"]
    for row in rows:
        last = records.read(tmp_path / "out" / f"{row['method']}-0")["test"][-1]
        assert row["test error, %"] == f"{last['center_error']:.2f}"
        assert row["MB sent per worker"] == f"{last['bytes_sent'] / 1e6:.1f}"

    # One method more: what has ended is not trained again, what is missing is.
    more = [*command(out, "easgd", "allreduce", "independent"), *OPTIONS]
    assert compare.main(more) == 0
    starts = lambda name: len(records.read(tmp_path / "out" / name)["start"])
    assert [starts(f"{name}-0") for name in ("easgd", "allreduce", "independent")] == [
        1,
        1,
        1,
    ]


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
