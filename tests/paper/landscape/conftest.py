"""A finished run and one of its checkpoints, for the tests of landscapes."""

import dataclasses
import shutil

import pytest
import tiny
from landscapes import SMALL

from paper.landscape.saved_run import SavedRun


@pytest.fixture(scope="module", autouse=True)
def quick():
    with pytest.MonkeyPatch.context() as patch:
        tiny.install(share=True, set=patch.setattr)
        yield


@pytest.fixture(scope="package")
def run(tmp_path_factory):
    """Returns the folder of a finished run with checkpoints of steps 6 and 12."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    tiny.train_shared(dataclasses.replace(SMALL, run_dir=str(folder)))
    return folder


@pytest.fixture(scope="package")
def saved(run):
    with pytest.MonkeyPatch.context() as patch:
        tiny.install(share=True, set=patch.setattr)
        return SavedRun(run, None, None, pytest.fail)


@pytest.fixture
def copied(run, tmp_path):
    return shutil.copytree(run, tmp_path / "copy")
