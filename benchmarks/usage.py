"""Wrong usage of a benchmark ends it with one line and status 2, without a traceback."""

import contextlib
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Ends the program if data, options, packages or programs are missing or wrong."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
