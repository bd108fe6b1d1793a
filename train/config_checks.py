"""What settings must be, in one wording."""

import difflib
from collections.abc import Iterable
from typing import Any


def check(holds: bool, name: str, rule: str, group: Any) -> None:
    """Raises ValueError unless a setting of a group, named in full, follows its rule."""
    if not holds:
        value = getattr(group, name.split(".")[-1])
        raise ValueError(f"`{name}` must be {rule}, got {name}={value}")


def meant(given: str, names: Iterable[str], prefix: str = "") -> str:
    """A proposal for a word that is none of the known ones; '' if none is near.

    >>> meant("perid", ["period", "wire"], "--method.")
    '; did you mean --method.period?'
    """
    near = difflib.get_close_matches(given, list(names), n=1, cutoff=0.65)
    return f"; did you mean {prefix}{near[0]}?" if near else ""
