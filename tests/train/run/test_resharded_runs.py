"""Runs that resume with other workers."""

import dataclasses
import shutil

import numpy as np
import pytest
import tiny

from train.__main__ import main
from train.config import WorkersConfig, settings
from train.metrics import drawing, log
from train.run import cli, plots
from train.run.checkpoints import latest_notes
from train.run.loop import train
from train.run.open import open_run


pytestmark = pytest.mark.usefixtures("quick")

SMALL = dataclasses.replace(tiny.SMALL, steps=6, log_every=2)


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The folder of a run of 2 x 2 workers to step 6."""
    folder = tmp_path_factory.mktemp("ended") / "run"
    tiny.train_shared(dataclasses.replace(SMALL, run_dir=str(folder)))
    return folder


@pytest.fixture
def folder(ended, tmp_path):
    return shutil.copytree(ended, tmp_path / "run")


def resume(folder, *options):
    return ["digits", "--resume", "--run-dir", str(folder), *options]


@pytest.mark.slow
def test_a_run_resumes_with_other_workers_and_then_with_these(folder, capsys):
    config = (folder / "config.json").read_bytes()
    assert main(resume(folder, "--workers.nodes", "1", "--steps", "12")) == 0
    (event,) = log.read(folder)["resized"]
    assert (event["step"], event["old"], event["new"]) == (6, [2, 2], [1, 2])
    a, b = event["sources"]
    said = f"1 x 2 workers resume from 2 x 2: 0 from {a}, 1 from {b}\n"
    assert capsys.readouterr().out.count(said) == 1

    # By default the workers are those of the latest checkpoint.
    assert cli.parse(resume(folder)).workers == WorkersConfig(1, 2)
    assert main(resume(folder, "--steps", "18")) == 0
    assert "resume from" not in capsys.readouterr().out
    more = resume(folder, "--workers.nodes=2", "--workers.locals=2", "--steps=20")
    assert main(more) == 0
    events = log.read(folder)
    assert [e["workers"] for e in events["start"]] == [[2, 2], [1, 2], [1, 2], [2, 2]]
    assert [len(e["losses"]) for e in events["train"]] == [4] * 3 + [2] * 6 + [4]
    assert [e["new"] for e in events["resized"]] == [[1, 2], [2, 2]]
    assert [e["step"] for e in events["test"]] == [6, 12, 18, 20]
    sent = [e["bytes_sent"] for e in events["train"]]
    assert sent == sorted(sent)
    assert (folder / "config.json").read_bytes() == config
    grids = [(0, 6, 2, 2), (6, 12, 1, 2), (12, 18, 1, 2), (18, 20, 2, 2)]
    assert plots._grids(events) == grids
    leaders = plots.FIGURES["leaders"](events)  # of all grids
    assert len(leaders.axes) == 4
    drawing.plt.close(leaders)


@pytest.mark.slow  # `test_checkpoints.py` falls back on the same grid
def test_an_unreadable_checkpoint_falls_back_to_one_of_another_grid(folder, capsys):
    recent = np.array(latest_notes(folder / "checkpoints")["recent_losses"])
    config = dataclasses.replace(SMALL, workers=WorkersConfig(1, 2), steps=8)
    config = dataclasses.replace(config, run_dir=str(folder), resume=True)
    train(open_run(config))
    (folder / "checkpoints" / "8" / "notes" / "metadata").write_text('{"recent')
    capsys.readouterr()
    run = open_run(config)
    assert "warning: the checkpoint of step 8 cannot be read" in capsys.readouterr().out
    assert run.step == 6 and str(run.resizing).startswith("1 x 2 workers resume from 2 x 2")
    assert (folder / "checkpoints" / "unreadable-8").is_dir()
    recent = recent[run.resizing.sources]  # they move with their worker
    np.testing.assert_array_equal(run.buffer.recent.average, recent)


@pytest.mark.parametrize(
    "method, options, message",
    [
        ("cge", "--method.faulty 2", "`faulty` must be less than the number of work"),
        ("wagma", "--workers.locals 3", "need a power of two workers"),
    ],
)
def test_a_grid_that_the_method_does_not_allow(method, options, message, tmp_path, refusal):
    folder, options = tmp_path / "run", options.split()
    kept = options if method == "cge" else []
    config = cli.parse(["digits", "--method", method, *kept, "--workers.locals", "2"])
    (folder / "checkpoints").mkdir(parents=True)
    settings.write(config, folder / "config.json")
    assert message in refusal(main, resume(folder, "--workers.nodes", "1", *options))
