"""train.plan: its arithmetic against numbers computed by hand, and the command."""

import re

import pytest
import tiny

from train import plan
from train.plan import ALL, INSIDE, Link, Setting


LINK = Link(latency=0.01, rate=1e7, workers=4)  # 4 MB take 0.41 s
FAST = Link(latency=0.001, rate=1e9, workers=4)
STEP, PAYLOAD = 0.1, 4_000_000


def proposals(share, links, **changes):
    """Proposals by method and wire format."""
    found = Setting(STEP, PAYLOAD, links)._replace(**changes).proposals(share)
    return {(x.options.split()[1], x.options.split()[-1]): x for x in found}


def test_seconds_of_an_exchange():
    assert LINK.seconds("leader", PAYLOAD) == pytest.approx(0.02 + 0.4)
    assert LINK.seconds("mean", PAYLOAD) == pytest.approx(0.01 + 0.4)
    # A million int8 values and 3,906.25 scales of 4 bytes: 1.015625 MB in two messages.
    assert LINK.seconds("leader", PAYLOAD, "int8") == pytest.approx(0.03 + 0.1015625)
    # A mean takes two rounds of messages, a gather from one other worker a single one.
    assert LINK.seconds("mean", PAYLOAD, "int8") == pytest.approx(0.04 + 0.1015625)
    two = LINK._replace(workers=2)
    assert two.seconds("mean", PAYLOAD, "int4") == pytest.approx(0.02 + 0.0515625)


def test_measured_pulls_replace_computed_ones():
    link = LINK._replace(measured={("leader", "int8"): 0.3})
    assert link.seconds("leader", PAYLOAD) == LINK.seconds("leader", PAYLOAD)
    found = proposals(0.25, {ALL: link})["lsgd", "int8"]
    assert found.exchanges == ((0.3, 16),)


@pytest.mark.parametrize(
    "exchange, expected", [(1e-6, 1), (0.005, 1), (0.0051, 2), (0.3, 64), (5.0, 1024)]
)
def test_the_period_is_the_smallest_power_of_two_within_the_share(exchange, expected):
    link = LINK._replace(measured={("leader", "float32"): exchange})
    share = 0.05 / 1.05  # 0.05 of a step
    assert proposals(share, {ALL: link})["lsgd", "float32"].period == expected


def test_lsgd_with_two_levels():
    """Pulls take 6 ms and 420 ms. A quarter of the time is 33 ms per step."""
    found = proposals(0.25, {INSIDE: FAST, ALL: LINK})["lsgd", "float32"]
    # Each level gets 16.7 ms: 420 / 16.7 = 25.2, and the local period is 1.
    assert found.options == (
        "--method lsgd --method.local-period 1 --method.global-period 32 "
        "--method.wire float32"
    )
    assert found.share() == pytest.approx(0.019125 / 0.119125)  # 6 ms + 420 ms / 32
    assert found.pause == pytest.approx(0.426) and found.delay == 0  # a period of one step
    turned = proposals(0.25, {INSIDE: LINK, ALL: FAST})["lsgd", "float32"]
    # The outer period is not shorter.
    assert [every for _, every in turned.exchanges] == [32, 32]


def test_lsgd_with_one_level_has_a_delay_that_hides_the_exchange():
    found = proposals(0.25, {ALL: LINK})["lsgd", "float32"]
    assert (found.period, found.delay) == (16, 5)  # 12.6 -> 16; 4.2 -> 5
    assert found.share() == pytest.approx(0.02625 / 0.12625) and found.share(5) == 0
    words = "--method lsgd --method.local-period {0} --method.global-period {0} "
    assert found.options == f"{words.format(16)}--method.wire float32"
    # One node has both pulls: 25.2 -> 32.
    inside = proposals(0.25, {INSIDE: LINK})["lsgd", "float32"]
    assert inside.options == f"{words.format(32)}--method.wire float32"
    assert [every for _, every in inside.exchanges] == [32, 32]
    # 420 ms every second step: a delay of one step hides 100 ms of them.
    found = proposals(0.75, {ALL: LINK})["lsgd", "float32"]
    assert (found.period, found.delay) == (2, 1)
    assert found.share(1) == pytest.approx(0.16 / 0.26)


