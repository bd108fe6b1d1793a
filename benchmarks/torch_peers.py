"""Processes of PyTorch, which take a block of steps when they are told to."""

import os
import pathlib
import subprocess
import sys
import uuid
from collections.abc import Callable
from typing import Any


HERE = pathlib.Path(__file__).parent


def here(i: int, command: list[str], **options: Any) -> subprocess.Popen:
    """Starts the command of worker i on this host."""
    del i
    return subprocess.Popen(command, **options)


class Peers:
    """The processes, which wait for their turn.

    Args:
      python: with PyTorch.
      folder: where they meet.
      workers: how many.
      start: starts the command of a worker.
      program: beside this file.
      **settings: options of the program: a list is several values, True one without.
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
        # A worker has its threads as it asks for them, whatever this process has.
        env = os.environ | {"OMP_NUM_THREADS": str(settings["threads"])}
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._processes = [
            start(rank, [*command, f"--rank={rank}"], env=env, **pipes)
            for rank in range(workers)
        ]

    def seconds_per_step(self, steps: int) -> float:
        """Runs a block of steps."""
        for process in self._processes:
            process.stdin.write(f"{steps}\n")
            process.stdin.flush()
        answers = [process.stdout.readline() for process in self._processes]
        if not all(answers):
            sys.exit("a process of PyTorch ended; what it said is above")
        return max(map(float, answers))

    def end(self) -> None:
        """Ends them."""
        for process in self._processes:
            process.stdin.close()
        for process in self._processes:
            process.wait(60)
