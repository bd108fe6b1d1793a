"""How a launcher has started a process."""

import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple


class Started(NamedTuple):
    """How a launcher started this process.

    Attributes:
      by: the launcher, by name.
      arguments: for `jax.distributed.initialize`, which detects the missing ones.
      local_rank, local_size: rank of this process on its host, and their number; None if
        the process has the devices of its host to itself.
    """

    by: str
    arguments: dict[str, Any]
    local_rank: int | None = None
    local_size: int | None = None


def integer(environ: Mapping[str, str], *names: str) -> int | None:
    """Returns the value of the first variable that is a number, or None."""
    for name in names:
        value = environ.get(name, "")
        if value.isdecimal():
            return int(value)
    return None


def port_of(job: str) -> int:
    """A port that all processes of a job derive from its name.

    It lies above the ports that Linux gives to connections.

    >>> port_of("1234.0") == port_of("1234.0") != port_of("1234.1")
    True
    """
    return 61440 + zlib.crc32(job.encode()) % 4096
