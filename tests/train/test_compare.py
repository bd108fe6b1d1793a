"""train.compare: equal budget and data for all methods, table, figure, resuming."""

import csv
import json
import re

import pytest
import tiny

from train import compare
from train.config import settings
from train.metrics import log
from train.run import cli


OPTIONS = (
    "--workers.nodes 1 --workers.locals 2 --batch-size 8 --steps 6 --test-every 3 "
    "--log-every 3 --checkpoint-every 6"
).split()


def command(out, *methods, seeds=1, experiment="digits"):
    methods = ",".join(methods)
    return [experiment, f"--methods={methods}", f"--seeds={seeds}", f"--out={out}"]


def begin(out, name, seed=0, options=(), experiment="digits"):
    """Makes the folder of a run that has begun, and returns it."""
    folder = out / f"{name}-{seed}"
    folder.mkdir()
    config = cli.parse([experiment, "--method", name, "--seed", str(seed), *options])
    settings.write(config, folder / "config.json")
    return folder


def end(folder, *tests, step=6, **values):
    """Writes the metrics of a run that was tested at steps 3 and 6 and then ended."""
    events = [{"kind": "test", "step": 3 * i, **test} for i, test in enumerate(tests, 1)]
    events.append({"kind": "end", "step": step, **values})
    lines = (json.dumps(event | {"seconds": 1}) for event in events)
    (folder / log.METRICS).write_text("\n".join(lines))


def table(out):
    """The rows of compare.csv by method."""
    rows = csv.DictReader((out / "compare.csv").read_text().splitlines())
    return {row["method"]: row for row in rows}


@pytest.mark.slow
def test_a_comparison_and_its_resumption(tmp_path, monkeypatch):
    tiny.install(set=monkeypatch.setattr)
    options = ["--variant", "often=--method easgd --method.period 2", *OPTIONS]
    assert compare.main([*command(tmp_path, "allreduce"), *options]) == 0
    for name, exchanges in {"allreduce": 6, "often": 3}.items():
        last, row = log.read(tmp_path / f"{name}-0")["test"][-1], table(tmp_path)[name]
        assert row["test error, %"] == f"{last['center_error']:.2f}"
        assert row["MB sent per worker"] == f"{last['bytes_sent'] / 1e6:.1f}"
        assert row["peak MB in a step"] == f"{last['bytes_sent'] / 1e6 / exchanges:.3g}"

    # With another method, runs that have ended are not trained again, and a run that was
    # killed before its first step is resumed.
    begin(tmp_path, "independent", options=OPTIONS)
    assert compare.main([*command(tmp_path, "allreduce", "independent"), *options]) == 0
    for name in ("allreduce", "often", "independent"):
        assert len(log.read(tmp_path / f"{name}-0")["start"]) == 1


def test_a_run_that_was_killed_before_its_first_checkpoint_is_resumed(tmp_path):
    line = [*command(tmp_path, "easgd", seeds=2), *OPTIONS]
    resumed = lambda: [config.resume for config in compare.parse(line)[0].values()]
    assert resumed() == [False, False]
    begin(tmp_path, "easgd", 1, OPTIONS)
    assert resumed() == [False, True]


