"""Progress of a run: a bar on a terminal, a line every few seconds elsewhere."""

import contextlib
import datetime
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import rich.console
import rich.markup
import rich.progress

from train.process.messages import plain


SECONDS_BETWEEN_LINES = 10.0
NARROW = 60  # columns below which a terminal has no room for a bar
BAR_AND_TIME = 16  # columns that the bar and the remaining time take at least
MOST_BARS = 16  # with more workers than this, none has a bar of its own


def console(**options: Any) -> rich.console.Console:
    """A console of standard output.

    Rich prints nothing at COLUMNS=0, which containers set. It stands for an unknown width.
    """
    made = rich.console.Console(highlight=False, emoji=False, **options)
    if not all(made.size):
        made.size = rich.console.ConsoleDimensions(made.width or 80, made.height or 25)
    return made


@contextlib.contextmanager
def told(line: str) -> Generator[Callable[[str], object]]:
    """Says on standard error what takes long: a line, which a terminal shows until the end.

    Yields:
      A function to call with each part that is done. Elsewhere than on a terminal its first
      call prints the line, so that nothing precedes the message of an early error.
    """
    shown = console(stderr=True)
    if shown.is_terminal:
        with shown.status(line) as status:

            def done(part: str) -> None:
                status.update(f"{line}: {rich.markup.escape(part)} is done")

            yield done
        return
    said: list[str] = []

    def say_once(part: str) -> None:
        if not said:
            print(line, file=sys.stderr)
        said.append(part)

    yield say_once


class Progress:
    """Messages and progress, which the main process prints.

    Args:
      steps: the last step of the run.
      start: the step from which it continues.
      what: the word for a step.
      process: the number of this process; 0 is the main one.
    """

    def __init__(self, steps: int, start: int = 0, what: str = "step", process: int = 0):
        self._process = process
        self._console = console(quiet=process != 0)
        self._steps = steps
        self._what = what
        self._last_line = -float("inf")
        self._tested = ""
        self._paces = ""
        self._is_narrow = self._console.width < NARROW
        self._workers: list[rich.progress.TaskID] = []
        # With FORCE_COLOR, a file counts as a terminal: it gets colors, but no bar.
        has_bar = self._console.is_interactive and self._console.file.isatty()
        columns: list[rich.progress.ProgressColumn] = [
            rich.progress.TextColumn(what + " {task.completed}/{task.total}"),
            rich.progress.BarColumn(),
            rich.progress.TextColumn("{task.description}"),
            rich.progress.TimeRemainingColumn(compact=True),
        ]
        if self._is_narrow:
            columns = columns[::2]  # the texts alone
        self._bar = rich.progress.Progress(
            *columns,
            console=self._console,
            disable=not has_bar,
        )
        self._task = self._bar.add_task("compiling", total=steps, completed=start)

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Removes the progress bar."""
        self._bar.stop()

    def resume(self, step: int) -> None:
        """Sets the step from which the run continues."""
        self._bar.update(self._task, completed=step)

    def say(self, text: str) -> None:
        """Prints one or more lines above the bar."""
        shown = printable(text, self._console.encoding)
        self._console.print(rich.markup.escape(shown), soft_wrap=True)

    def table(self, rows: Mapping[str, str]) -> None:
        """Prints a table of names and values."""
        width = max(map(len, rows), default=0)
        for name, value in rows.items():
            self.say(f"  {name:<{width}}  {value}")

    def warn(self, text: str) -> None:
        """Prints a warning that is the same in all processes, in the main one only."""
        shown = rich.markup.escape(plain(text))
        self._console.print(f"[bold]warning:[/] {shown}", soft_wrap=True)

    def warn_here(self, text: str) -> None:
        """Prints a warning that may concern only this process."""
        if self._process == 0:
            self.warn(text)
        else:
            shown = plain(text)
            print(f"process {self._process}: warning: {shown}", file=sys.stderr)

    def tested(self, result: str) -> None:
        """Sets the test result that is shown beside the progress."""
        self._tested = result

    def workers(self, text: str, steps: Sequence[int]) -> None:
        """Sets the progress of asynchronous workers. If they are few, each has a bar.

        Args:
          text: shown beside the progress.
          steps: steps that each worker has taken.
        """
        self._paces = text
        if len(steps) > MOST_BARS:
            return
        if not self._workers:
            self._workers = [
                self._bar.add_task(f"worker {i}", total=self._steps)
                for i in range(len(steps))
            ]
        for bar, count in zip(self._workers, steps):
            self._bar.update(bar, completed=count)

    def show(self, step: int, loss: float | None, steps_per_second: float | None) -> None:
        """Shows the step, the loss, and the pace if it is known."""
        loss_text = "" if loss is None else f"loss {loss:.4f}"
        pace = f"{steps_per_second:.1f} {self._what}s/s" if steps_per_second else ""
        parts = [loss_text, self._tested, pace, self._paces]
        text = ", ".join(filter(None, parts))
        # rich would shorten the step count too if the text did not fit.
        others = len(f"{self._what} {step}/{self._steps} ")
        others += 0 if self._is_narrow else BAR_AND_TIME
        shown = text[: max(0, self._console.width - others)]
        self._bar.update(self._task, completed=step, description=shown)
        now = time.monotonic()
        if self._bar.disable and now - self._last_line >= SECONDS_BETWEEN_LINES:
            self._last_line = now
            if steps_per_second:
                left = round((self._steps - step) / steps_per_second)
                text += f", {datetime.timedelta(seconds=left)} left"
            where = f"{self._what} {step}/{self._steps}"
            self.say(f"{where}: {text}" if text else where)


def printable(text: str, encoding: str) -> str:
    """The text with question marks for characters that a terminal cannot show or obeys.

    >>> printable("é\\x1b[2J", "latin-1"), printable("é", "ascii")
    ('é?[2J', '?')
    """
    kept = "".join(c if c.isprintable() or c in "\n\t" else "?" for c in text)
    return kept.encode(encoding, "replace").decode(encoding)
