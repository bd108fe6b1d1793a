"""Findings: what was expected, what was seen, and the verdict."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from train.process.messages import counted


Verdict = Literal["passed", "failed", "skipped"]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One check and its verdict.

    Attributes:
      part: the part of the acceptance run, such as 'numbers'.
      name: what was checked.
      verdict: 'passed', 'failed' or 'skipped'.
      expected: the value that was expected; None for an upper limit alone.
      seen: the value that was seen.
      limit: the largest accepted distance from `expected`. Without `expected`, the largest
        accepted value.
      unit: the unit of the three numbers.
      reason: why it failed or was skipped, in words.
    """

    part: str
    name: str
    verdict: Verdict
    expected: float | None = None
    seen: float | None = None
    limit: float | None = None
    unit: str = ""
    reason: str = ""


def near(
    part: str, name: str, seen: float, expected: float, limit: float, unit: str = ""
) -> Finding:
    """A value that must be near the expected one. A value that is not finite fails.

    >>> near("messages", "bytes", seen=8.0, expected=8.0, limit=0.0).verdict
    'passed'
    >>> near("numbers", "lsgd", seen=float("nan"), expected=0.0, limit=1.0).verdict
    'failed'
    """
    verdict = "passed" if abs(seen - expected) <= limit else "failed"
    return Finding(part, name, verdict, expected, seen, limit, unit)


def at_most(part: str, name: str, seen: float, limit: float, unit: str = "") -> Finding:
    """A value with an upper limit. A value that is not finite fails.

    >>> at_most("steps", "quiet", seen=1.2, limit=1.15).verdict
    'failed'
    """
    verdict = "passed" if seen <= limit else "failed"
    return Finding(part, name, verdict, None, seen, limit, unit)


def failed(part: str, name: str, reason: str) -> Finding:
    """A check that found no number."""
    return Finding(part, name, "failed", reason=reason)


def skipped(part: str, name: str, reason: str) -> Finding:
    """A check that is impossible here."""
    return Finding(part, name, "skipped", reason=reason)


def merged(part: str, of_each: Sequence[Sequence[Finding]]) -> list[Finding]:
    """The findings of a part in all processes: a check must pass in each of them.

    Args:
      part: the part.
      of_each: the findings of each process.

    Returns:
      For each check the first finding that failed, otherwise that of process 0. Processes
      that did not make the same checks are a failure of their own.
    """
    found = []
    checks = [[one.name for one in mine] for mine in of_each]
    if any(names != checks[0] for names in checks):
        numbers = ", ".join(counted(len(names), "check") for names in checks)
        found.append(failed(part, "all processes", f"they made other checks: {numbers}"))
        of_each = [[one for one in mine if one.verdict == "failed"] for mine in of_each]
        return found + [one for mine in of_each for one in mine]
    for each in zip(*of_each, strict=True):
        chosen = each[0]
        for process, one in enumerate(each):
            if one.verdict == "failed":
                where = f"in process {process}" if process else ""
                reason = ": ".join(filter(None, [where, one.reason]))
                chosen = dataclasses.replace(one, reason=reason)
                break
        found.append(chosen)
    return found
