"""Which checkpoints are kept."""

import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from train.run.reading import notes_of


class KeepLatestAndFinite:
    """Orbax's policy: keeps the latest ones, and the latest one with finite losses.

    Without the second a run that diverges, and saves often, would soon have no checkpoint
    left from which it could go on.

    Args:
      folder: of the checkpoints.
      keep: how many of the latest ones.
    """

    def __init__(self, folder: pathlib.Path, keep: int):
        self._folder, self._keep = folder, keep
        self._finite: dict[int, bool] = {}  # what is known of each step

    def note(self, step: int, finite: bool) -> None:
        """Notes whether a checkpoint that is about to be written has finite losses."""
        self._finite[step] = finite

    def latest_finite(self, steps: Iterable[int]) -> int | None:
        """The latest of the steps whose checkpoint has finite losses, if any has."""
        return max(filter(self._is_finite, steps), default=None)

    def _is_finite(self, step: int) -> bool:
        if step not in self._finite:
            self._finite[step] = bool(notes_of(self._folder, step).get("finite", True))
        return self._finite[step]

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Which of the checkpoints, from the oldest to the latest, are kept."""
        steps = [checkpoint.step for checkpoint in checkpoints]
        kept = {*steps[-self._keep :], self.latest_finite(steps)}
        return [step in kept for step in steps]
