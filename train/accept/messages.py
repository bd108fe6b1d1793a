"""Bytes of an exchange and the share of it that a delay hides, as predicted and as seen."""

import math
import statistics
from collections.abc import Iterator
from typing import Any

import jax

import lsgd_jax as lj
from train.accept.findings import Finding, near, skipped
from train.accept.steps import milliseconds
from train.accept.subject import Subject, subject
from train.accept.turns import Arm, TimedStep
from train.cluster.session import Session


PART = "messages"
# A quiet step in few bits is that in float32.
COUNTED = {"diloco": ("due", "quiet"), "diloco, int8": ("due",), "lsgd": ("due", "quiet")}
FLAGS = 64  # bytes of flags and losses that a method may send beside its payload
SHARE = 0.01  # of the payload, such as padding
POINTS = 10.0  # percentage points between the predicted and the measured share
HIDDEN = "diloco, delay 1: share of a due step's cost that the delay hides"


def check(session: Session) -> Iterator[Finding]:
    """Yields findings about the bytes of each method, and about the hidden share."""
    if jax.device_count() == 1:
        yield skipped(PART, "bytes", "one device sends nothing to others")
        return
    for name, kinds in COUNTED.items():
        for kind in kinds:
            yield of_bytes(name, kind)
    yield of_hidden_share(session)


def of_bytes(name: str, kind: str) -> Finding:
    """Compares the bytes that aot reads in a program with those that its run counts."""
    one = subject(name)
    program = one.whole(one.phase(is_due=kind == "due"))
    predicted = sent_by(lj.aot.report_of(program))
    expected = predicted if kind == "due" else 0.0
    counted = counted_by(one, program)
    # A quiet program must hold no collective, and its run must count no byte.
    seen = counted if kind == "due" else max(predicted, counted)
    limit = FLAGS + SHARE * predicted if kind == "due" else 0.0
    return near(PART, f"{name}: bytes of a {kind} step", seen, expected, limit, "B")


def counted_by(one: Subject, program: Any) -> float:
    """The bytes that the method counts while a program takes a step."""
    before = one.sent()
    one.run(program)
    return one.sent() - before


def sent_by(report: lj.aot.Report) -> float:
    """The bytes that a device puts into the collectives of a step.

    >>> import jax.numpy as jnp
    >>> sent_by(lj.aot.report_of(jax.jit(jnp.sum).lower(jnp.ones(8))))
    0.0
    """
    found = [x.times * operand(x) for p in report.programs for x in p.collectives]
    return math.fsum(found)


def operand(each: lj.aot.Collective) -> float:
    """The bytes that a device puts into a collective, from its result and what it sends.

    Of a gather of n arrays of S bytes the result is n S and (n - 1) S are sent. A
    reduce-scatter is the reverse.
    """
    if each.kind == "all-gather":
        return each.bytes - each.sent
    if each.kind == "reduce-scatter":
        return each.bytes + each.sent
    return each.bytes


def of_hidden_share(session: Session) -> Finding:
    """Compares the share that a delay hides, from computed and from measured seconds.

    It is (due - delayed) / (due - quiet), of the seconds of a step whose message is sent
    and taken at once, of one whose message travels beside the gradient, and of a quiet one.
    """
    at_once = subject("diloco")
    due = at_once.whole(at_once.phase(is_due=True))
    if lj.aot.report_of(due).pod.chip is None:
        kind = jax.devices()[0].device_kind
        reason = f"not measured: aot has no figures of {kind!r} to predict it from"
        return skipped(PART, HIDDEN, reason)
    delayed = subject("diloco, delay 1")
    late = delayed.whole(delayed.phase(is_due=True))
    quiet = delayed.whole(delayed.phase(is_due=False))
    arms: dict[str, Arm] = {
        "due": TimedStep(due, at_once.state, at_once.given),
        "delayed": TimedStep(late, delayed.state, delayed.given),
        "quiet": TimedStep(quiet, delayed.state, delayed.given),
    }
    programs = {"due": due, "delayed": late, "quiet": quiet}
    computed = {name: milliseconds_of(program) for name, program in programs.items()}
    times = milliseconds(arms, session)
    measured = {name: statistics.median(seen) for name, seen in times.items()}
    seen = float(session.agree(repr(hidden(**measured))))
    return near(PART, HIDDEN, seen, hidden(**computed), POINTS, "%")


def milliseconds_of(program: Any) -> float:
    """The computed milliseconds of a step, or nan if they are unknown."""
    seconds = lj.aot.report_of(program).mean_seconds()
    return math.nan if seconds is None else 1e3 * seconds.step


def hidden(due: float, delayed: float, quiet: float) -> float:
    """The hidden share in percent; all of it if a due step costs nothing.

    >>> hidden(due=5.0, delayed=2.0, quiet=1.0)
    75.0
    """
    if due <= quiet:
        return 100.0
    return 100 * min(1.0, max(0.0, (due - delayed) / (due - quiet)))
