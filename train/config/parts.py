"""The part of the parameters that a method exchanges, on the command line.

Dense_0                    all parameters under this path
Conv_*, Dense_0/bias       those under one of several paths; * stands for any characters
!Dense_1                   all but those under this path
"""

import dataclasses
import fnmatch


EXAMPLES = "Dense_0, 'Conv_*, Dense_0/bias' or '!Dense_1'"
DESCRIPTION = (
    "the parameters to exchange, by their paths: Dense_0, or 'Conv_*, Dense_0/bias', where "
    "* stands for any characters; '!Dense_1' is all but those. Defaults to all."
)


@dataclasses.dataclass(frozen=True)
class PathPatterns:
    """The parameters under paths, as a function from a path to bool.

    Attributes:
      taken: patterns of paths.
      left_out: patterns of paths that are not taken.

    >>> parse("Conv_*, !*/bias")("Conv_0/kernel"), parse("Conv_*, !*/bias")("Conv_0/bias")
    (True, False)
    """

    taken: tuple[str, ...]
    left_out: tuple[str, ...]

    def __call__(self, path: str) -> bool:
        return _is_under(path, self.taken or ("*",)) and not _is_under(path, self.left_out)

    def __repr__(self) -> str:
        return repr(", ".join((*self.taken, *(f"!{pattern}" for pattern in self.left_out))))


def parse(text: str) -> PathPatterns:
    """Returns the part that an option says.

    Raises:
      ValueError: an empty path.

    >>> parse("head")("head/kernel"), parse("!head")("head/kernel")
    (True, False)
    """
    patterns = [pattern.strip() for pattern in text.split(",")]
    left_out = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    taken = [pattern for pattern in patterns if not pattern.startswith("!")]
    if "" in (*taken, *left_out):
        raise ValueError(f"a part must be paths such as {EXAMPLES}, got {text!r}")
    return PathPatterns(tuple(taken), tuple(left_out))


def _is_under(path: str, patterns: tuple[str, ...]) -> bool:
    """Whether a pattern matches the path, or one that leads to it."""
    names = path.split("/")
    starts = ["/".join(names[:depth]) for depth in range(1, len(names) + 1)]
    return any(
        fnmatch.fnmatchcase(start, pattern) for pattern in patterns for start in starts
    )
