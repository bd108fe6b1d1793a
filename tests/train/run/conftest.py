"""A finished run, shared by the tests of runs."""

import dataclasses
import shutil

import jax
import jax.monitoring
import pytest
import tiny

from train.run.loop import train
from train.run.open import open_run


@pytest.fixture(scope="package")
def traces():
    """Tasks of traced training steps."""
    tiny.Shared.of.cache_clear()  # other packages may have compiled these experiments
    with pytest.MonkeyPatch.context() as patch:
        yield tiny.note_traces(patch.setattr)


@pytest.fixture(scope="package")
def programs():
    """Names of the programs that are compiled."""
    names = []

    def note(event, seconds, fun_name="", **_):
        if event.endswith("backend_compile_duration"):
            names.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield names
    jax.monitoring.unregister_event_duration_listener(note)


@pytest.fixture(scope="package")
def finished(tmp_path_factory, traces, programs):
    """A finished run: (run, result)."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    return tiny.run_shared(dataclasses.replace(tiny.SMALL, run_dir=str(folder)))


@pytest.fixture
def copied(finished, tmp_path):
    """The configuration that resumes a copy of the finished run."""
    folder = shutil.copytree(finished[1].folder, tmp_path / "copy")
    return dataclasses.replace(tiny.SMALL, run_dir=str(folder), resume=True)


@pytest.fixture
def opened(tmp_path):
    """Opens a small run with some settings changed."""

    def opened(**changes):
        where = {"run_dir": str(tmp_path / "run")}
        return open_run(dataclasses.replace(tiny.SMALL, **where | changes))

    return opened


@pytest.fixture
def trained():
    """Trains a run and applies `change` to (state, loss) after each step."""

    def trained(run, change):
        take = run.experiment.take
        with pytest.MonkeyPatch.context() as patch:  # the experiment is shared
            patch.setattr(run.experiment, "take", lambda *given: change(*take(*given)))
            return train(run)

    return trained
