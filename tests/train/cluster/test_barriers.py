"""The barriers of processes that write a checkpoint together, here threads."""

import random
import time

import pytest
from memory_store import each

from train.cluster.lost import Lost


COUNT = 3
START, WRITTEN, COMMITTED, END = (
    "set_value_start",
    "async_write_complete",
    "async_commit_complete",
    "set_value_end",
)


def save(meet, step, fails=False, timeout_ms=20_000):
    """The barriers of one checkpoint; what went wrong, or None."""
    error = None
    for key in (START, END):
        meet(key=key, timeout_ms=timeout_ms)
    try:
        if fails:
            raise OSError("the disk is full")
        for key in (WRITTEN, COMMITTED):
            meet(key=f"{key}.{step}", timeout_ms=timeout_ms)
    except (OSError, RuntimeError) as failure:
        error = str(failure)
    for key in (START, END):
        meet(key=key, timeout_ms=timeout_ms)
    return error


def test_no_process_goes_on_before_all_have_come():
    arrived = []

    def process(session):
        time.sleep(0.1 * session.process_id)
        arrived.append(session.process_id)
        session.barriers(key="x", timeout_ms=20_000)
        return len(arrived)

    assert each(COUNT, process) == [COUNT] * COUNT


def test_one_that_fails_makes_the_checkpoint_fail_for_all_and_the_next_one_works():
    """Again and again, and no process ever sees a failure that is none."""
    plan = random.Random(0)
    failing = [plan.choice([None, *range(COUNT)]) for _ in range(20)]

    def process(session):
        delay, errors = random.Random(session.process_id), []
        for step, fails in enumerate(failing):
            time.sleep(delay.uniform(0, 0.03))
            errors.append(save(session.barriers, step, fails == session.process_id))
        return errors

    for number, errors in enumerate(each(COUNT, process)):
        for fails, error in zip(failing, errors):
            others = None if fails is None else "another process could not write its part"
            assert error == ("the disk is full" if fails == number else others)


def test_a_step_comes_again_in_another_run_of_the_same_process():
    """What was left at the barriers before does not count."""
    waited = []

    def process(session):
        save(session.barriers, 4)
        time.sleep(0.1 * session.process_id)
        waited.append(session.process_id)
        save(session.barriers, 4)
        return len(waited)

    assert each(COUNT, process) == [COUNT] * COUNT


def test_a_lost_process_is_not_waited_for():
    def process(session):
        if session.process_id == 1:
            return
        session.note_lost([1])
        with pytest.raises(Lost, match="lost: process 1"):
            session.barriers(key="x", timeout_ms=20_000)

    each(COUNT, process)


def test_waiting_comes_to_an_end():
    def process(session):
        if session.is_main:
            return
        with pytest.raises(RuntimeError, match="not all processes were at x within 0.1 s"):
            session.barriers(key="x", timeout_ms=100)

    each(COUNT, process)
