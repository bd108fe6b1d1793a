"""Numbers, durations and amounts of data as people read them."""

from collections.abc import Sequence


HOUR = 3600.0
DAY = 24 * HOUR
YEAR = 365 * DAY

Units = Sequence[tuple[str, float]]  # the largest first
TIMES: Units = (
    ("years", YEAR),
    ("days", DAY),
    ("h", HOUR),
    ("min", 60.0),
    ("s", 1.0),
    ("ms", 1e-3),
)
SIZES: Units = (
    ("PB", 1e15),
    ("TB", 1e12),
    ("GB", 1e9),
    ("MB", 1e6),
    ("kB", 1e3),
    ("B", 1.0),
)


def number(value: float) -> str:
    """A number with three digits, and no exponent if it is large.

    >>> number(1234567), number(1.2345), number(0.00012345)
    ('1,234,567', '1.23', '0.000123')
    """
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def duration(seconds: float, digits: int = 2) -> str:
    """A time in the unit that people use for it.

    >>> duration(6138000), duration(7272), duration(7272, 3), duration(0.0123), duration(0)
    ('71 days', '2.0 h', '2.02 h', '12 ms', '0 s')
    """
    return _in_units(seconds, TIMES, "s", digits)


def size(nbytes: float, digits: int = 3) -> str:
    """An amount of data.

    >>> size(412e9), size(1.416e6), size(0)
    ('412 GB', '1.42 MB', '0 B')
    """
    return _in_units(nbytes, SIZES, "B", digits)


def _in_units(value: float, units: Units, none: str, digits: int) -> str:
    """The value in the largest unit of which it is at least one, or in the smallest."""
    if value == 0:
        return f"0 {none}"
    fits = [(name, unit) for name, unit in units if value >= unit]
    name, unit = fits[0] if fits else units[-1]
    return f"{_rounded(value / unit, digits)} {name}"


def _rounded(value: float, digits: int) -> str:
    """The value with this number of digits, or more if it is a larger whole number.

    >>> _rounded(2.02, 2), _rounded(9.97, 2), _rounded(1234.5, 2), _rounded(0.0423, 2)
    ('2.0', '10', '1,234', '0.042')
    """
    if value < 1:
        return f"{value:.{digits}g}"
    whole = len(f"{value:.0f}")
    return f"{value:,.{max(0, digits - whole)}f}"
