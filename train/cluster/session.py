"""A process among the processes of its run, and the messages that they exchange."""

import contextlib
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Callable, Generator, Sequence

import jax
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from train.cluster.words import Words
from train.process.exit_status import CRASHED, INTERRUPTED, RESUME
from train.process.messages import one_line, plain


LAST_LINES_S = 2.0  # time for the other processes to print before process 0 exits


class WorkersLost(RuntimeError):
    """Asynchronous workers cannot continue: all have failed, or one raised an error."""


class Session:
    """This process among the processes of its run, see `train.cluster.rendezvous.join`.

    All processes must exchange messages in the same order, because they are collectives.
    Where processes may be lost, each one is alone in its session, and writes its own
    files. It knows what process 0 says.

    Args:
      process_id: the number of this process, from 0.
      hosts: the host name of each process; where processes may be lost that of this one.
      words: what process 0 says, where processes may be lost; otherwise None.

    Attributes:
      process_id, hosts, words: as given.
      where: returns the progress of this process and how to resume, for its last line.

    >>> session = Session()
    >>> session.is_main, session.has_others, session.gather("a")
    (True, False, ['a'])
    """

    def __init__(
        self,
        process_id: int = 0,
        hosts: Sequence[str] = ("localhost",),
        words: Words | None = None,
    ):
        self.process_id = process_id
        self.words = words
        self.hosts = list(hosts)
        self.where: Callable[[], str] = lambda: "before training began"

    @property
    def num_processes(self) -> int:
        """The number of processes of the run."""
        return len(self.hosts)

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and figures."""
        return self.prints or self.words is not None

    @property
    def prints(self) -> bool:
        """Whether this process prints."""
        return self.process_id == 0

    @property
    def has_others(self) -> bool:
        """Whether this process is one of several."""
        return self.num_processes > 1

    @property
    def tests(self) -> bool:
        """Whether this process takes part in tests."""
        return self.prints or self.words is None

    @property
    def is_alone(self) -> bool:
        """Whether there is no other process."""
        return not self.has_others and self.words is None

    # Messages

    def gather(self, text: str) -> list[str]:
        """Returns the texts of all processes, in every process."""
        return gather(text) if self.has_others else [text]

    def agree(self, text: str) -> str:
        """Returns the text of the main process, in every process."""
        return self.gather(text)[0]

    def of_main(self, make: Callable[[], str]) -> str:
        """Calls `make` in the main process and returns its text in every process.

        Raises:
          ValueError: `make` raises one. All processes raise it.
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
        """Whether all processes passed the same text."""
        return len(set(self.compared(text).values())) == 1

    def compared(self, text: str) -> dict[int, str]:
        """The texts by process: of all of them, or of process 0 and of this one."""
        if self.words is not None:
            return {0: self.words.of_main(text), self.process_id: text}
        return dict(enumerate(self.gather(text)))

    def wait_for_all(self) -> None:
        """Blocks until every process has called this."""
        self.gather("")

    def connect(self, mesh: Mesh) -> None:
        """Connects the devices of all processes while all processes wait here.

        Otherwise they would connect when they first communicate. On CPUs, gloo gives up if
        one device then comes more than 30 s after another, for example from compiling.
        """
        if self.has_others:
            meet = _meeting(mesh)
            self.wait_for_all()
            jax.block_until_ready(meet())

    # The end

    def leave(self, status: int, line: str) -> int:
        """Reports why this process cannot continue. One of several processes exits here.

        A regular exit would wait for the others, which may wait for this one.

        Returns:
          The exit status, if this process is alone.
        """
        sys.stdout.flush()  # so that this line is the last one, also in a file of both
        start = "" if status == INTERRUPTED else "error: "
        print(start + plain(line), file=sys.stderr)
        if not self.is_alone:
            sys.stderr.flush()
            if self.prints:  # jax aborts the others when this process exits
                time.sleep(LAST_LINES_S)
            os._exit(status)
        return status

    @contextlib.contextmanager
    def ended_by_errors(self) -> Generator[None]:
        """Exits at an error if this process is one of several, so that all end soon."""
        try:
            yield
        except Exception as error:
            if self.is_alone:
                raise
            if is_of_xla(error):
                line = f"another process was lost {self.where()} ({one_line(error)})"
                self.leave(RESUME, line)
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}"
            self.leave(CRASHED, f"this process crashed {self.where()} ({reason})")


def gather(text: str) -> list[str]:
    """Returns the texts of all processes of jax.distributed, in every process."""
    mine = np.frombuffer(text.encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(mine.size)).ravel()
    padded = np.zeros(max(1, sizes.max()), np.uint8)
    padded[: mine.size] = mine
    rows = multihost_utils.process_allgather(padded)
    return [bytes(row[:size]).decode() for row, size in zip(rows, sizes)]


def is_of_xla(error: BaseException) -> bool:
    """Whether an error comes from XLA, such as a collective with a failed process.

    Messages of XLA begin with a status. Some of its errors are raised as ValueError.

    >>> is_of_xla(ValueError("UNKNOWN: Gloo AllGather failed: Connection closed"))
    True
    >>> is_of_xla(ValueError("`steps` must be a positive int, got steps=0"))
    False
    """
    has_status = isinstance(error, ValueError) and re.match("[A-Z_]+: ", str(error))
    return bool(has_status) or isinstance(error, jax.errors.JaxRuntimeError)


def is_of_loss(error: BaseException) -> bool:
    """Whether a collective has failed, as with a process that was lost.

    >>> is_of_loss(ValueError("UNKNOWN: Gloo AllGather failed: Connection closed"))
    True
    >>> is_of_loss(ValueError("NOT_FOUND: Error reading local file"))
    False
    """
    of_collective = re.search("Gloo|NCCL|Barrier|coordination", str(error))
    return is_of_xla(error) and of_collective is not None


def _meeting(mesh: Mesh) -> Callable[[], jax.Array]:
    """Compiles sums over each group of devices, which need all their connections."""
    axes = mesh.axis_names

    def meet():
        # Each sum depends on the one before. Devices could start independent sums in
        # different orders and wait for one another. XLA would drop sums of constants.
        total = 0
        for group in (axes, *((axis,) for axis in axes)):
            total = lax.psum(total + lax.axis_index(group), group)
        return total

    everywhere = jax.shard_map(meet, mesh=mesh, in_specs=(), out_specs=P(), check_vma=False)
    return jax.jit(everywhere).lower().compile()
