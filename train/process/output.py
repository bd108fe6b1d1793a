"""Standard output without the lines that C++ libraries print."""

import os
from typing import TextIO


def python_only(stdout: TextIO) -> TextIO:
    """Returns a stream in place of standard output, and sends C++ output to nowhere.

    gloo, which connects CPUs, prints a line from several threads at once for each device
    that it connects. Errors go to standard error, which is not changed.
    """
    try:
        if stdout.fileno() != 1:
            return stdout
        stdout.flush()
    except (OSError, ValueError):
        return stdout  # it is closed or full, which the next write reports
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    line_buffering = getattr(stdout, "line_buffering", True)
    return open(
        kept,
        "w",
        buffering=1 if line_buffering else -1,
        encoding=stdout.encoding,
        errors=stdout.errors,
    )
