"""Trainers in several processes, shared by the tests."""

import functools

import pytest
from trainers import (
    HEARTBEAT_S,
    SLOWLY,
    SMALL,
    TINY,
    Trainers,
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

    def start(count, *options, by=by_options, before=SLOWLY, tiny=TINY, **variables):
        run = ["--run-dir", str(tmp_path / "run")]
        heartbeat = ["--distributed.heartbeat-timeout", str(HEARTBEAT_S)]
        each = [(own, variables | set_) for own, set_ in by(count)]
        arguments = [*SMALL, *run, *heartbeat, *options]
        folder = tmp_path / f"printed-{len(started)}"
        started.append(Trainers(folder, arguments, each, cache, tiny + before))
        return started[-1]

    yield start
    for trainers in started:
        trainers.__exit__()
