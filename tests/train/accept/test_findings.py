"""Verdicts, in one process and in several."""

import dataclasses
import math

import pytest

from train.accept.findings import at_most, failed, merged, near, skipped


@pytest.mark.parametrize("seen", [math.nan, math.inf, -math.inf, 1.2])
def test_a_number_that_is_far_or_not_finite_fails(seen):
    assert near("numbers", "lsgd", seen, 1.0, 0.1).verdict == "failed"
    assert at_most("numbers", "lsgd", abs(seen), 1.1).verdict == "failed"


def test_a_check_passes_if_it_passes_in_all_processes():
    good = at_most("steps", "quiet", 1.0, 1.1)
    bad = at_most("steps", "quiet", 1.3, 1.1)
    other = skipped("steps", "due", "one device")
    assert merged("steps", [[good, other], [good, other]]) == [good, other]
    found, _ = merged("steps", [[good, other], [bad, other]])
    assert found == dataclasses.replace(bad, reason="in process 1")


def test_processes_that_made_other_checks_fail():
    good = at_most("steps", "quiet", 1.0, 1.1)
    wrong = failed("steps", "the whole part", "ValueError: no")
    found, *rest = merged("steps", [[good, good], [good, wrong]])
    assert found.verdict == "failed" and "they made other checks" in found.reason
    assert rest == [wrong]
    (found,) = merged("steps", [[good, good], [good]])
    assert found.reason == "they made other checks: 2 checks, 1 check"
