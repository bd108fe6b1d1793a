"""The status, the table and the JSON of an acceptance run."""

import json

import pytest

from train.accept.findings import at_most, failed, skipped
from train.accept.report import AcceptReport
from train.cluster.session import Session


GOOD = at_most("steps", "quiet", 1.0, 1.1)
BAD = at_most("steps", "due", float("inf"), 1.1)
LEFT_OUT = skipped("memory", "peak", "not measured: no memory")


def report(*findings):
    """A report of one part with these findings."""
    made = AcceptReport(["steps"])
    for finding in findings:
        made.note(finding)
    made.close_part(Session())
    return made


@pytest.mark.parametrize(
    "findings, status",
    [
        ([GOOD], 0),
        ([GOOD, LEFT_OUT], 0),
        ([GOOD, BAD], 1),
        ([GOOD, failed("steps", "due", "no number")], 1),
        ([LEFT_OUT], 1),  # nothing was checked
        ([], 1),
    ],
)
def test_the_status_is_0_if_checks_passed_and_none_failed(findings, status):
    assert report(*findings).status == status


def test_the_table_and_the_json_say_the_same(capsys, tmp_path):
    made = report(GOOD, BAD, LEFT_OUT)
    made.about = {"on": "1 tpu device in 1 process"}
    made.show()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines[1:4]] == ["passed", "failed", "skipped"]
    assert lines[4] == "memory, peak: skipped: not measured: no memory"
    assert lines[-1].startswith(
        "not accepted: on 1 tpu device in 1 process, 1 check passed, 1 failed, 1 skipped"
    )
    made.write(tmp_path / "found.json")
    found = json.loads((tmp_path / "found.json").read_text(), parse_constant=pytest.fail)
    assert not found["accepted"] and found["on"] == made.about["on"]
    assert [one["verdict"] for one in found["findings"]] == ["passed", "failed", "skipped"]
    assert [one["seen"] for one in found["findings"]] == [1.0, "inf", None]


def test_what_there_was_no_time_for_is_no_success():
    made = AcceptReport(["numbers", "steps", "messages"])
    made.note(GOOD)
    made.close_part(Session())
    made.note(GOOD)
    made.give_up("too late")
    assert [one.verdict for one in made.findings] == [
        "passed",
        "passed",
        "failed",
        "skipped",
    ]
    assert made.findings[2].part == "steps" and made.findings[3].reason == "no time left"
    assert made.status == 1
