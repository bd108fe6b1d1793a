"""Helpers for the tests of landscapes."""

import dataclasses
import hashlib

import numpy as np
import tiny

from paper import __main__ as paper
from paper.landscape.compute import Landscape, PullSteps
from paper.landscape.loss import Map
from paper.landscape.saved_run import SavedRun


SMALL = dataclasses.replace(tiny.SMALL, test_every=12)
QUICK = {"grid": 3, "images": 32}


def draw(arguments):
    """Runs `python -m paper landscape` and returns its exit status."""
    return paper.main(["landscape", *arguments])


def but(saved, **changes):
    """Returns a copy of a saved run with some attributes changed."""
    other = object.__new__(SavedRun)
    other.__dict__.update(saved.__dict__ | changes)
    return other


def contents(folder):
    """Returns a hash of every file in a folder."""
    return {
        str(path.relative_to(folder)): hashlib.md5(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def landscape_of(values, path, marks):
    steps = np.arange(max(1, len(path)))
    return Landscape(
        *("title", "x", "y", 0, np.linspace(-1, 1, 3), np.linspace(-1, 1, 3)),
        maps=[Map("train", 9, values, values), Map("test", 9, values, values)],
        marks=marks,
        positions=np.array([[0, 0, 0], [np.nan] * 3]),
        steps=steps,
        paths=np.asarray(path, float).reshape(-1, 1, 3),
        pulls=[PullSteps("pull", steps[1:])],
    )
