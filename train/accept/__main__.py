"""python -m train.accept: checks the devices, the network and the launcher in five minutes.

    python -m train.accept
    python -m train.accept --only numbers,steps --json found.json

Start it as you would start the training: on one device, on all devices of a machine, or in
many processes under any launcher. The parts are

- recovery: a run whose last process is killed is resumed, and ends in the same state as a
  run that was not killed;
- memory: the peak of a step, as the compiler plans it and as the device reports it;
- numbers: the parameters of every method beside its oracle, after every step;
- messages: the bytes of a due and of a quiet step, as lsgd_jax.aot reads them in the
  program and as the run counts them, and the share of an exchange that a delay hides;
- steps: a quiet and a due step beside the base optimizer's.

The exit status is 0 if all checks that are possible here have passed, 1 if one has failed
or there was no time left for it, and 2 for wrong usage.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any

import jax

from train import launch
from train.accept import options as accept_options
from train.accept import recovery, victim
from train.accept.findings import Finding, failed
from train.accept.options import AcceptOptions
from train.accept.report import AcceptReport
from train.cluster import rendezvous
from train.cluster.session import Session, is_of_loss
from train.config import Config
from train.process import command, numerics
from train.process.exit_status import STOPPED, WRONG_USAGE
from train.process.messages import counted, one_line


LATER_S = 5.0  # the other processes end so much later than process 0, which reports
CHILDREN = 0.5  # the share of the time in which a killed run must have ended


def main(arguments: Sequence[str]) -> int:
    """Checks all parts and prints the findings.

    Returns:
      The exit status: 0, 1 (not accepted) or 2 (wrong usage). With several processes also
      70: an unexpected error, and 75: a process was lost.
    """
    session = Session()
    try:
        os.environ.pop(launch.TOLD, None)  # the runs below are not to be resumed
        options = accept_options.parse(arguments, __doc__)
        report = AcceptReport(options.parts)
        config = victim.config_of(options)
        killed: recovery.Killed | str = ""
        with ended_in_time(report, options, session=None):
            if recovery.PART in options.parts:
                patience = CHILDREN * 60 * options.minutes
                killed = recovery.kill(arguments, patience)
            session = rendezvous.join(config)
    except (ValueError, ImportError) as error:
        return session.leave(WRONG_USAGE, str(error))
    session.where = lambda: f"while it checked {report.part or 'the last part'}"
    with session.ended_by_errors(), ended_in_time(report, options, session):
        report.about = about(session)
        for part in options.parts:
            found(report, checks(part, killed, config, session), session)
    return finished(report, options, session)


def checks(
    part: str, killed: recovery.Killed | str, config: Config, session: Session
) -> Iterable[Finding]:
    """The findings of a part, which are made one by one."""
    # These modules make arrays, so this process must have its devices.
    from train.accept import memory, messages, numbers, steps

    calls: dict[str, Callable[[], Iterable[Finding]]] = {
        recovery.PART: lambda: recovery.check(killed, config, session),
        memory.PART: memory.check,
        numbers.PART: numbers.check,
        messages.PART: lambda: messages.check(session),
        steps.PART: lambda: steps.check(session),
    }
    return calls[part]()


def found(report: AcceptReport, check: Iterable[Finding], session: Session) -> None:
    """Adds the findings of a part, in which all processes communicate alike."""
    try:
        for finding in check:
            report.note(finding)
    except Exception as error:
        if session.has_others and is_of_loss(error):
            raise
        reason = f"{type(error).__name__}: {one_line(error)}"
        report.note(failed(report.part, "the whole part", reason))
    report.close_part(session)


def about(session: Session) -> dict[str, Any]:
    """The devices and the versions."""
    devices = counted(jax.device_count(), f"{jax.default_backend()} device")
    count = session.num_processes
    return {
        "on": f"{devices} in {count} process{'es' * (count > 1)}",
        "device": jax.devices()[0].device_kind,
        "devices": jax.device_count(),
        "processes": count,
        "versions": numerics.versions(),
    }


@contextlib.contextmanager
def ended_in_time(
    report: AcceptReport, options: AcceptOptions, session: Session | None
) -> Generator[None]:
    """Reports and exits at the end of the given minutes, even if a collective hangs.

    Args:
      report: what was found so far.
      options: the options of the command.
      session: this process among the others; None before they have met.
    """

    def end() -> None:
        reason = f"it had not ended after {options.minutes:g} minutes"
        try:
            if session is None:
                line = f"error: {reason}: the processes have not met"
                print(line, file=sys.stderr, flush=True)
            elif session.is_main:
                report.give_up(reason)
                finished(report, options, session)
        finally:
            os._exit(STOPPED)

    is_later = session is not None and not session.is_main
    left = 60 * options.minutes - report.seconds + LATER_S * is_later
    timer = threading.Timer(max(0.0, left), end)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def finished(report: AcceptReport, options: AcceptOptions, session: Session) -> int:
    """Prints and writes the report in the main process. Returns the exit status."""
    if session.is_main:
        report.show()
        if options.json is not None:
            report.write(options.json)
    return report.status


if __name__ == "__main__":
    sys.exit(command.run(main))
