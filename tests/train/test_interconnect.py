"""train.interconnect: what is measured, and the arithmetic from it to the periods."""

import re

import pytest
import rich.console
import tiny

from train import interconnect
from train.interconnect import Measurement


def measured(**exchanges):
    named = {name.replace("_", " "): seconds for name, seconds in exchanges.items()}
    return Measurement(0.1, 4_000_000, named, dict.fromkeys(named, 1e-4))


TWO_LEVELS = measured(inside_the_node=0.004, across_nodes=0.3, all_workers=0.4)


def printed(result, share=0.05):
    console = rich.console.Console(width=200)
    with console.capture() as capture:
        interconnect.report(result, share, console)
    return capture.get()


@pytest.mark.parametrize(
    "exchange, expected", [(1e-6, 1), (0.005, 1), (0.0051, 2), (0.3, 64), (5.0, 1024)]
)
def test_the_period_is_the_smallest_power_of_two_within_the_share(exchange, expected):
    step, share = 0.1, 0.05
    assert interconnect.period(exchange, step, share) == expected
    assert exchange / expected <= share * step
    assert expected == 1 or exchange / (expected / 2) > share * step


def test_two_levels_share_the_cost_and_the_global_period_is_the_longer():
    local, wide = interconnect.periods(TWO_LEVELS, 0.05)
    assert (local, wide) == (2, 256)
    assert 0.004 / local + 0.4 / wide <= 0.05 * 0.1
    fast_network = measured(inside_the_node=0.02, across_nodes=0.001, all_workers=0.001)
    assert interconnect.periods(fast_network, 0.05) == (8, 8)


def test_one_level_has_the_whole_share():
    assert interconnect.periods(measured(inside_the_node=0.004), 0.05) == (1, None)
    nodes_of_one = measured(across_nodes=0.4, all_workers=0.4)
    assert interconnect.periods(nodes_of_one, 0.05) == (None, 128)


def test_the_report_holds_the_arithmetic():
    text = printed(TWO_LEVELS)
    assert "parameters: 4.0 MB; a step without exchanges: 100.0 ms" in text
    assert re.search(r"all workers +│ 400.00 +│ 10 +│ 0.10", text)
    assert "3.6 % of a step (4.00 ms / 2 + 400.00 ms / 256 = 3.56 ms)" in text
    assert "--method.local-period 2 --method.global-period 256" in text
    assert "would take 5.00 times as long" in text


@pytest.mark.parametrize(
    "pulls",
    [
        {("leader", "float32"): 0.25, ("mean", "float32"): 0.5},
        pytest.param(None, marks=pytest.mark.slow),
    ],
    ids=["pulls as said", "pulls measured"],
)
def test_digits_are_measured_and_nothing_is_written(tmp_path, monkeypatch, capsys, pulls):
    monkeypatch.chdir(tmp_path)
    if pulls is not None:
        monkeypatch.setattr(interconnect, "pull_seconds", lambda *_: pulls)
    tiny.install(tiny.Wide, set=monkeypatch.setattr)
    options = "--workers.nodes 2 --workers.locals 2 --batch-size 4 --share 0.1".split()
    assert interconnect.main(["digits", *options]) == 0
    output = capsys.readouterr().out
    assert "parameters: 0.3 MB" in output  # 76,810 of float32
    assert all(name in output for name in interconnect.LEVELS)
    assert re.search(r"--method.local-period \d+ --method.global-period \d+", output)
    assert "to wait for exchanges at most 10 % of the time" in output
    assert output.count("--method lsgd") == output.count("--method diloco") == 3
    if pulls is not None:
        assert "pauses of 500.0 ms" in output  # of a leader in the node, then of all
    assert not list(tmp_path.iterdir())


def test_what_is_given_is_planned_for_and_not_measured(monkeypatch, capsys):
    monkeypatch.setattr(interconnect, "measure", None)
    options = "--step-ms 100 --parameter-mb 4 --mbit 120 --latency-ms 10 --share 0.25"
    grid = "--workers.nodes 4 --workers.locals 1"
    assert interconnect.main(f"digits {options} {grid}".split()) == 0
    output = capsys.readouterr().out
    # As in test_plan: 0.42 s every 16 steps.
    found = "20.8 %, pauses of 420.0 ms (delay 5: 0.0 %): --method lsgd "
    assert found + "--method.global-period 16 --method.wire float32" in output


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("", "the following arguments are required: experiment"),
        ("digits --share 1.5", "`share` must be in (0, 1), got share=1.5"),
        ("cifar10-cnn7", "`data.dir` must name the folder"),
        ("digits --mbit 100", "`mbit` and `latency-ms` must be given together"),
        ("digits --step-ms 0", "`step-ms` must be above 0, got step-ms=0"),
    ],
)
def test_wrong_usage_is_one_line_and_status_2(arguments, message, capsys):
    assert interconnect.main(arguments.split()) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
