"""python -m train with asynchronous workers on Ray: a killed worker, a stop, resuming."""

import re
import signal

import numpy as np
import psutil
import pytest
from trainers import Trainers, checkpoints, events

from train.process.exit_status import RESUME


pytestmark = pytest.mark.slow


def start(folder, *options):
    command = "digits --method async-lsgd --workers.nodes 1 --workers.locals 3".split()
    pull = "--method.local-period 4 --method.global-period 16 --log-every 2".split()
    run = ["--run-dir", str(folder / "run"), *options]
    return Trainers(folder / "printed", [*command, *pull, *run], [([], {})])


def test_a_run_survives_a_killed_worker_and_resumes_after_a_stop(tmp_path):
    """Begun with workers of two devices each, resumed with fewer workers of one."""
    paces = lambda: events(tmp_path / "run", "pace")
    with start(tmp_path, "--steps", "100000", "--workers.inside", "fsdp=2") as trainer:
        trainer.until(lambda: len(paces()) > 2)
        everything = trainer.started()
        of_ray = [x for x in everything if "ray::WorkerActor" in x.cmdline()[0]]
        of_ray[0].kill()
        trainer.until(lambda: len(paces()[-1]["present"]) == 2)
        trainer.until(lambda: len(paces()[-1]["present"]) == 3)
        trainer.send(signal.SIGTERM, 0)
        assert trainer.end() == [RESUME], trainer.printed(0)
    out = trainer.printed(0)
    assert re.search(r"warning: worker \d is down at its step \d+", out)
    assert "is back" in out and "), saved\n" in out
    assert "to resume: python -m train digits" in out
    assert "Traceback" not in out
    assert not psutil.wait_procs(everything, timeout=60)[1]
    end = str(checkpoints(tmp_path / "run")[-1] + 6)

    with start(tmp_path, "--resume", "--steps", end, "--workers.locals", "2") as trainer:
        assert trainer.end() == [0], trainer.printed(0)
    assert "everything is in" in trainer.printed(0)
    last = paces()[-1]
    assert len(last["steps"]) == 2 and np.mean(last["steps"]) >= int(end) - 1