def test_the_results_of_runs_that_have_ended(tmp_path, monkeypatch, capsys):
    def test(error, megabytes, loss=1.0):
        return {"center_error": error, "center_loss": loss, "bytes_sent": 1e6 * megabytes}

    runs = {
        "lsgd": ([test(9, 0), test(5, 0)], [test(3, 4), test(4, 8)]),
        "diloco": [[test(8, 0), test(7, 0)]] * 2,
        # The error of a nan is a number.
        "easgd": ([test(9, 0.1), test(90, 0.2, None)], [test(9, 20), test(8, 40)]),
        "sgp": [[test(2, 1), test(80, 2)]] * 2,
        "grawa": [[test(9, 1)]] * 2,
    }
    ends = {("sgp", 0): {"far_above_best": True}}
    ends["grawa", 0] = ends["grawa", 1] = {"stopped_by": "nonfinite", "step": 5}
    ends["sgp", 1] = {"far_above_best": True, "step": 3}  # it was resumed
    for name, seeds in runs.items():
        for seed, tests in enumerate(seeds):
            folder = begin(tmp_path, name, seed, ["--steps", "6"])
            end(folder, *tests, **ends.get((name, seed), {}))
    drawn = []
    monkeypatch.setattr("matplotlib.pyplot.close", drawn.append)
    assert compare.main([*command(tmp_path, *runs, seeds=2), "--steps", "6"]) == 1
    printed, errors = capsys.readouterr()
    assert errors == "error: diverged: easgd-0, sgp-0, grawa-0, grawa-1\n"
    assert printed == (tmp_path / "compare.md").read_text() and printed.count("\n") == 7
    assert (tmp_path / "compare.png").read_bytes()[:4] == b"\x89PNG"
    rows = table(tmp_path)
    assert list(rows) == list(runs) and rows["lsgd"]["seeds"] == "2"
    assert rows["lsgd"]["test error, %"] == "4.50 ± 0.71"
    assert rows["lsgd"]["lowest, %"] == "4.00 ± 1.41"
    assert rows["lsgd"]["MB sent per worker"] == "4.0 ± 5.7"
    assert rows["lsgd"]["peak MB in a step"] == "–"  # a run of an older version
    assert rows["diloco"]["MB sent per worker"] == "0.0 ± 0.0, never exchanged"
    assert rows["easgd"]["test error, %"] == "1 of 2 diverged"
    # By seed: 7 - 5 and 7 - 4.
    assert rows["diloco"]["difference to lsgd, %"] == "+2.50 ± 0.71"
    assert rows["lsgd"]["difference to lsgd, %"] == "–"
    assert rows["easgd"]["difference to lsgd, %"] == "–"  # one pair
    latex = (tmp_path / "compare.tex").read_text().splitlines()
    assert latex[0] == r"\begin{tabular}{lrrrrrrrr}" and len(latex) == len(runs) + 6
    assert latex[4].startswith(r"lsgd & 2 & 4.50 $\pm$ 0.71 & 4.00 $\pm$ 1.41 & ")
    found = json.loads((tmp_path / "compare.json").read_text())
    values = {(x["method"], x["seed"]): (x["steps"], x["values"]) for x in found}
    assert values["easgd", 0] == ([3, 6], [9, None])
    assert values["grawa", 1] == ([3, 5], [9, None])

    (figure,) = drawn
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    mark = " (× diverged)"
    assert labels == ["lsgd", "diloco", f"easgd{mark}", f"sgp{mark}", f"grawa{mark}"]
    first, second, *_ = figure.axes[0].lines
    assert first.get_color() == second.get_color()
    assert first.get_linestyle() != second.get_linestyle()
    ticks = [float(x.get_text()) for x in figure.axes[2].get_xticklabels()]
    assert [x for x in ticks if x <= 40] == [0, 0.1, 1, 10]


def test_a_row_of_a_run_on_text(tmp_path):
    folder = begin(tmp_path, "lsgd", options=["--steps", "6"], experiment="text")
    end(folder, *({"center_loss": loss, "bytes_sent": 0} for loss in (1.4, 1.9)))
    line = command(tmp_path, "lsgd", experiment="text")
    assert compare.main([*line, "--steps", "6"]) == 0
    row = table(tmp_path)["lsgd"]
    assert row["validation loss, nats"] == "1.9000" and row["lowest, nats"] == "1.4000"


def test_methods_and_variants_have_the_same_seeds_and_budget(tmp_path):
    variants = ["--variant", "a=--method slowmo --method.beta 0.7", "--variant", "b="]
    arguments = [*command(tmp_path, "slowmo", seeds=2), *variants, "--steps", "9"]
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


