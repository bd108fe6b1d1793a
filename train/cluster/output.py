"""Standard output for Python alone: what libraries in C++ print there is left out."""

import os
from typing import TextIO


def python_only(stdout: TextIO) -> TextIO:
    """A stream in the place of standard output, to which from now on only Python writes.

    gloo, which connects CPUs, prints a line there for each device that is connected, by
    several threads at once. Errors come on standard error, which stays as it is.
    """
    try:
        if stdout.fileno() != 1:
            return stdout
        stdout.flush()
    except (OSError, ValueError):
        return stdout  # it is closed, or full: whoever writes to it learns of it
    kept, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
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
