"""Progress of a run on a terminal and in a file."""

import functools
import io
import sys
import time

import pytest
import rich.console

from train.cluster.session import Session
from train.metrics.progress import Progress, told


class Screen(io.StringIO):
    """The output to a terminal."""

    def isatty(self):
        return True


def written(progress):
    """What a run with a bar, a message and a warning writes."""
    with progress:
        progress.tested("test error 12.34 %")
        progress.show(12_345, 1.2345, 100.0)
        progress.say("the last line of a run")
        progress.warn("unusual")
    return progress._console.file.getvalue()


@pytest.mark.parametrize("columns", [0, 24, 40, 60, 80, 120])
def test_a_terminal_of_any_width_shows_the_steps_in_one_line(columns, monkeypatch):
    terminal = functools.partial(
        rich.console.Console,
        file=Screen(),
        force_terminal=True,
        width=columns,
        height=min(columns, 25),
    )
    monkeypatch.setattr(rich.console, "Console", terminal)
    text = written(Progress(100_000))
    assert any("step 12345/100000" in line for line in text.splitlines())
    assert "the last line of a run" in text and "unusual" in text


@pytest.mark.parametrize(
    "screen, variables",
    [
        (io.StringIO, {"COLUMNS": "0"}),
        (io.StringIO, {"FORCE_COLOR": "1"}),
        (Screen, {"TERM": "dumb"}),
    ],
)
def test_a_line_takes_the_place_of_a_bar(screen, variables, monkeypatch):
    """In a file, even one that counts as a terminal, and on a terminal without a cursor."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.stdout", screen())
    lines = written(Progress(100_000)).splitlines()
    assert len(lines) == 3 and lines[0].startswith("step 12345/100000: loss 1.2345, ")
    assert lines[1] == "the last line of a run" and lines[2].endswith(" unusual")


def test_a_terminal_shows_for_what_one_waits(monkeypatch):
    monkeypatch.setattr("sys.stderr", Screen())
    with told("simulating") as tell:
        tell("local SGD, every 8 steps [int8]")
        time.sleep(0.2)  # the line is written a few times a second
    assert "simulating: local SGD, every 8 steps [int8] is done" in sys.stderr.getvalue()


def test_names_of_files_cannot_write_on_the_screen(capsys):
    """Images of others may have any names."""
    name = "a\x1b]0;t\x07\nwarning: [bold]:cat:\udcff.jpeg"
    shown = r"a\x1b]0;t\x07\nwarning: [bold]:cat:\udcff.jpeg is left out"
    for process in (0, 1):
        Progress(10, process=process).warn_here(f"{name} is left out")
    Session().leave(2, f"{name} is left out")
    captured = capsys.readouterr()
    assert captured.out == f"warning: {shown}\n"
    errors = captured.err.splitlines()
    assert errors == [f"process 1: warning: {shown}", f"error: {shown}"]
