"""Proposals for misspelled words."""

import difflib
from collections.abc import Iterable


def meant(given: str, names: Iterable[str], prefix: str = "") -> str:
    """A proposal for a word that is none of the known ones; '' if none is near.

    >>> meant("perid", ["period", "wire"], "--method.")
    '; did you mean --method.period?'
    """
    near = difflib.get_close_matches(given, list(names), n=1, cutoff=0.65)
    return f"; did you mean {prefix}{near[0]}?" if near else ""