def test_runs_that_began_with_other_workers_are_not_compared(tmp_path, refusal):
    """Such runs could be resumed, but with another budget."""
    begin(tmp_path, "lsgd")
    assert list(compare.parse(command(tmp_path, "lsgd"))[0]) == [("lsgd", 0)]
    message = "another configuration: workers.nodes: the run has 2, the command says 1"
    line = [*command(tmp_path, "lsgd"), "--workers.nodes", "1"]
    assert message in refusal(compare.main, line)


@pytest.mark.parametrize(
    "variant, message",
    [
        ("--steps 9", "`steps` must be equal for all methods of a comparison, got 6 for "),
        ("--test-every 2", "`test_every` must be equal for all methods of a comparison, "),
        ("--method wagma --workers.locals 3", "x: groups that change along a butterfly ne"),
        ("--batch-size 5000", "x: `batch_size` must be at most 1437, the number of train"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_trains(
    tmp_path, monkeypatch, refusal, variant, message
):
    tiny.install(set=monkeypatch.setattr)
    monkeypatch.setattr(compare, "train", lambda *_: pytest.fail("it has trained"))
    monkeypatch.setattr(compare, "trace", once(compare.trace))
    line = [*command(tmp_path / "out", "easgd"), *OPTIONS, f"--variant=x={variant}"]
    assert message in refusal(compare.main, line)
    assert not (tmp_path / "out").exists()


def once(trace):
    """Traces only the method that is wrong, to save time."""

    def traced(config, *given):
        if config.batch_size > 8 or config.method.name == "wagma":
            trace(config, *given)

    return traced


def test_a_run_of_more_steps_is_not_compared_with_runs_of_fewer(tmp_path, refusal):
    end(begin(tmp_path, "lsgd"), {"center_error": 9}, {"center_error": 5})
    line = [*command(tmp_path, "lsgd", "easgd"), "--steps", "5"]
    message = f"`steps` must be at least the 6 that {tmp_path / 'lsgd-0'} has taken, got"
    assert message in refusal(compare.main, line)


def test_a_run_that_fails_is_a_row_and_the_others_go_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compare, "try_methods", lambda *_: None)
    begun = []

    def train(config, session):
        begun.append(config.method.name)
        if config.method.name == "sgp" or config.seed:
            raise OSError("the disk is gone")
        folder = begin(tmp_path, config.method.name, config.seed, ["--steps", "6"])
        end(folder, *[{"center_error": 9, "center_loss": 1, "bytes_sent": 0}] * 2)

    monkeypatch.setattr(compare, "train", train)
    line = command(tmp_path, "sgp", "easgd", seeds=2)
    assert compare.main([*line, "--steps", "6"]) == 1
    assert begun == ["sgp", "easgd", "sgp", "easgd"]
    printed, errors = capsys.readouterr()
    first, second, third, *_ = printed.splitlines()
    assert [first, second] == ["run 1 of 4: sgp-0", "run 2 of 4: easgd-0"]
    assert re.fullmatch(r"run 3 of 4: sgp-1, about [\d.]+ (ms|s) left", third)
    assert "error: sgp-0 failed: the disk is gone\n" in errors
    assert errors.endswith("error: failed: sgp-0, sgp-1, easgd-1\n")
    rows = table(tmp_path)
    assert rows["sgp"]["test error, %"] == "failed: the disk is gone"
    assert rows["easgd"]["test error, %"] == "9.00, 1 of 2 failed"
    assert (rows["sgp"]["seeds"], rows["sgp"]["compile time, s"]) == ("2", "–")


@pytest.mark.parametrize("name", ["file", "x" * 300])
def test_an_impossible_folder_is_refused_in_one_line(tmp_path, capsys, name):
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
        (command("out", "lsgd", seeds=0), "`seeds` must be a positive int, got seeds=0"),
        ([*command("out", "lsgd"), "--seed", "3"], "--seed must be left out"),
    ],
)
def test_wrong_usage(arguments, message, refusal):
    assert message in refusal(compare.main, arguments)
