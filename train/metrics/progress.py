"""What a run shows: a progress bar on a terminal, a line from time to time elsewhere."""

import sys
import time
from collections.abc import Sequence

import rich.console
import rich.markup
import rich.progress


SECONDS_BETWEEN_LINES = 10.0
NARROW = 60  # columns of a terminal that has no room for a bar
BAR_AND_TIME = 16  # columns that they take at least
MOST_BARS = 16  # workers that each have a bar


class Progress:
    """Messages and progress, shown by the main process.

    Args:
      steps: where the run ends.
      start: the step from which it goes on.
      what: what the steps are called.
      process: the number of this process; 0 is the main one.
    """

    def __init__(self, steps: int, start: int = 0, what: str = "step", process: int = 0):
        self._process = process
        self._console = rich.console.Console(quiet=process != 0, highlight=False)
        self._steps, self._what = steps, what
        self._last_line = -float("inf")
        self._tested, self._paces = "", ""
        self._is_narrow = self._console.width < NARROW
        self._workers: list[rich.progress.TaskID] = []
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn(what + " {task.completed}/{task.total}"),
            *([] if self._is_narrow else [rich.progress.BarColumn()]),
            rich.progress.TextColumn("{task.description}"),
            *([] if self._is_narrow else [rich.progress.TimeRemainingColumn(compact=True)]),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("compiling", total=steps, completed=start)

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Ends the progress bar."""
        self._bar.stop()

    def resume(self, step: int) -> None:
        """Sets the step from which the run goes on."""
        self._bar.update(self._task, completed=step)

    def say(self, text: str) -> None:
        """Prints a line, or several, above the bar."""
        shown = printable(text, self._console.encoding)
        self._console.print(rich.markup.escape(shown), soft_wrap=True)

    def warn(self, text: str) -> None:
        """Prints a warning that is the same in all processes, once."""
        self._console.print(f"[bold]warning:[/] {rich.markup.escape(text)}", soft_wrap=True)

    def warn_here(self, text: str) -> None:
        """Prints a warning that may concern this process only, whichever it is."""
        if self._process == 0:
            self.warn(text)
        else:
            print(f"process {self._process}: warning: {text}", file=sys.stderr)

    def tested(self, result: str) -> None:
        """Notes how the center was tested, to be shown beside the progress."""
        self._tested = result

    def workers(self, text: str, steps: Sequence[int]) -> None:
        """Notes how workers at their own pace are doing; of few each has a bar of its own.

        Args:
          text: to be shown beside the progress.
          steps: that each has taken.
        """
        self._paces = text
        if len(steps) > MOST_BARS:
            return
        if not self._workers:
            add = lambda i: self._bar.add_task(f"worker {i}", total=self._steps)
            self._workers = [add(i) for i in range(len(steps))]
        for bar, count in zip(self._workers, steps):
            self._bar.update(bar, completed=count)

    def show(self, step: int, loss: float | None, steps_per_second: float | None) -> None:
        """Shows how far training is, and at which pace if that is known."""
        loss_text = "" if loss is None else f"loss {loss:.4f}"
        pace = f"{steps_per_second:.1f} {self._what}s/s" if steps_per_second else ""
        parts = [loss_text, self._tested, pace, self._paces]
        text = ", ".join(filter(None, parts))
        # What is too long rich would take from the steps, too.
        others = len(f"{self._what} {step}/{self._steps} ")
        others += 0 if self._is_narrow else BAR_AND_TIME
        shown = text[: max(0, self._console.width - others)]
        self._bar.update(self._task, completed=step, description=shown)
        now = time.monotonic()
        if self._bar.disable and now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            if steps_per_second:
                text += f", {_clock((self._steps - step) / steps_per_second)} left"
            where = f"{self._what} {step}/{self._steps}"
            self.say(f"{where}: {text}" if text else where)


def printable(text: str, encoding: str) -> str:
    """The text with question marks for what a terminal cannot show or would act upon.

    >>> printable("é\\x1b[2J", "latin-1"), printable("é", "ascii")
    ('é?[2J', '?')
    """
    kept = "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)
    return kept.encode(encoding, "replace").decode(encoding)


def _clock(seconds: float) -> str:
    """h:mm:ss.

    >>> _clock(3725.2)
    '1:02:05'
    """
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
