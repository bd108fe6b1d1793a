"""Trainers in several processes, shared by the tests."""

import functools

import pytest
from trainers import (
    END,
    HEARTBEAT_S,
    SLOWLY,
    SMALL,
    TINY,
    Trainers,
    assert_equal_to_the_bit,
    by_options,
    numbers,
    train_here,
)


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory):
    """steps -> the arrays after these steps in one undisturbed process."""

    @functools.cache
    def after(steps):
        folder = tmp_path_factory.mktemp("undisturbed") / "run"
        every = ["--checkpoint-every", str(steps)]
        train_here("--steps", str(steps), *every, "--run-dir", str(folder))
        return numbers(folder, steps)

    return after


@pytest.fixture
def start(tmp_path, cache):
    """Starts trainers of a run in tmp_path / 'run'."""
    started = []

    def start(
        count, *options, by=by_options, before=SLOWLY, tiny=TINY, program=None, **variables
    ):
        run = ["--run-dir", str(tmp_path / "run")]
        heartbeat = ["--distributed.heartbeat-timeout", str(HEARTBEAT_S)]
        each = [(own, variables | set_) for own, set_ in by(count)]
        arguments = [*SMALL, *run, *heartbeat, *options]
        folder = tmp_path / f"printed-{len(started)}"
        started.append(Trainers(folder, arguments, each, cache, tiny + before, program))
        return started[-1]

    yield start
    for trainers in started:
        trainers.__exit__()


@pytest.fixture
def check_resumed(start, undisturbed, tmp_path):
    """Resumes the run, which must end bit-identical to an undisturbed one."""

    def check_resumed(count, *options, steps=END, by=by_options):
        options = ["--resume", "--steps", str(steps), *options]
        trainers = start(count, *options, by=by, before="")
        assert trainers.end() == [0] * count, trainers.printed(0)
        assert_equal_to_the_bit(numbers(tmp_path / "run", steps), undisturbed(steps))
        return trainers

    return check_resumed
