"""A run of the trainer one of whose processes kills itself: python -m train.accept.victim.

The acceptance run starts it in each of its processes, with its own command line. The run
writes its first checkpoint, and then the last process ends by SIGKILL.
"""

import dataclasses
import json
import os
import pathlib
import signal
import sys
import tempfile
import threading
import time
from typing import Any

from configs.digits import CONFIG
from train.accept.options import AcceptOptions, parse
from train.accept.subject import grid
from train.cluster import rendezvous
from train.config import Config, WorkersConfig, methods
from train.process import command
from train.process.exit_status import WRONG_USAGE
from train.run import loop
from train.run.folder import CHECKPOINTS
from train.run.open import open_run


MODULE = "train.accept.victim"
TELLS = "accept: "  # begins the line with the run folder and the number of this process
EVERY = 8  # steps between checkpoints
FOR_EVER = 1_000_000
EMULATED = WorkersConfig(nodes=2, locals=2)  # sets the number of devices on a CPU


def config_of(options: AcceptOptions) -> Config:
    """The configuration of a run, with which the processes of an acceptance run meet."""
    return dataclasses.replace(
        CONFIG,
        name="accept",
        model="mlp",
        workers=EMULATED,
        method=methods.make("lsgd", local_period=2, global_period=4),
        batch_size=1,
        steps=FOR_EVER,
        log_every=EVERY,
        test_every=FOR_EVER,
        checkpoint_every=EVERY,
        distributed=options.distributed,
    )


def on_all_devices(config: Config, folder: pathlib.Path, **changes: Any) -> Config:
    """A run in a folder with one worker per device, or two on a single device."""
    workers = WorkersConfig(*grid())
    return dataclasses.replace(config, workers=workers, run_dir=str(folder), **changes)


def new_folder(runs: pathlib.Path) -> str:
    """Creates a folder for the runs.

    Raises:
      ValueError: it cannot be created.
    """
    try:
        runs.mkdir(parents=True, exist_ok=True)
        return tempfile.mkdtemp(prefix="accept-", dir=runs.absolute())
    except OSError as error:
        reason = f"{error.strerror}, got {runs}"
        raise ValueError(f"--runs must name a folder to write to: {reason}") from error


def kill_after(checkpoints: pathlib.Path) -> None:
    """Ends this process by SIGKILL as soon as there is a whole checkpoint."""
    while not any(path.name.isdecimal() for path in checkpoints.glob("*")):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def main(arguments: list[str]) -> int:
    """Trains until a process is killed."""
    options = parse(arguments)
    config = config_of(options)
    session = rendezvous.join(config)
    with session.ended_by_errors():
        try:
            folder = pathlib.Path(session.of_main(lambda: new_folder(options.runs)))
        except ValueError as error:
            return session.leave(WRONG_USAGE, str(error))
        told = [str(folder), session.process_id, session.num_processes]
        print(TELLS + json.dumps(told), flush=True)
        run = open_run(on_all_devices(config, folder / "killed"), session)
        if session.process_id == session.num_processes - 1:
            where = run.folder / CHECKPOINTS
            threading.Thread(target=kill_after, args=[where], daemon=True).start()
        loop.train(run)
    raise AssertionError("a process is killed long before")


if __name__ == "__main__":
    sys.exit(command.run(main))
