"""Measures of a test, and how they are named and formatted."""

from collections.abc import Collection, Mapping
from typing import NamedTuple


class Measure(NamedTuple):
    """A measure of a test; lower is better, except for BLEU.

    Attributes:
      key: its name in a test's result, and after `center_` and `best_` in metrics.jsonl.
      name: its name in words, printed before a value.
      unit: printed after a value.
      digits: decimal places.
    """

    key: str
    name: str
    unit: str
    digits: int

    @property
    def label(self) -> str:
        """The name with the unit, as an axis or a column shows it."""
        return f"{self.name}, {self.unit}"

    def show(self, value: float) -> str:
        """The value with its unit."""
        return f"{value:.{self.digits}f} {self.unit}"


ERROR = Measure("error", "test error", "%", 2)
LOSS = Measure("loss", "validation loss", "nats", 4)
BITS_PER_BYTE = Measure("bits_per_byte", "bits per byte", "bits per byte", 4)
BLEU = Measure("bleu", "BLEU", "BLEU", 1)


def shown(keys: Collection[str]) -> tuple[Measure, ...]:
    """Measures to show of a test that has these keys. Models are compared by the first.

    >>> [measure.key for measure in shown(["error", "loss"])]
    ['error']
    """
    if "error" in keys:
        return (ERROR,)
    return LOSS, *(measure for measure in (BITS_PER_BYTE, BLEU) if measure.key in keys)


def first(result: Mapping[str, float]) -> float:
    """The measure of a test's result by which models are compared.

    >>> first({"error": 2.5, "loss": 0.1})
    2.5
    """
    return result[shown(result)[0].key]


def of_events(tests: Collection[Mapping[str, object]]) -> Measure:
    """The measure by which a run's models are compared, from its events `test`."""
    keys = {key.removeprefix("center_") for test in tests for key in test}
    return ERROR if "error" in keys or not tests else shown(keys)[0]


def text(result: Mapping[str, float], name: bool = False) -> str:
    """A test's result in words, with the name of the measure if `name`.

    >>> text({"loss": 1.5, "bits_per_byte": 2.164}, name=True)
    'validation loss 1.5000 nats, 2.1640 bits per byte'
    """
    measures = shown(result)
    values = ", ".join(measure.show(result[measure.key]) for measure in measures)
    return f"{measures[0].name} {values}" if name else values
