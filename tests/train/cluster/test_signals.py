"""Several processes stop after the same step; here each is a thread."""

import random
import signal
import time

import pytest
from memory_store import each

from train.cluster.signals import StopSignals


COUNT = 3


@pytest.fixture(autouse=True)
def by_hand(monkeypatch):
    """Only the main thread may set handlers; here signals are noted by hand."""
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)


def run(asked, steps=1000, lost=()):
    """(step, signal, processes asked) with which each process stopped, or None.

    asked: {(process, step): signal}. lost: processes that do not take part.
    """

    def train(session):
        """Steps of very different length, until all are to stop."""
        process = session.process_id
        if process in lost:
            return None
        session.note_lost(lost)
        chance = random.Random(process)
        with StopSignals(session, period=0.01) as signals:
            for step in range(1, steps + 1):
                time.sleep(chance.choice((0, 0.001, 0.02 * process)))
                if (process, step) in asked:
                    signals._note(asked[process, step], None)
                if signals.stop_at(step):
                    return step, signals.received, signals.asked
        return None

    return each(COUNT, train)


@pytest.mark.parametrize(
    "asked, received",
    [
        ({(1, 5): signal.SIGTERM}, signal.SIGTERM),
        ({(0, 5): signal.SIGTERM, (2, 1): signal.SIGTERM}, signal.SIGTERM),
        ({(0, 5): signal.SIGTERM, (1, 1): signal.SIGINT}, signal.SIGINT),
        ({(1, 5): signal.SIGHUP}, signal.SIGTERM),
    ],
    ids=["one", "two", "Ctrl-C, too", "a closed terminal"],
)
def test_all_stop_after_the_same_step_whichever_was_asked(asked, received):
    (step, number, processes), *others = run(asked)
    assert others == [(step, number, processes)] * (COUNT - 1)
    assert step > min(step for _, step in asked) and number == received
    assert set(processes) <= {process for process, _ in asked} and processes


def test_who_is_asked_at_the_last_step_ends_as_the_others_do():
    """One may have come to its end when another one asks it where it is."""
    assert run({(2, 10): signal.SIGTERM}, steps=10) == [None] * COUNT


def test_no_process_stops_if_none_is_asked():
    assert run({}, steps=50) == [None] * COUNT


def test_a_lost_process_is_not_waited_for():
    """Who is asked trains on: the next step fails, and then the loss is dealt with."""
    assert run({(0, 3): signal.SIGTERM}, steps=60, lost=[1, 2]) == [None] * COUNT
