"""A process's number in a run, which only one process of a host may have."""

import contextlib
import socket

from train.cluster import address


def take(coordinator: str, process_id: int) -> list[socket.socket]:
    """Takes a number for as long as the sockets are open, on Linux.

    jax's coordinator takes a second process of a number for the first one, restarted, and
    ends all. Two on different hosts are not found out here.

    Raises:
      OSError: another process of this host has this number.
    """
    host, port = address.split(coordinator)
    with contextlib.ExitStack() as close_if_taken:
        taken = []
        for found in address.addresses(host, 0.0):
            claim = close_if_taken.enter_context(socket.socket(socket.AF_UNIX))
            try:
                # A name that is no file, and is free again when the process ends.
                claim.bind(f"\0lsgd_jax/{found}/{port}/{process_id}")
            except FileNotFoundError:  # not on Linux
                continue
            except OSError as error:
                raise OSError(
                    f"another process of this host is number {process_id} at {coordinator} "
                    "already: is --distributed.process-id different for all, or does "
                    "another run use this port?"
                ) from error
            taken.append(claim)
        close_if_taken.pop_all()
    return taken
