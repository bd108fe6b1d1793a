"""The acceptance run in two processes: they agree, and resume a killed run."""

import json
import sys

import pytest
from trainers import Trainers


LAUNCH = "-m train.launch --processes 2 --devices-per-process 2 --module train.accept --"


@pytest.mark.slow  # in one process `tests/train/accept/test_accept.py`
def test_two_processes_recover_and_agree(tmp_path):
    file = tmp_path / "found.json"
    given = ["--only", "recovery,messages,steps", "--minutes", "20"]
    given += ["--json", str(file), "--runs", str(tmp_path / "runs")]
    program = [[sys.executable, *LAUNCH.split()]]
    with Trainers(tmp_path, given, [([], {})], program=program) as started:
        assert started.end(limit=1200) == [0], started.printed(0)
    assert "accepted: on 4 cpu devices in 2 processes" in started.last_line(0)
    found = json.loads(file.read_text())["findings"]
    verdicts = {one["name"]: one["verdict"] for one in found}
    hidden = "diloco, delay 1: share of a due step's cost that the delay hides"
    assert verdicts.pop(hidden) == "skipped"
    assert set(verdicts.values()) == {"passed"} and len(found) == 4 + 6 + 4
    assert verdicts["processes that noticed"] == "passed"
    assert not list((tmp_path / "runs").iterdir())
