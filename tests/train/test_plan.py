"""The planner's arithmetic, against numbers worked out by hand."""

import pytest

from train import plan
from train.plan import Link


LINK = Link(latency=0.01, rate=1e7, workers=4)  # 4 MB take 0.41 s
FAST = Link(latency=0.001, rate=1e9, workers=4)
STEP, PAYLOAD = 0.1, 4_000_000


def test_seconds_of_an_exchange():
    assert plan.leader_seconds(LINK, PAYLOAD) == pytest.approx(0.02 + 0.4)
    assert plan.mean_seconds(LINK, PAYLOAD) == pytest.approx(0.01 + 0.4)
    # A million of int8 with 3,906.25 scales of four bytes: 1.015625 MB in two messages.
    assert plan.leader_seconds(LINK, PAYLOAD, "int8") == pytest.approx(0.03 + 0.1015625)
    # Gathered from the three others: twice what an all-reduce of them would take.
    assert plan.mean_seconds(LINK, PAYLOAD, "int8") == pytest.approx(0.02 + 2 * 0.1015625)
    eight = LINK._replace(workers=8)
    assert plan.mean_seconds(eight, PAYLOAD, "int4") == pytest.approx(0.02 + 4 * 0.0515625)


def test_what_was_measured_of_a_whole_pull_takes_the_place_of_the_arithmetic():
    link = LINK._replace(measured={("leader", "int8"): 0.3, ("mean", "int8"): 0.5})
    assert plan.leader_seconds(link, PAYLOAD, "int8") == 0.3
    assert plan.leader_seconds(link, PAYLOAD) == plan.leader_seconds(LINK, PAYLOAD)
    assert plan.mean_seconds(link, PAYLOAD, "int8") == 0.5
    found = plan.lsgd(None, link, STEP, PAYLOAD, share=0.25, wire="int8")
    assert found.period == 16 and found.wait == pytest.approx(0.3 / 16)


def test_lsgd_with_two_levels():
    """Inside 6 ms, among all 420 ms; a quarter of the time is a third of a step."""
    found = plan.lsgd(FAST, LINK, STEP, PAYLOAD, share=0.25)
    # Half of 33 ms each: 420 / 16.7 = 25.2, and the shorter period at most every step.
    assert (found.local, found.period) == (1, 32)
    assert found.wait == pytest.approx(0.006 + 0.42 / 32)
    assert found.share == pytest.approx(0.019125 / 0.119125)
    assert found.pause == pytest.approx(0.426)
    assert found.delay == 0 and found.overlapped == found.share  # a period of one step


def test_lsgd_with_one_level_has_a_delay_that_hides_the_exchange():
    found = plan.lsgd(None, LINK, STEP, PAYLOAD, share=0.25)
    assert (found.local, found.period, found.delay) == (None, 16, 5)  # 12.6 -> 16; 4.2 -> 5
    assert found.share == pytest.approx(0.02625 / 0.12625) and found.overlapped == 0
    assert found.options == "--method lsgd --method.global-period 16 --method.wire float32"


def test_diloco_is_cut_where_latency_lets_it():
    """410 ms in 4 fragments: 3 more latencies of 10 ms are within 41 ms, 7 are not."""
    found = plan.diloco(LINK, STEP, PAYLOAD, share=0.1)
    assert found.fragments == 4 and found.period == 64  # 440 ms / 11.1 ms = 39.6
    assert found.wait == pytest.approx(0.44 / 64) and found.pause == pytest.approx(0.11)
    assert found.delay == 2 and found.overlapped == 0
    assert plan.diloco(LINK, STEP, PAYLOAD, share=0.1, leaves=3).fragments == 2


def test_a_delay_that_is_too_short_hides_a_part():
    """Every second step 420 ms: one step of 100 ms hides as much of it."""
    assert plan.overlapped_wait(0.42, 1, 0.1) == pytest.approx(0.32)
    assert plan.overlapped_wait(0.42, 5, 0.1) == 0
    found = plan.lsgd(None, LINK, STEP, PAYLOAD, share=0.75)
    assert (found.period, found.delay) == (2, 1)
    assert found.overlapped == pytest.approx(0.16 / 0.26)


@pytest.mark.parametrize("share", [0.01, 0.05, 0.3])
def test_no_proposal_waits_longer_than_it_may(share):
    found = list(plan.proposals(FAST, LINK, STEP, PAYLOAD, share))
    assert len(found) == 6
    for proposal in found:
        assert 0 < proposal.share <= share + 1e-9 and proposal.overlapped <= proposal.share
        assert proposal.period % proposal.fragments == 0


def test_what_is_measured_makes_a_link():
    link = Link.of(seconds=0.41, latency=0.01, payload=PAYLOAD, workers=4)
    assert link[:3] == pytest.approx(LINK[:3])
    # Too small to tell from its latency: never faster than a hundredfold.
    assert Link.of(0.01, 0.02, 1000, 2).rate == pytest.approx(1000 / 1e-4)
