"""Texts that processes leave for one another at jax's coordination service.

It needs no devices, so that it works before jax has any, and no collectives, so that it
works while others hang in one. The one place that reaches into jax's private parts: there
is no public way to the service's key-value store.

All of it is among the members of the run: the processes that were started, and after a loss
that the run survives (see `train.run.recovery`) those that are left. Each such set has folders
of its own, so that what the lost ones have left behind, and what was under way when they
were lost, is of no account any more.
"""

import itertools
import re
import socket
import time
from collections.abc import Iterable
from typing import Any

import jax
from jax._src import distributed


FOLDER = "lsgd_jax"

_numbers = itertools.count()
_lost: set[int] = set()  # known to be lost
_without: set[int] = set()  # those of them that the run goes on without


class Lost(RuntimeError):
    """Processes of the run are lost.

    Attributes:
      processes: which.
    """

    def __init__(self, processes: Iterable[int]):
        self.processes = sorted(processes)
        super().__init__(f"lost: process {', '.join(map(str, self.processes))}")


def may_mean_a_loss(error: BaseException) -> bool:
    """Whether an error may have come from a step that needed a lost process.

    XLA's errors begin with their status; some of them come as ValueError.

    >>> may_mean_a_loss(ValueError("UNKNOWN: Gloo AllGather failed: Connection closed"))
    True
    >>> may_mean_a_loss(ValueError("`steps` must be a positive int, got steps=0"))
    False
    """
    of_xla = isinstance(error, ValueError) and re.match("[A-Z_]+: ", str(error))
    return bool(of_xla) or isinstance(error, jax.errors.JaxRuntimeError | Lost)


def is_joined() -> bool:
    """Whether this process was started as one of several."""
    return jax.distributed.is_initialized() and distributed.global_state.num_processes > 1


def process_id() -> int:
    """Which process this one is, from 0."""
    return distributed.global_state.process_id


def members() -> list[int]:
    """The processes of the run, in order."""
    started = range(distributed.global_state.num_processes)
    return [process for process in started if process not in _without]


def has_lost_some() -> bool:
    """Whether the run goes on without some of the processes that were started."""
    return bool(_without)


def note_lost(processes: Iterable[int]) -> None:
    """Notes that processes are lost: from then on nobody is to wait for them."""
    _lost.update(processes)


def check_nobody_is_lost() -> None:
    """Raises Lost if a member is known to be lost."""
    lost = _lost.intersection(members())
    if lost:
        raise Lost(lost)


def lost_members() -> set[int]:
    """The members that are lost; waits until each of the others has asked, too."""
    return set(members()) - set(_client().get_live_nodes(members()))


def go_on_without(processes: Iterable[int]) -> None:
    """Takes processes out of the run; all who stay must do so."""
    global _numbers
    note_lost(processes)
    _without.update(processes)
    _numbers = itertools.count()  # the others may have come to another one
    if len(members()) == 1:
        # Orbax saves no array of one process if there are several, and jax can not be told
        # otherwise that there are not any more.
        jax.process_count = lambda *_: 1


def _client() -> Any:
    return distributed.global_state.client


def who() -> str:
    """A name for the set of the members: 'all', or 'without-1-2'."""
    return "-".join(["without", *map(str, sorted(_without))]) if _without else "all"


def _path(folder: str) -> str:
    """Where a folder of the members lies."""
    return f"{FOLDER}/{who()}/{folder}"


def new_folder(name: str) -> str:
    """A folder that nobody has written to; all must ask for it, in the same order."""
    return f"{name}-{next(_numbers)}"


def write(folder: str, text: str) -> None:
    """Leaves a text in a folder, in the place of this process's last one."""
    key = f"{_path(folder)}/{process_id()}"
    _client().key_value_set(key, text, allow_overwrite=True)


def read(folder: str) -> dict[int, str]:
    """The texts that there are in a folder, by process."""
    found = _client().key_value_dir_get(f"{_path(folder)}/")
    return {int(key.rpartition("/")[2]): text for key, text in found}


def gather(text: str) -> list[str]:
    """Every process's text, in every process; all must call it, in the same order.

    Raises:
      TimeoutError: they have not all come within 5 minutes; Lost: one of them is lost.
    """
    folder = new_folder("round")
    write(folder, text)
    texts = wait_for_members(folder)
    return [text for _, text in sorted(texts.items())]


def first_gather(text: str) -> list[str]:
    """The same for those who came together, however many this process was told there are.

    Raises:
      JaxRuntimeError: they have not all come within 5 minutes.
    """
    folder = new_folder("first")
    write(folder, text)
    _client().wait_at_barrier(_path(folder), 300_000)
    return [text for _, text in sorted(read(folder).items())]


def wait_for_members(folder: str, timeout: float = 300) -> dict[int, str]:
    """The texts in a folder, by process, once every member has left one.

    jax's own barriers do not notice that somebody is lost.

    Args:
      timeout: seconds to wait.

    Raises:
      TimeoutError: they are not there in time; Lost: one of the members is lost.
    """
    deadline, pause = time.monotonic() + timeout, 0.005
    while True:
        texts = read(folder)
        if texts.keys() >= set(members()):
            return texts
        check_nobody_is_lost()
        if time.monotonic() > deadline:
            missing = sorted(set(members()) - texts.keys())
            raise TimeoutError(
                f"process {', '.join(map(str, missing))} did not come in time"
            )
        time.sleep(pause)
        pause = min(2 * pause, 0.2)


def is_coordinator_there() -> bool:
    """Whether anything listens where process 0 ought to."""
    host, _, port = (distributed.global_state.coordinator_address or "").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
    except (OSError, ValueError):
        return False
    return True