def test_latency_limits_the_fragments_of_diloco():
    """410 ms in 4 fragments: 3 more latencies of 10 ms fit into 41 ms, but 7 do not."""
    found = proposals(0.1, {ALL: LINK})["diloco", "float32"]
    assert "--method.period 64 --method.fragments 4 " in found.options  # 440 / 11.1 = 39.6
    assert found.exchanges == ((pytest.approx(0.11), 16),)
    assert found.delay == 2 and found.share(2) == 0
    found = proposals(0.1, {ALL: LINK}, leaves=3)
    assert "fragments 2" in found["diloco", "float32"].options


@pytest.mark.parametrize("share", [0.01, 0.05, 0.3])
def test_no_proposal_exceeds_the_share(share):
    found = proposals(share, {INSIDE: FAST, ALL: LINK})
    assert len(found) == 6
    for proposal in found.values():
        assert 0 < proposal.share() <= share + 1e-9
        assert proposal.share(proposal.delay) <= proposal.share()


@pytest.mark.parametrize(
    "pulls",
    [
        {("leader", "float32"): 0.25, ("mean", "float32"): 0.5},
        pytest.param(None, marks=pytest.mark.slow),
    ],
    ids=["given pulls", "measured pulls"],
)
def test_a_plan_measures_and_writes_no_files(tmp_path, monkeypatch, capsys, pulls):
    monkeypatch.chdir(tmp_path)
    if pulls is not None:
        monkeypatch.setattr(plan, "pull_seconds", lambda *_: pulls)
        # Three exchanges, each of the payload and of one number, and a step.
        times = iter([0.4, 0.1, 0.3, 0.2, 0.5, 0.1, 0.1])
        monkeypatch.setattr(plan, "_median", lambda *_: next(times))
        monkeypatch.setattr(plan, "STEPS", 1)
    tiny.install(tiny.Wide, set=monkeypatch.setattr)
    options = "--workers.nodes 2 --workers.locals 2 --batch-size 4 --share 0.1".split()
    assert plan.main(["digits", *options]) == 0
    output = capsys.readouterr().out
    assert "parameters: 0.3 MB" in output  # 76,810 of float32
    assert all(name in output for name in (INSIDE, plan.ACROSS, ALL))
    assert re.search(r"--method.local-period \d+ --method.global-period \d+", output)
    assert "settings that wait at most 10 % of the time" in output
    assert output.count("--method lsgd") == output.count("--method diloco") == 3
    if pulls is not None:
        assert "a step without exchanges: 100.0 ms" in output
        assert re.search(r"across nodes +│ 300.00 +│ 1 +│ 200.00", output)
        assert "would take 6.00 times as long" in output  # an exchange of all workers
        assert "pauses of 500.0 ms" in output  # a leader in the node, then one of all
    assert not list(tmp_path.iterdir())


def test_given_values_are_not_measured(monkeypatch, capsys):
    monkeypatch.setattr(plan, "measure", None)
    options = "--step-ms 100 --parameter-mb 4 --mbit 120 --latency-ms 10 --share 0.25"
    grid = "--workers.nodes 4 --workers.locals 1"
    assert plan.main(f"digits {options} {grid}".split()) == 0
    output = capsys.readouterr().out
    # As above: 0.42 s every 16 steps.
    found = "20.8 %, pauses of 420.0 ms (delay 5: 0.0 %): --method lsgd "
    periods = "--method.local-period 16 --method.global-period 16 "
    assert f"{found}{periods}--method.wire float32" in output


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("", "experiment must be given"),
        ("digits --share 1.5", "`share` must be in (0, 1), got share=1.5"),
        ("cifar10-cnn7", "`data.dir` must name the folder"),
        ("digits --mbit 100", "`mbit` and `latency_ms` must be given together"),
        ("digits --step-ms 0", "`step_ms` must be above 0, got step_ms=0"),
    ],
)
def test_wrong_usage(arguments, message, refusal):
    assert message in refusal(plan.main, arguments.split())
