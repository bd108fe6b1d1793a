"""Progress of a run on a terminal."""

import functools
import io

import pytest
import rich.console

from train.metrics.progress import Progress


@pytest.mark.parametrize("columns", [24, 40, 60, 80, 120])
def test_a_terminal_of_any_width_shows_the_steps_in_one_line(columns, monkeypatch):
    terminal = functools.partial(
        rich.console.Console, file=io.StringIO(), force_terminal=True, width=columns
    )
    monkeypatch.setattr(rich.console, "Console", terminal)
    progress = Progress(100_000)
    progress.tested("test error 12.34 %")
    with progress:
        progress.show(12_345, 1.2345, 100.0)
    lines = progress._console.file.getvalue().splitlines()
    assert any("step 12345/100000" in line for line in lines)
