"""The command: its usage, errors inside of a part, and all of it on emulated devices."""

import json
import os
import threading

import jax
import pytest
from outside import python

import oracles
from train.accept import __main__ as accept
from train.accept import numbers
from train.accept.findings import at_most
from train.accept.options import PARTS, parse
from train.accept.report import AcceptReport
from train.cluster.session import Session


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--only", "numbrs"], "--only must name parts from recovery, memory, numbers, "),
        (["--only", "numbrs"], "got 'numbrs'; did you mean numbers?"),
        (["--only", ""], "--only must name parts"),
        (["--minutes", "0"], "--minutes must be above 0, got 0"),
        (["--minutes", "soon"], "--minutes must be a number, got 'soon'"),
        (
            ["--json", "missing/found.json"],
            "--json must name a file in a folder that exists",
        ),
        (["--steps", "5"], "unrecognized option --steps"),
    ],
)
def test_wrong_usage(refusal, arguments, message):
    assert message in refusal(accept.main, arguments)


def test_parts_keep_their_order():
    assert parse(["--only", "steps,numbers"]).parts == ["numbers", "steps"]
    assert parse([]).parts == list(PARTS)


def test_an_error_fails_its_part_and_the_next_one_goes_on():
    def raising():
        yield at_most("messages", "bytes", 1.0, 1.0)
        raise ValueError("no such program")

    report = AcceptReport(["messages", "steps"])
    accept.found(report, raising(), Session())
    accept.found(report, [at_most("steps", "quiet", 1.0, 1.1)], Session())
    assert [one.verdict for one in report.findings] == ["passed", "failed", "passed"]
    assert report.findings[1].reason == "ValueError: no such program"
    assert report.status == 1


def test_a_failing_oracle_ends_the_command_with_status_1(monkeypatch, capsys):
    case = oracles.load("allreduce")
    monkeypatch.setattr(numbers, "names", lambda: ["allreduce"])
    monkeypatch.setattr(accept.rendezvous, "join", lambda config: Session())
    assert accept.main(["--only", "numbers"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("accepted: on 8 cpu devices")
    case.expected["b"][-1, -1] += 1e-3
    monkeypatch.setattr(oracles, "load", lambda name: case)
    assert accept.main(["--only", "numbers"]) == 1
    assert "not accepted: on 8 cpu devices" in capsys.readouterr().out


def test_a_part_that_hangs_ends_in_time(tmp_path, monkeypatch):
    statuses = []
    ended = threading.Event()

    def leave(status):
        statuses.append(status)
        ended.set()

    monkeypatch.setattr(os, "_exit", leave)
    file = tmp_path / "found.json"
    given = ["--only", "numbers,steps", "--minutes", "0.001", "--json", str(file)]
    options = parse(given)
    with accept.ended_in_time(AcceptReport(options.parts), options, Session()):
        assert ended.wait(30)
    assert statuses == [1]
    found = json.loads(file.read_text())
    assert [(one["part"], one["verdict"]) for one in found["findings"]] == [
        ("numbers", "failed"),
        ("steps", "skipped"),
    ]
    assert found["findings"][0]["reason"] == "it had not ended after 0.001 minutes"


@pytest.mark.slow
def test_all_parts_on_emulated_devices(tmp_path):
    file = tmp_path / "found.json"
    given = ["--minutes", "20", "--json", file]
    ended = python(
        *("-m", "train.accept", *given), cwd=tmp_path, timeout=1200, JAX_PLATFORMS="cpu"
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "accepted: on 4 cpu devices in 1 process" in ended.stdout
    found = json.loads(file.read_text())
    assert found["accepted"] and found["versions"]["jax"] == jax.__version__
    by_part = {part: [] for part in PARTS}
    for one in found["findings"]:
        by_part[one["part"]].append(one["verdict"])
    assert by_part["recovery"] == ["passed"] * 3
    assert by_part["memory"] == ["skipped"]
    assert by_part["numbers"] == ["passed"] * len(numbers.names())
    assert by_part["messages"] == ["passed"] * 5 + ["skipped"]
    assert by_part["steps"] == ["passed"] * 4
    assert list(found["seconds_of"]) == list(PARTS)
    assert not list((tmp_path / "runs").iterdir())
