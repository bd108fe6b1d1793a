"""Periods on the command line: an int, periods that change, or the quadratic rule.

8                     every 8 steps
1, 500: 16            every step, after 500 steps every 16
quadratic(0.02, 4)    the quadratic synchronization rule with α = 0.02, H_min = 4
"""

import re

import optax

import lsgd_jax as lj


# As tyro reads it: an int stays one.
PeriodText = int | str

NUMBER = r"([^,\s]+)"
QUADRATIC = re.compile(rf"quadratic\(\s*{NUMBER}\s*,\s*{NUMBER}\s*\)")
CHANGING = "'1, 500: 16' or 'quadratic(0.02, 4)'"
EXAMPLES = f"8, {CHANGING}"


def parse(
    text: PeriodText,
    learning_rate: optax.ScalarOrSchedule = 1.0,
    steps: int | None = None,
) -> int | lj.Periods:
    """Returns the period that an option says.

    Args:
      text: the option.
      learning_rate: of the base optimizer, a number or a schedule of steps from 0 on.
      steps: of the run; None where they are not known, and the quadratic rule has H_min.

    Raises:
      ValueError: it is no period.

    >>> parse(8)
    8
    >>> print(parse("1, 500: 16"))
    1, 500: 16
    >>> parse("quadratic(0.25, 2)", learning_rate=0.1, steps=20).pieces
    ((0, 6), (18, 2))
    """
    if not isinstance(text, str):
        return text
    try:
        found = _quadratic(text)
        if found:
            alpha = float(found[1])
            smallest = int(found[2])
            if steps is None:
                return smallest
            return lj.Periods.quadratic(learning_rate, steps, alpha, smallest)
        first, *changes = text.split(",")
        pieces = {0: int(first)}
        for change in changes:
            start, every = change.split(":")
            pieces[int(start)] = int(every)
        return lj.Periods(pieces) if changes else pieces[0]
    except ValueError as error:
        raise ValueError(
            f"a period must be like {EXAMPLES}, got {text!r}: {error}"
        ) from error


def is_quadratic(text: str) -> bool:
    """Whether a period follows the quadratic rule, which reads the learning rate."""
    return _quadratic(text) is not None


def _quadratic(text: str) -> re.Match[str] | None:
    return QUADRATIC.fullmatch(text.strip())
