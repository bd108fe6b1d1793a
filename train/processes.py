"""What the processes of a run must agree on. With one process nothing is communicated."""

import jax
import numpy as np
from jax.experimental import multihost_utils


def is_main() -> bool:
    """Whether this process prints, and writes files and figures."""
    return jax.process_index() == 0


def agree(text: str) -> str:
    """The main process's text, in every process."""
    if jax.process_count() == 1:
        return text
    buffer = np.zeros(4096, np.uint8)
    encoded = np.frombuffer(text.encode(), np.uint8)
    buffer[: len(encoded)] = encoded
    sent = multihost_utils.broadcast_one_to_all(buffer)
    return bytes(sent).rstrip(b"\0").decode()


def wait_for_all(name: str) -> None:
    """Returns when every process has come here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
