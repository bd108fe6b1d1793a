"""The periods of a plan: a number of steps, or a period that changes during the run."""

import math
from typing import NamedTuple

import optax

import lsgd_jax as lj
from train.config import periods
from train.config.periods import PeriodText


class ChangingPeriod(NamedTuple):
    """A period that changes, over the steps of a run.

    Attributes:
      text: as it was given.
      pieces: the periods.
      steps: number of steps of the run.
    """

    text: str
    pieces: lj.Periods
    steps: int

    @property
    def average(self) -> float:
        """Steps between two exchanges, on average over the run; inf if there are none.

        >>> ChangingPeriod("1, 4: 8", lj.Periods({0: 1, 4: 8}), steps=24).average
        4.0
        """
        (pull,) = lj.local_sgd(self.pieces).pulls
        exchanges = pull.schedule.number(self.steps + 1) - 1
        return self.steps / exchanges if exchanges else math.inf

    def __str__(self) -> str:
        return self.text


Period = int | ChangingPeriod


def average(period: Period) -> float:
    """Steps between two exchanges, on average over the run."""
    return period.average if isinstance(period, ChangingPeriod) else period


def constant(period: Period) -> int | None:
    """The period if it never changes, otherwise None."""
    return None if isinstance(period, ChangingPeriod) else period


class GivenPeriod(NamedTuple):
    """A period as it is given on the command line.

    Attributes:
      text: the option.
      learning_rate: of the run, for the quadratic rule.
    """

    text: PeriodText
    learning_rate: optax.ScalarOrSchedule = 1.0

    def over(self, steps: int | None) -> Period:
        """The period of a run of so many steps.

        steps: None if unknown, which only a period that never changes allows.
        """
        found = periods.parse(self.text, self.learning_rate, steps)
        if isinstance(found, int):
            return found
        assert steps is not None
        return ChangingPeriod(str(self.text), found, steps)
