"""Suggestions for misspelled words."""

import difflib
from collections.abc import Iterable


def meant(given: str, names: Iterable[str], prefix: str = "") -> str:
    """A suggestion for an unknown word, or '' if no known word is near.

    >>> meant("perid", ["period", "wire"], "--method.")
    '; did you mean --method.period?'
    """
    near = difflib.get_close_matches(given, list(names), n=1, cutoff=0.65)
    return f"; did you mean {prefix}{near[0]}?" if near else ""
