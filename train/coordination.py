"""Texts that processes leave for one another at jax's coordination service.

It needs no devices, so that it works before jax has any, and no collectives, so that it
works while others hang in one. The one place that reaches into jax's private parts: there
is no public way to the service's key-value store.
"""

import itertools
import socket
from typing import Any

import jax
from jax._src import distributed


FOLDER = "lsgd_jax"

_rounds = itertools.count()


def is_joined() -> bool:
    """Whether this process is one of several."""
    return jax.distributed.is_initialized() and num_processes() > 1


def process_id() -> int:
    """Which process this one is, from 0."""
    return distributed.global_state.process_id


def num_processes() -> int:
    """How many processes there are."""
    return distributed.global_state.num_processes


def _client() -> Any:
    return distributed.global_state.client


def write(folder: str, text: str) -> None:
    """Leaves a text in a folder, in the place of this process's last one."""
    key = f"{FOLDER}/{folder}/{process_id()}"
    _client().key_value_set(key, text, allow_overwrite=True)


def read(folder: str) -> dict[int, str]:
    """The texts that there are in a folder, by process."""
    found = _client().key_value_dir_get(f"{FOLDER}/{folder}/")
    return {int(key.rpartition("/")[2]): text for key, text in found}


def gather(text: str, timeout: int = 300) -> list[str]:
    """Every process's text, in every process; all must call it, in the same order.

    Args:
      text: of this process.
      timeout: seconds to wait for the others.

    Raises:
      JaxRuntimeError: they have not all come in time.
    """
    folder = f"round-{next(_rounds)}"
    write(folder, text)
    _client().wait_at_barrier(f"{FOLDER}/{folder}", 1000 * timeout)
    return [text for _, text in sorted(read(folder).items())]


def is_coordinator_there() -> bool:
    """Whether anything listens where process 0 ought to."""
    host, _, port = (distributed.global_state.coordinator_address or "").rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=2).close()
    except (OSError, ValueError):
        return False
    return True
