"""What the processes of a run must agree on. With one process nothing is communicated."""

import os

import jax
from jax.experimental import multihost_utils

from train import coordination


def is_main() -> bool:
    """Whether this process prints, and writes files and figures."""
    return jax.process_index() == 0


def agree(text: str) -> str:
    """The main process's text, in every process."""
    return coordination.gather(text)[0] if coordination.is_joined() else text


def same_everywhere(text: str) -> bool:
    """Whether every process has passed the same text."""
    return not coordination.is_joined() or len(set(coordination.gather(text))) == 1


def wait_for_all(name: str) -> None:
    """Returns when every process has come here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def cores() -> int:
    """CPU cores that this process may use, as far as Python tells."""
    count = getattr(os, "process_cpu_count", os.cpu_count)()  # the former: Python 3.13
    return count or 1
