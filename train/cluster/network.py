"""The network connections of this process, as the system knows them (Linux)."""

import contextlib
import os
import socket
from collections.abc import Collection, Iterator, Sequence


FOLDER = "/proc/self/fd"


def connections(except_port: int | None = None) -> list[list[str]]:
    """The two ends, [here, there], of each TCP connection; none with this port."""
    ends = sorted([here, there] for _, here, there in _open())
    return [each for each in ends if all(not x.endswith(f":{except_port}") for x in each)]


def cut(theirs: Collection[Sequence[str]]) -> None:
    """Cuts the connections to a process, so that what waits for it here fails.

    Args:
      theirs: the `connections` of that process.
    """
    ours = {(there, here) for here, there in theirs}
    for connection, here, there in _open():
        if (here, there) in ours:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


def _open() -> Iterator[tuple[socket.socket, str, str]]:
    """Each TCP connection, for the moment, and its two ends."""
    try:
        descriptors = os.listdir(FOLDER)
    except OSError:
        return  # not Linux
    for name in descriptors:
        with contextlib.suppress(OSError):
            if not os.readlink(f"{FOLDER}/{name}").startswith("socket:"):
                continue
            # Of a copy: closed here, it stays open where it is used.
            with socket.socket(fileno=os.dup(int(name))) as connection:
                is_tcp = connection.type == socket.SOCK_STREAM
                if is_tcp and connection.family in (socket.AF_INET, socket.AF_INET6):
                    ends = connection.getsockname(), connection.getpeername()
                    here, there = (
                        f"{host.removeprefix('::ffff:')}:{port}" for host, port, *_ in ends
                    )
                    yield connection, here, there
