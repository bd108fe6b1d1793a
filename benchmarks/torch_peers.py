"""Processes of PyTorch that take blocks of steps on request."""

import contextlib
import os
import pathlib
import subprocess
import sys
import uuid
from collections.abc import Callable
from typing import Any

from usage import one_line_errors


HERE = pathlib.Path(__file__).parent


def here(i: int, command: list[str], **options: Any) -> subprocess.Popen:
    """Starts the command of worker i on this machine."""
    del i
    return subprocess.Popen(command, **options)


class Peers:
    """Processes of PyTorch that wait for their turn.

    Args:
      python: an interpreter with PyTorch.
      folder: a folder for the rendezvous.
      workers: number of processes.
      start: starts the command of a worker.
      program: file name of the program, in the folder of this module.
      **settings: options of the program; a list stands for several values, True for none.
    """

    def __init__(
        self,
        python: str,
        folder: str,
        workers: int,
        start: Callable[..., subprocess.Popen] = here,
        program: str = "torch_lsgd.py",
        **settings: Any,
    ):
        settings |= {"workers": workers, "store": f"{folder}/{uuid.uuid4().hex}"}
        command = [python, str(HERE / program)]
        for name, value in settings.items():
            values = value if isinstance(value, list) else [] if value is True else [value]
            command += ["--" + name.replace("_", "-"), *map(str, values)]
        # The workers' threads do not depend on the environment of this process.
        env = os.environ | {"OMP_NUM_THREADS": str(settings["threads"])}
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with one_line_errors():
            self._processes = [
                start(rank, [*command, f"--rank={rank}"], env=env, **pipes)
                for rank in range(workers)
            ]

    def seconds_per_step(self, steps: int) -> float:
        """Runs a block of steps and returns the seconds per step."""
        answers = []
        with contextlib.suppress(BrokenPipeError):
            for process in self._processes:
                process.stdin.write(f"{steps}\n")
                process.stdin.flush()
            answers = [process.stdout.readline() for process in self._processes]
        if not answers or not all(answers):
            print("error: a process of PyTorch ended; see its output", file=sys.stderr)
            sys.exit(2)
        return max(map(float, answers))

    def end(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for process in self._processes:
            process.wait(60)
