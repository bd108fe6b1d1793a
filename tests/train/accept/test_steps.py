"""Steps that take too long, once or always."""

import pytest

from train.accept import steps
from train.cluster.session import Session


class Paced:
    """An arm whose steps take as many seconds as it is told."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.blocks = 0

    def seconds_per_step(self, count):
        self.blocks += 1
        return self.seconds(self.blocks)


def arms(quiet, due=lambda block: 2.0):
    def one(block):
        return 1.0

    return {
        "base": Paced(one),
        "quiet": Paced(quiet),
        "due": Paced(due),
        "exchange": Paced(one),
    }


BLOCKS = 2 + 1 + steps.ROUNDS  # of one try


@pytest.mark.parametrize(
    "quiet, verdict, tries",
    [
        (lambda block: 1.1, "passed", 1),
        (lambda block: 1.6 if block <= BLOCKS else 1.1, "passed", 2),
        (lambda block: 1.6, "failed", 2),
    ],
    ids=["even", "disturbed", "slow"],
)
def test_a_quiet_step_that_is_slow_twice_fails(quiet, verdict, tries):
    timed = arms(quiet)
    found, due = steps.compared("lsgd", timed, Session())
    assert (found.verdict, due.verdict) == (verdict, "passed")
    assert timed["quiet"].blocks == tries * BLOCKS


def test_a_due_step_that_takes_longer_than_its_exchange_fails():
    _, due = steps.compared("lsgd", arms(lambda block: 1.0, lambda block: 6.0), Session())
    assert due.verdict == "failed" and due.seen == 6.0
    assert due.limit == steps.SKEW_ON_CPU * (steps.QUIET + steps.SLACK)
