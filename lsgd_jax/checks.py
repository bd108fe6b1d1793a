"""What factories refuse, in one wording: the name, the rule, the value."""

import operator
from collections.abc import Sequence
from typing import Any


def check_positive_int(name: str, value: Any) -> None:
    """Raises ValueError unless the value is an int of at least 1."""
    try:
        valid = not isinstance(value, bool) and operator.index(value) >= 1
    except TypeError:
        valid = False
    if not valid:
        raise ValueError(f"`{name}` must be a positive int, got {name}={value!r}")


def check_fraction(name: str, value: Any) -> None:
    """Raises ValueError unless the value is a number in [0, 1]."""
    try:
        valid = bool(0 <= value <= 1)
    except (TypeError, ValueError):
        valid = False
    if not valid:
        raise ValueError(
            f"`{name}` must be in [0, 1] (or a schedule), got {name}={value!r}"
        )


def check_option(name: str, value: Any, options: Sequence[str]) -> None:
    """Raises ValueError unless the value is one of the options."""
    if value not in options:
        known = ", ".join(repr(option) for option in options)
        raise ValueError(f"`{name}` must be one of {known}, got {name}={value!r}")


def check_not_negative(name: str, value: Any) -> None:
    """Raises ValueError unless the value is a number of at least 0."""
    try:
        valid = bool(0 <= value < float("inf"))
    except (TypeError, ValueError):
        valid = False
    if not valid:
        raise ValueError(
            f"`{name}` must be at least 0 and finite (or a schedule), got {name}={value!r}"
        )


def check_period(name: str, value: Any, period: int) -> None:
    """Raises ValueError unless the value is an int in [0, period)."""
    try:
        valid = not isinstance(value, bool) and 0 <= operator.index(value) < period
    except TypeError:
        valid = False
    if not valid:
        raise ValueError(f"`{name}` must be an int in [0, {period}), got {name}={value!r}")
