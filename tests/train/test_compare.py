"""train.compare: equal budget and data for all methods, table, figure, resuming."""

import csv
import json
import math

import pytest
import tiny

from train import cli, compare, settings
from train.metrics import log, measures


OPTIONS = (
    "--workers.nodes 1 --workers.locals 2 --batch-size 8 --steps 6 --test-every 3 "
    "--log-every 3 --checkpoint-every 6"
).split()


def command(out, *methods, seeds=1):
    return ["digits", "--methods", ",".join(methods), "--seeds", str(seeds), "--out", out]


@pytest.fixture
def quick(monkeypatch):
    tiny.install(set=monkeypatch.setattr)


@pytest.mark.slow
def test_a_comparison_with_a_diverged_run_and_its_resumption(quick, tmp_path, capsys):
    out = tmp_path / "out"
    variants = ["--variant", "often=--method easgd --method.period 2"]
    variants += ["--variant", "wild=--method easgd --optimizer.learning-rate 1e38"]
    options = [*variants, *OPTIONS, "--stop-after-nonfinite", "2"]
    assert compare.main([*command(str(out), "allreduce"), *options]) == 1
    printed, errors = capsys.readouterr()
    table = (out / "compare.md").read_text()
    assert printed.endswith(table) and table.count("\n") == 5
    assert errors == "error: diverged: wild-0\n"
    assert (out / "compare.png").read_bytes()[:4] == b"\x89PNG"
    assert settings.read(out / "often-0" / "config.json").method.period == 2
    rows = list(csv.DictReader((out / "compare.csv").read_text().splitlines()))
    assert [row["method"] for row in rows] == ["allreduce", "often", "wild"]
    assert rows[2]["test error, %"] == "diverged"
    for row, exchanges in zip(rows, (6, 3)):
        last = log.read(out / f"{row['method']}-0")["test"][-1]
        assert row["test error, %"] == f"{last['center_error']:.2f}"
        assert row["MB sent per worker"] == f"{last['bytes_sent'] / 1e6:.1f}"
        assert row["peak MB in a step"] == f"{last['bytes_sent'] / 1e6 / exchanges:.3g}"
    *tests, wild = json.loads((out / "compare.json").read_text())
    assert [(x["method"], x["steps"]) for x in tests] == [
        ("allreduce", [3, 6]),
        ("often", [3, 6]),
    ]
    assert wild["values"][-1] is None and wild["steps"][-1] < 6

    # With another method, runs that have ended are not trained again, and a run that was
    # killed before its first step is resumed.
    begun = out / "independent-0"
    begun.mkdir()
    arguments = ["digits", "--method", "independent", "--run-dir", str(begun), *OPTIONS]
    settings.write(cli.parse(arguments), begun / "config.json")
    assert compare.main([*command(str(out), "allreduce", "independent"), *options]) == 1
    for name in ("allreduce", "often", "wild", "independent"):
        assert len(log.read(out / f"{name}-0")["start"]) == 1


def test_a_run_that_was_killed_before_its_first_checkpoint_is_resumed(tmp_path):
    line = [*command(str(tmp_path), "easgd", seeds=2), *OPTIONS]
    configs, _ = compare.parse(line)
    assert [config.resume for config in configs.values()] == [False, False]
    folder = tmp_path / "easgd-1"
    folder.mkdir()
    settings.write(configs["easgd", 1], folder / "config.json")
    configs, _ = compare.parse(line)
    assert [config.resume for config in configs.values()] == [False, True]


def test_a_method_that_never_exchanged_is_marked():
    sent = lambda megabytes: compare.Curve([9], [1.0], [megabytes], [4.0])
    (row,) = compare.summarize({("diloco", 0): sent(0.0), ("diloco", 1): sent(8.0)})
    assert "never" not in row["MB sent per worker"]
    (row,) = compare.summarize({("diloco", 0): sent(0.0)})
    assert row["MB sent per worker"] == "0.0, never exchanged"


def test_a_run_whose_last_loss_is_not_finite_has_diverged(tmp_path):
    """A short run ends before it is stopped, and the error of a NaN is a number."""
    test = {"kind": "test", "step": 3, "seconds": 1, "bytes_sent": 0, "center_error": 90.0}
    lines = [test | {"center_loss": 2.0}, test | {"step": 6, "center_loss": None}]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    curve = compare.read(tmp_path)
    assert curve.diverged and curve.values == [90.0, math.inf] and curve.steps == [3, 6]


