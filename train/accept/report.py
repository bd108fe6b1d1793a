"""The report of an acceptance run: a table, JSON, and the exit status."""

import dataclasses
import json
import math
import pathlib
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from train.accept.findings import Finding, failed, merged, skipped
from train.cluster.session import Session
from train.metrics import progress, tables
from train.metrics.quantities import number
from train.process.exit_status import STOPPED, SUCCESS
from train.process.messages import counted, plain


WIDTH = 100  # of a file, which has no width of its own


class AcceptReport:
    """What was found so far.

    Args:
      parts: the parts that were asked for, in their order.

    Attributes:
      findings: the findings of the parts that have ended.
      seconds_of: the seconds that each part took.
      about: the devices and versions, for the JSON and the last line.
    """

    def __init__(self, parts: Sequence[str]):
        self._parts = list(parts)
        self._began = time.monotonic()
        self._now: list[Finding] = []
        self._lock = threading.Lock()
        self._out = sys.stdout
        self.findings: list[Finding] = []
        self.seconds_of: dict[str, float] = {}
        self.about: dict[str, Any] = {}

    @property
    def seconds(self) -> float:
        """Seconds since the report was begun."""
        return time.monotonic() - self._began

    @property
    def part(self) -> str:
        """The part that is being checked, or '' after the last one."""
        return self._parts[0] if self._parts else ""

    @property
    def status(self) -> int:
        """0 if checks have passed and none has failed, otherwise 1."""
        verdicts = {finding.verdict for finding in self.findings}
        return SUCCESS if "passed" in verdicts and "failed" not in verdicts else STOPPED

    def note(self, finding: Finding) -> None:
        """Adds a finding of this process to the part that is being checked."""
        with self._lock:
            self._now.append(finding)

    def close_part(self, session: Session) -> None:
        """Ends a part with the findings of all processes, which must call this together."""
        mine = json.dumps([dataclasses.asdict(finding) for finding in self._now])
        of_each = [
            [Finding(**fields) for fields in json.loads(text)]
            for text in session.gather(mine)
        ]
        found = merged(self.part, of_each)
        with self._lock:
            if not found:
                found = [failed(self.part, "the whole part", "it made no check")]
            self.findings += found
            self._now = []
            before = sum(self.seconds_of.values())
            self.seconds_of[self._parts.pop(0)] = round(self.seconds - before, 1)

    def give_up(self, reason: str) -> None:
        """Ends the report early: the current part has failed, and the rest is skipped."""
        with self._lock:
            self.findings += self._now
            if self._parts:
                self.findings.append(failed(self._parts[0], "the whole part", reason))
            for part in self._parts[1:]:
                self.findings.append(skipped(part, "the whole part", "no time left"))
            self._parts = []

    def write(self, path: pathlib.Path) -> None:
        """Writes the report as JSON."""
        whole = {
            "accepted": self.status == SUCCESS,
            "seconds": round(self.seconds, 1),
            "seconds_of": self.seconds_of,
            **self.about,
            "findings": [fields_of(finding) for finding in self.findings],
        }
        path.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")

    def show(self) -> None:
        """Prints the table, the reasons, and the verdict in the last line."""
        console = progress.console(markup=False, file=self._out)
        if not console.is_terminal:
            console.width = max(console.width, WIDTH)
        console.print(tables.aligned([row_of(finding) for finding in self.findings]))
        for finding in self.findings:
            if finding.reason:
                line = f"{finding.part}, {finding.name}: {finding.verdict}: "
                console.print(plain(line + finding.reason), soft_wrap=True)
        console.print(self.verdict(), soft_wrap=True)
        self._out.flush()

    def verdict(self) -> str:
        """The last line.

        >>> AcceptReport([]).verdict()
        'not accepted: 0 checks passed, 0 failed, 0 skipped, in 0 s'
        """
        verdicts = [finding.verdict for finding in self.findings]
        passed = counted(verdicts.count("passed"), "check")
        failed = verdicts.count("failed")
        skipped = verdicts.count("skipped")
        words = "accepted" if self.status == SUCCESS else "not accepted"
        on = f" on {self.about['on']}," if "on" in self.about else ""
        return (
            f"{words}:{on} {passed} passed, {failed} failed, {skipped} skipped, in "
            f"{self.seconds:.0f} s"
        )


def fields_of(finding: Finding) -> dict[str, Any]:
    """The fields of a finding for JSON, which knows no numbers that are not finite.

    >>> fields_of(Finding("steps", "quiet", "failed", seen=float("nan")))["seen"]
    'nan'
    """
    fields = dataclasses.asdict(finding)
    for name, value in fields.items():
        if isinstance(value, float) and not math.isfinite(value):
            fields[name] = str(value)
    return fields


def row_of(finding: Finding) -> dict[str, str]:
    """The row of a finding in the table.

    >>> list(row_of(Finding("memory", "peak", "passed", 200, 210.3, 20, "MB")).values())
    ['memory, peak', '200 MB', '210 MB', '20 MB', 'passed']
    """

    def text(value: float | None) -> str:
        if value is None:
            return "-"
        return f"{number(value)} {finding.unit}".strip()

    return {
        "check": f"{finding.part}, {finding.name}",
        "expected": text(finding.expected),
        "seen": text(finding.seen),
        "limit": text(finding.limit),
        "verdict": finding.verdict,
    }
