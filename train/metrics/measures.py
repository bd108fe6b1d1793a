"""What tests measure, and how it is named and shown."""

from collections.abc import Collection, Mapping
from typing import NamedTuple


class Measure(NamedTuple):
    """Something that a test measures; the lower the better.

    Attributes:
      key: in a test's result, and behind `center_` and `best_` in metrics.jsonl.
      name: in words, before a value.
      unit: behind a value.
      digits: behind the decimal point.
    """

    key: str
    name: str
    unit: str
    digits: int

    @property
    def label(self) -> str:
        """The name with the unit, for an axis or a column."""
        return f"{self.name}, {self.unit}"

    def show(self, value: float) -> str:
        """The value with its unit."""
        return f"{value:.{self.digits}f} {self.unit}"


ERROR = Measure("error", "test error", "%", 2)
LOSS = Measure("loss", "validation loss", "nats", 4)
BITS_PER_BYTE = Measure("bits_per_byte", "bits per byte", "bits per byte", 4)


def shown(keys: Collection[str]) -> tuple[Measure, ...]:
    """What is shown of a test that measured these; models are compared by the first.

    >>> [measure.key for measure in shown(["error", "loss"])]
    ['error']
    """
    return (ERROR,) if "error" in keys else (LOSS, BITS_PER_BYTE)


def of_events(tests: Collection[Mapping[str, object]]) -> Measure:
    """What the models of a run are compared by, from its tests in metrics.jsonl."""
    keys = {key.removeprefix("center_") for test in tests for key in test}
    return ERROR if "error" in keys or not tests else shown(keys)[0]


def text(result: Mapping[str, float], name: bool = False) -> str:
    """A test's result, with the name of what was measured if that is wanted.

    >>> text({"loss": 1.5, "bits_per_byte": 2.164}, name=True)
    'validation loss 1.5000 nats, 2.1640 bits per byte'
    """
    measures = shown(result)
    values = ", ".join(measure.show(result[measure.key]) for measure in measures)
    return f"{measures[0].name} {values}" if name else values
