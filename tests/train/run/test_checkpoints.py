"""The barriers of processes that write a checkpoint together; threads stand in for them."""

import random
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import pytest

from train.cluster import key_value_store as coordination
from train.run import checkpoints
from train.run.checkpoints import Barriers


COUNT = 3
START, WRITTEN, COMMITTED, END = (
    "set_value_start",
    "async_write_complete",
    "async_commit_complete",
    "set_value_end",
)


@pytest.fixture
def processes(monkeypatch):
    """Runs a function of the process's number in COUNT threads; what each returns."""
    texts, me = defaultdict(dict), threading.local()

    def write(folder, text):
        texts[folder] = texts[folder] | {me.number: text}

    monkeypatch.setattr(coordination, "write", write)
    monkeypatch.setattr(coordination, "read", lambda folder: dict(texts[folder]))
    monkeypatch.setattr(coordination, "members", lambda: list(range(COUNT)))

    def run(function):
        def as_process(number):
            me.number = number
            return function(number)

        with ThreadPoolExecutor(COUNT) as pool:
            return list(pool.map(as_process, range(COUNT)))

    return run


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


def test_nobody_goes_on_before_all_have_come(processes):
    arrived = []

    def process(number):
        meet = Barriers()
        time.sleep(0.1 * number)
        arrived.append(number)
        meet(key="x", timeout_ms=20_000)
        return len(arrived)

    assert processes(process) == [COUNT] * COUNT


def test_one_that_fails_makes_the_checkpoint_fail_for_all_and_the_next_one_works(processes):
    """Again and again, and nobody ever sees a failure that is none."""
    plan = random.Random(0)
    failing = [plan.choice([None, *range(COUNT)]) for _ in range(30)]

    def process(number):
        meet, delay = Barriers(), random.Random(number)
        errors = []
        for step, fails in enumerate(failing):
            time.sleep(delay.uniform(0, 0.03))
            errors.append(save(meet, step, fails == number))
        return errors

    for number, errors in enumerate(processes(process)):
        for fails, error in zip(failing, errors):
            others = None if fails is None else "another process could not write its part"
            assert error == ("the disk is full" if fails == number else others)


def test_a_step_comes_again_in_another_run_of_the_same_process(processes):
    """What was left at the barriers before does not count."""
    waited = []

    def process(number):
        meet = Barriers()
        save(meet, 4)
        time.sleep(0.1 * number)
        waited.append(number)
        save(meet, 4)
        return len(waited)

    assert processes(process) == [COUNT] * COUNT
    assert isinstance(checkpoints.barriers, Barriers)


def test_a_lost_process_is_not_waited_for(processes, monkeypatch):
    monkeypatch.setattr(coordination, "_lost", {1})

    def process(number):
        if number == 1:
            return None
        with pytest.raises(coordination.Lost, match="lost: process 1"):
            Barriers()(key="x", timeout_ms=20_000)

    processes(process)


def test_waiting_comes_to_an_end(processes):
    def process(number):
        if number == 0:
            return None
        with pytest.raises(RuntimeError, match="not all processes were at x within 0.1 s"):
            Barriers()(key="x", timeout_ms=100)

    processes(process)
