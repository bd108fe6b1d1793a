"""What `train.launch` has to know of the trainer's configuration.

    python -m train.tools.launch_plan FILE ARGUMENTS

reads ARGUMENTS as the trainer does and writes a `Plan` to FILE. It is a process of its own
because this needs jax, which the launcher is to live without: whatever happens to jax, the
launcher has to end its processes. So wrong usage is found, and said once, before anything
is started.
"""

import contextlib
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import NamedTuple

from train.cluster.exit_status import INTERRUPTED, SUCCESS, WRONG_USAGE


class Plan(NamedTuple):
    """How the trainer is started and restarted.

    Attributes:
      survive: whether it goes on when a process other than the first one is lost.
      begun: the file that is there once the run has begun; None: it cannot be known.
      folder: options that name the run folder from the start.
      resume: options that make the run go on.
    """

    survive: bool = False
    begun: str | None = None
    folder: Sequence[str] = ()
    resume: Sequence[str] = ()


class NoPlan(Exception):
    """The trainer does not take the command line, and has said why, or has given its help.

    Attributes:
      status: its exit status.
    """

    def __init__(self, status: int):
        self.status = status


def of_trainer(arguments: Sequence[str]) -> Plan:
    """The plan for the trainer with these arguments; NoPlan if they cannot be."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "plan.json"
        command = [sys.executable, "-m", "train.tools.launch_plan", file, *arguments]
        status = subprocess.run(command, stdin=subprocess.DEVNULL).returncode
        if not file.exists():
            raise NoPlan(status)
        return Plan(**json.loads(file.read_text()))


def make(arguments: Sequence[str]) -> Plan:
    """The plan for the trainer with these arguments.

    Raises:
      ValueError, SystemExit: the trainer does not take them.
    """
    from train import cli
    from train.run import folder as run_folder

    config = cli.parse(arguments)
    folder = run_folder.choose(config)
    resume = [] if config.resume else ["--resume"]
    if config.distributed.survive:  # with all nodes again, whichever were lost
        grid = config.workers
        resume += ["--workers.nodes", str(grid.nodes)]
        resume += ["--workers.locals", str(grid.locals)]
    return Plan(
        survive=config.distributed.survive,
        begun=str(folder / run_folder.CONFIG),
        folder=["--run-dir", str(folder)] if config.run_dir is None else [],
        resume=resume,
    )


def main(file: str, *arguments: str) -> int:
    """Writes the plan; the exit status is 0, or 2 (wrong usage)."""
    try:
        plan = make(arguments)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_USAGE
    pathlib.Path(file).write_text(json.dumps(plan._asdict()))
    return SUCCESS


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main(*sys.argv[1:]))
    sys.exit(INTERRUPTED)