def test_a_run_that_ends_far_above_its_best_has_diverged(tmp_path):
    test = {"kind": "test", "step": 3, "seconds": 1, "bytes_sent": 0, "center_error": 2.0}
    end = {"kind": "end", "step": 6, "seconds": 2, "far_above_best": True}
    for more, diverged in ([], True), ([test | {"step": 9}], False):  # it was resumed
        lines = [test, test | {"step": 6, "center_error": 80.0}, end, *more]
        (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
        assert compare.read(tmp_path).diverged == diverged


def test_the_figure_tells_methods_seeds_and_diverged_runs_apart(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(compare.plt, "close", drawn.append)
    run = lambda sent, *values: compare.Curve([1, 2], [1.0, 2.0], [sent, 2 * sent], values)
    curves = {("a", 0): run(0.5, 90, 5), ("a", 1): run(0.5, 80, 4), ("b", 0): run(40, 9, 8)}
    curves["c", 0] = run(0.0, math.inf, math.inf)
    compare.draw(curves, tmp_path / "compare.png")
    (figure,) = drawn
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["a", "b", "c (× diverged)"]
    first, second, *_ = figure.axes[0].lines
    assert first.get_color() == second.get_color()
    assert first.get_linestyle() != second.get_linestyle()
    ticks = [float(x.get_text()) for x in figure.axes[2].get_xticklabels()]
    assert [x for x in ticks if x <= 80] == [0, 0.1, 1, 10]


def test_methods_and_variants_have_the_same_seeds_and_budget(tmp_path):
    variants = ["--variant", "a=--method slowmo --method.beta 0.7", "--variant", "b="]
    arguments = [*command(str(tmp_path), "slowmo", seeds=2), *variants, "--steps", "9"]
    configs, _ = compare.parse(arguments)
    assert list(configs) == [
        (name, seed) for name in ("slowmo", "a", "b") for seed in (0, 1)
    ]
    assert all(config.seed == seed for (_, seed), config in configs.items())
    assert {(c.steps, c.batch_size, c.data) for c in configs.values()} == {
        (9, configs["b", 0].batch_size, configs["b", 0].data)
    }
    assert (configs["slowmo", 0].method.beta, configs["a", 1].method.beta) == (0.5, 0.7)
    assert configs["b", 0].method.name == "lsgd"


def test_runs_that_began_with_other_workers_are_not_compared(tmp_path, capsys):
    """Such runs could be resumed, but with another budget."""
    (config,) = compare.parse(command(str(tmp_path), "lsgd"))[0].values()
    (tmp_path / "lsgd-0" / "checkpoints").mkdir(parents=True)
    settings.write(config, tmp_path / "lsgd-0" / "config.json")
    assert list(compare.parse(command(str(tmp_path), "lsgd"))[0]) == [("lsgd", 0)]
    assert compare.main([*command(str(tmp_path), "lsgd"), "--workers.nodes", "1"]) == 2
    message = "another configuration: workers.nodes: the run has 2, the command says 1"
    assert message in capsys.readouterr().err


def test_a_row_of_runs_on_text():
    run = lambda *values: compare.Curve(
        [1, 2], [1.0, 2.0], [2.0, 4.0], values, measures.LOSS
    )
    curves = {("lsgd", 0): run(2.0, 1.5), ("lsgd", 1): run(1.4, 1.9)}
    (row,) = compare.summarize(curves)
    assert row["validation loss, nats"] == "1.7000 ± 0.2828" and row["seeds"] == 2
    assert row["lowest, nats"] == "1.4500 ± 0.0707"
    assert row["peak MB in a step"] == "–"  # a run of an older version


@pytest.mark.parametrize("name", ["file", "x" * 300])
def test_an_impossible_folder_is_refused_in_one_line(quick, tmp_path, capsys, name):
    (tmp_path / "file").touch()
    status = compare.main(["digits", "--methods=lsgd", "--out", str(tmp_path / name)])
    assert status in (1, 2)
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert captured.out == "" and [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "experiment, --out must be given"),
        (["digits", "--out", "out"], "`methods` or `variant` must name the methods"),
        ([*command("out", "lsgd"), "--variant=lsgd="], "`variant` must be NAME=OPTIONS"),
        ([*command("out", "lsgd"), "--variant=x=--seed 1"], "--seed must be left out, be"),
        (command("out", "nonsense"), "`method` must be one of lsgd, easgd"),
        (command("out", "lsgd", seeds=0), "`seeds` must be a positive int, got seeds=0"),
        ([*command("out", "lsgd"), "--seed", "3"], "--seed must be left out"),
    ],
)
def test_wrong_usage(arguments, message, refusal):
    assert message in refusal(compare.main, arguments)
