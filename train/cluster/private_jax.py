"""All that is used of jax's private parts, and the one function of jax that is replaced.

There is no public way to the key-value store of jax's coordination service, nor to what jax
has found out about the processes before it has devices: `jax.process_index()` and
`jax.process_count()` would make it take them.
"""

from typing import Any

import jax
from jax._src import distributed


def client() -> Any:
    """The client of the coordination service; None unless the process has joined others."""
    return distributed.global_state.client


def process_id() -> int:
    """Which process this one is, from 0."""
    return distributed.global_state.process_id


def num_processes() -> int:
    """How many processes this one was told there are."""
    return distributed.global_state.num_processes


def coordinator_address() -> str:
    """HOST:PORT of the coordination service, which is in process 0."""
    return distributed.global_state.coordinator_address or ""


def count_one_process() -> None:
    """From now on jax counts this process only, when all others are lost.

    Orbax saves no array of one process if there are several, and jax cannot be told
    otherwise that there are not any more.
    """
    jax.process_count = lambda *_: 1
