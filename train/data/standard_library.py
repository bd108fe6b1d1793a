"""A text that every machine has: the source of Python's own standard library."""

import pathlib
import sysconfig


MOST_BYTES = 2_000_000


def source() -> bytes:
    """The modules of the standard library in the order of their names, up to 2 MB.

    Only those that are a single file; what was generated when Python was built is left out.
    The same Python gives the same text.

    >>> len(source()) == MOST_BYTES or len(source()) > 100_000
    True
    """
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    paths = sorted(folder.glob("*.py"), key=lambda path: path.name)
    kept = [path for path in paths if not path.name.startswith("_sysconfig")]
    text = b""
    for path in kept:
        text += path.read_bytes()
        if len(text) >= MOST_BYTES:
            break
    # A character of several bytes is not cut.
    return text[:MOST_BYTES].decode(errors="ignore").encode()
