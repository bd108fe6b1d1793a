"""Command lines read by argparse: wrong usage is a ValueError of one line."""

import argparse
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """A parser that raises where argparse prints and exits.

    Args:
      prog: the command, as it is typed.
      description: what --help says first, line breaks kept.

    >>> parser = Parser("python -m train.compare", "Compares.")
    >>> parser.parse_args(["--nonsense"])
    Traceback (most recent call last):
    ValueError: unrecognized arguments: --nonsense
    """

    def __init__(self, prog: str, description: str | None):
        super().__init__(
            prog=prog,
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)
