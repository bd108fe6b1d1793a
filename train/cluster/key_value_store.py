"""Texts that processes leave for one another at jax's coordination service.

It needs no devices, so that it works before jax has any, and no collectives, so that it
works while others hang in one.
"""

import socket
from collections.abc import Sequence
from typing import Protocol

from train.cluster import private_jax


ROOT = "lsgd_jax"  # the folder of all of them


class KeyValueStore(Protocol):
    """What a `Session` needs of a store: texts in folders, one of each process.

    Attributes:
      process_id: which process this one is, from 0.
      num_processes: how many this process was told there are.
    """

    process_id: int
    num_processes: int

    def write(self, folder: str, text: str) -> None:
        """Leaves a text in a folder, in the place of this process's last one."""

    def read(self, folder: str) -> dict[int, str]:
        """The texts that there are in a folder, by process."""
        ...

    def live(self, processes: Sequence[int]) -> set[int]:
        """Those of the processes that live; waits until each of these has asked, too."""
        ...

    def is_service_there(self) -> bool:
        """Whether anything listens where the store ought to be."""
        ...

    def service_port(self) -> int | None:
        """The port there; None if there is none."""
        ...


class JaxStore:
    """The store at jax's coordination service, once this process has joined it."""

    def __init__(self):
        self.process_id = private_jax.process_id()
        self.num_processes = private_jax.num_processes()
        self._client = private_jax.client()

    def write(self, folder: str, text: str) -> None:
        key = f"{ROOT}/{folder}/{self.process_id}"
        self._client.key_value_set(key, text, allow_overwrite=True)

    def read(self, folder: str) -> dict[int, str]:
        found = self._client.key_value_dir_get(f"{ROOT}/{folder}/")
        return {int(key.rpartition("/")[2]): text for key, text in found}

    def live(self, processes: Sequence[int]) -> set[int]:
        return set(self._client.get_live_nodes(list(processes)))

    def is_service_there(self) -> bool:
        host = private_jax.coordinator_address().rpartition(":")[0].strip("[]")
        try:
            address = host, self.service_port()
            socket.create_connection(address, timeout=2).close()
        except (OSError, ValueError):
            return False
        return True

    def service_port(self) -> int:
        return int(private_jax.coordinator_address().rpartition(":")[2])

    def wait_at_barrier(self, name: str, seconds: float) -> None:
        """Returns when all that came to the service are here, whatever `num_processes` is.

        Raises:
          JaxRuntimeError: they have not all come in time.
        """
        self._client.wait_at_barrier(f"{ROOT}/{name}", int(1000 * seconds))
