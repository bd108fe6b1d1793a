"""train.plan: its arithmetic against numbers computed by hand, and the command."""

import re

import pytest
import tiny

from train import plan


PROPOSAL = re.compile(
    r" *([\d.]+) %, pauses of ([\d.]+) ms \(delay (\d+): ([\d.]+) %\): --method (\w+) "
    r"--method\.(?:local-)?period (\d+) --method\.(?:global-period|fragments) (\d+) "
    r"--method\.wire (\w+)"
)
# A step takes 100 ms, the parameters 400 ms, and each message 10 ms more.
STEP = "--step-ms 100 --parameter-mb 4 --latency-ms 10"
NODES = f"{STEP} --mbit 120 --workers.nodes 4 --workers.locals 1"
ONE_NODE = f"{STEP} --mbit 120 --workers.nodes 1 --workers.locals 4"
TWO = f"{STEP} --mbit 80 --workers.nodes 2 --workers.locals 1"


@pytest.fixture
def planned(capsys, monkeypatch):
    """Plans for the digits. Returns the proposals by method and wire, and the output.

    The numbers of a proposal are the share in %, the pause in ms, the delay and the share
    in % that it leaves; then the local and the global period, or the period and fragments.
    """
    tiny.install(tiny.Wide, set=monkeypatch.setattr)

    def planned(options):
        assert plan.main(["digits", *options.split()]) == 0
        output, found = capsys.readouterr().out, {}
        lines = [line for line in output.splitlines() if "--method" in line]
        for line in lines:
            match = PROPOSAL.fullmatch(line)
            found[match.group(5, 8)] = [float(x) for x in match.group(1, 2, 3, 4, 6, 7)]
        assert len(found) == len(lines) == 6
        return found, output

    return planned


@pytest.mark.parametrize(
    "options, method, wire, expected",
    [
        # Workers may wait 33.3 ms per step. Election and pull take 10 + 410 ms: 12.6 steps,
        # rounded up to a power of two. A delay of 4.2 steps hides them.
        (f"{NODES} --share 0.25", "lsgd", "float32", [20.8, 420, 5, 0, 16, 16]),
        # A million int8 values and 3,906.25 scales of 4 bytes take 101.5625 ms.
        (f"{NODES} --share 0.25", "lsgd", "int8", [24.8, 131.6, 2, 0, 4, 4]),
        # 410 ms in 4 fragments: 3 more latencies fit into 41 ms, but 7 do not.
        (f"{NODES} --share 0.1", "diloco", "float32", [6.4, 110, 2, 0, 64, 4]),
        # A mean in few bits takes two rounds of two messages, between two workers only one.
        (f"{NODES} --share 0.25", "diloco", "int8", [15, 141.6, 2, 0, 8, 1]),
        (f"{TWO} --share 0.25", "diloco", "int4", [15.2, 71.6, 1, 0, 4, 1]),
        # 420 ms every second step: a delay of one step hides 100 ms of them.
        (f"{NODES} --share 0.75", "lsgd", "float32", [67.7, 420, 1, 61.5, 2, 2]),
        # One node has both pulls.
        (f"{ONE_NODE} --share 0.25", "lsgd", "float32", [20.8, 840, 9, 0, 32, 32]),
    ],
)
def test_proposals_for_given_values(options, method, wire, expected, planned, monkeypatch):
    monkeypatch.setattr(plan, "measure", None)
    assert planned(options)[0][method, wire] == expected


@pytest.mark.parametrize(
    "inside, everywhere, expected",
    [
        # Each level gets 16.7 ms: 0.36 and 25.2 steps. A period of one step has no delay.
        (0.006, 0.42, [16.1, 426, 0, 16.1, 1, 32]),
        # The outer period is not shorter.
        (0.42, 0.006, [11.7, 426, 5, 0, 32, 32]),
    ],
)
def test_proposals_for_measured_values(inside, everywhere, expected, planned, monkeypatch):
    pulls = {("local",): {("leader", "float32"): inside}}
    of_all = {("leader", "float32"): everywhere, ("mean", "float32"): 0.409}
    monkeypatch.setattr(plan, "pull_seconds", lambda *given: pulls.get(given[2], of_all))
    # Three exchanges, each of the parameters and of one number, and a step.
    times = iter([0.4, 0.1, 0.3, 0.2, 0.5, 0.001, 0.1])
    monkeypatch.setattr(plan, "_median", lambda *_: next(times))
    monkeypatch.setattr(plan, "STEPS", 1)
    grid = "--workers.nodes 2 --workers.locals 2"
    found, output = planned(f"{grid} --batch-size 4 --share 0.25")
    assert found["lsgd", "float32"] == expected
    # The four leaves limit the number of fragments.
    assert found["diloco", "float32"] == [20.5, 103, 2, 0, 16, 4]
    # 76,810 of float32.
    assert "parameters: 0.3 MB; a step without exchanges: 100.0 ms" in output
    assert re.search(r"across nodes +│ 300.00 +│ 1 +│ 200.00", output)
    assert "would take 6.00 times as long" in output  # an exchange of all workers
    assert "settings that wait at most 25 % of the time" in output


@pytest.mark.slow
def test_a_plan_measures_and_writes_no_files(tmp_path, monkeypatch, planned):
    monkeypatch.chdir(tmp_path)
    _, output = planned("--workers.nodes 2 --workers.locals 2 --batch-size 4 --share 0.1")
    assert all(name in output for name in ("inside the node", "across nodes", "all worke"))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("", "experiment must be given"),
        ("digits --share 1.5", "`share` must be in (0, 1), got share=1.5"),
        ("digits --mbit 100", "`mbit` and `latency_ms` must be given together"),
        ("digits --step-ms 0", "`step_ms` must be above 0, got step_ms=0"),
    ],
)
def test_wrong_usage(arguments, message, refusal):
    assert message in refusal(plan.main, arguments.split())
