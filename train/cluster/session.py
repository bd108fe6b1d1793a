"""A process among the processes of its run, and the texts that they exchange."""

import contextlib
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence

import jax
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from train.cluster.exit_status import CRASHED, INTERRUPTED, LOST


LAST_LINES_S = 2.0  # that the other processes get for theirs before process 0 ends


class WorkersLost(RuntimeError):
    """Asynchronous workers cannot go on: all are lost, or one has raised an error."""


class Session:
    """This process among the processes of its run; made by `train.cluster.rendezvous.join`.

    All processes must ask for texts in the same order: they travel as collectives.

    Args:
      process_id: the number of this process, from 0.
      hosts: the host of each process.

    Attributes:
      process_id, hosts: as given.
      where: returns how far this process is and how to go on, for its last line.

    >>> session = Session()
    >>> session.is_main, session.has_others, session.gather("a")
    (True, False, ['a'])
    """

    def __init__(self, process_id: int = 0, hosts: Sequence[str] = ("localhost",)):
        self.process_id, self.hosts = process_id, list(hosts)
        self.where: Callable[[], str] = lambda: "before training began"

    @property
    def num_processes(self) -> int:
        """The number of processes of the run."""
        return len(self.hosts)

    @property
    def is_main(self) -> bool:
        """Whether this process prints, and writes files and figures."""
        return self.process_id == 0

    @property
    def has_others(self) -> bool:
        """Whether this process is one of several."""
        return self.num_processes > 1

    def names(self, processes: Iterable[int]) -> str:
        """Processes as messages name them.

        >>> Session(hosts=["a", "b"]).names([1, 0])
        'process 0 (host a) and process 1 (host b)'
        """
        return " and ".join(
            f"process {i} (host {self.hosts[i]})" for i in sorted(processes)
        )

    # Texts for one another

    def gather(self, text: str) -> list[str]:
        """Every process's text, in every process."""
        return gather(text) if self.has_others else [text]

    def agree(self, text: str) -> str:
        """The main process's text, in every process."""
        return self.gather(text)[0]

    def of_main(self, make: Callable[[], str]) -> str:
        """The text that the main process makes, in every process.

        Raises:
          ValueError: making it raises one; in every process.
        """
        text = error = ""
        if self.is_main:
            try:
                text = make()
            except ValueError as raised:
                error = str(raised) or repr(raised)
        text, error = json.loads(self.agree(json.dumps([text, error])))
        if error:
            raise ValueError(error)
        return text

    def same_everywhere(self, text: str) -> bool:
        """Whether every process has passed the same text."""
        return len(set(self.gather(text))) == 1

    def wait_for_all(self) -> None:
        """Returns when every process has come here."""
        self.gather("")

    def connect(self, mesh: Mesh) -> None:
        """Connects the devices of all processes with one another, while all are here.

        They would connect when they first communicate. On CPUs gloo gives up if one device
        comes more than 30 s after another one by then, from compiling for example.
        """
        if self.has_others:
            meet = _meeting(mesh)
            self.wait_for_all()
            jax.block_until_ready(meet())

    # The end

    def leave(self, status: int, line: str) -> int:
        """Says why this process cannot go on, and ends it if it is one of several.

        At its regular end a process waits for the others, which may wait for this one.

        Returns:
          The exit status, if the process is by itself.
        """
        print(line if status == INTERRUPTED else f"error: {line}", file=sys.stderr)
        if self.has_others:
            sys.stdout.flush()
            sys.stderr.flush()
            if self.is_main:  # jax aborts the others when this process has ended
                time.sleep(LAST_LINES_S)
            os._exit(status)
        return status

    @contextlib.contextmanager
    def ended_by_errors(self) -> Iterator[None]:
        """Ends this process at an error, if it is one of several, so that all end soon."""
        try:
            yield
        except Exception as error:
            if not self.has_others:
                raise
            if is_of_xla(error):
                reason = " ".join(str(error).split())[:200]
                line = f"another process was lost {self.where()} ({reason})"
                self.leave(LOST, line)
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}"
            self.leave(CRASHED, f"this process crashed {self.where()} ({reason})")


def gather(text: str) -> list[str]:
    """Every process's text, in every process that jax.distributed knows."""
    mine = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(mine.size)).ravel()
    padded = np.zeros(max(1, sizes.max()), np.uint8)
    padded[: mine.size] = mine
    rows = multihost_utils.process_allgather(padded)
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes)]


def is_of_xla(error: BaseException) -> bool:
    """Whether an error comes from a computation, such as one that needs a lost process.

    XLA's errors begin with their status; some of them come as ValueError.

    >>> is_of_xla(ValueError("UNKNOWN: Gloo AllGather failed: Connection closed"))
    True
    >>> is_of_xla(ValueError("`steps` must be a positive int, got steps=0"))
    False
    """
    has_status = isinstance(error, ValueError) and re.match("[A-Z_]+: ", str(error))
    return bool(has_status) or isinstance(error, jax.errors.JaxRuntimeError)


def _meeting(mesh: Mesh) -> Callable[[], jax.Array]:
    """Sums over each group of devices, for which they need all their connections."""
    axes = mesh.axis_names

    def meet():
        # One sum needs the one before: of independent ones each device may begin another
        # one first, and wait for a device that waits for it. Sums of constants XLA drops.
        total = 0
        for group in (axes, *((axis,) for axis in axes)):
            total = lax.psum(total + lax.axis_index(group), group)
        return total

    everywhere = jax.shard_map(meet, mesh=mesh, in_specs=(), out_specs=P(), check_vma=False)
    return jax.jit(everywhere).lower().compile()
