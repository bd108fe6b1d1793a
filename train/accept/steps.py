"""A quiet and a due step beside the base optimizer."""

import statistics
from collections.abc import Iterator

from train.accept.findings import Finding, at_most
from train.accept.subject import is_on_cpu, subject
from train.accept.turns import Arm, TimedStep, in_turns, ratios
from train.cluster.session import Session


PART = "steps"
CHECKED = ("diloco", "lsgd")
# Ratios to a step of the base optimizer. Emulated devices share the cores of a machine.
QUIET = 1.15
QUIET_ON_CPU = 1.5
SLACK = 1.5  # of the exchange by itself
SKEW_ON_CPU = 2.0  # because an exchange also waits for processes that share its cores
ROUNDS = 7
BLOCK_S = 0.15
MOST = 50  # steps of a block


def check(session: Session) -> Iterator[Finding]:
    """Yields a finding about a quiet and about a due step of each method."""
    for name in CHECKED:
        one = subject(name)
        quiet = one.phase(is_due=False)
        due = one.phase(is_due=True)
        programs = {
            "base": one.base(),
            "quiet": one.whole(quiet),
            "due": one.whole(due),
            "exchange": one.exchange(due),
        }
        arms: dict[str, Arm] = {
            words: TimedStep(program, one.state, one.given)
            for words, program in programs.items()
        }
        yield from compared(name, arms, session)


def compared(name: str, arms: dict[str, Arm], session: Session) -> list[Finding]:
    """Times the steps of a method, once more if one takes too long.

    The numbers are those of process 0, so that all processes try equally often.
    """
    found = judged(name, medians(arms, session))
    if any(finding.verdict == "failed" for finding in found):
        found = judged(name, medians(arms, session))
    return found


def judged(name: str, ratio: dict[str, float]) -> list[Finding]:
    """Judges the steps of a method by their ratios to the base optimizer's step.

    A quiet step may take as long as the base optimizer's, up to noise. A due step may take
    that long and the exchange by itself.

    >>> found = judged("lsgd", {"quiet": 1.02, "due": 3.6, "exchange": 0.4})
    >>> [finding.verdict for finding in found]
    ['passed', 'failed']
    """
    most = QUIET
    longest = QUIET + SLACK * ratio["exchange"]
    if is_on_cpu():
        most = QUIET_ON_CPU
        longest *= SKEW_ON_CPU
    return [
        at_most(PART, f"{name}: quiet step / base optimizer", ratio["quiet"], most),
        at_most(PART, f"{name}: due step / base optimizer", ratio["due"], longest),
    ]


def medians(arms: dict[str, Arm], session: Session) -> dict[str, float]:
    """The median ratios of process 0's times to those of the base optimizer."""
    times = milliseconds(arms, session)
    base = times.pop("base")
    found = {name: statistics.median(ratios(seen, base)) for name, seen in times.items()}
    return {name: float(session.agree(repr(x))) for name, x in found.items()}


def milliseconds(arms: dict[str, Arm], session: Session) -> dict[str, list[float]]:
    """Times blocks of all arms in turns. All processes take the same steps."""
    for arm in arms.values():
        arm.seconds_per_step(1)  # loads the program
    slowest = max(arm.seconds_per_step(1) for arm in arms.values())
    steps = max(2, min(MOST, int(BLOCK_S / slowest)))
    return in_turns(arms, ROUNDS, int(session.agree(str(steps))))
