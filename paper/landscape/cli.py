"""python -m paper landscape RUN: the loss around a worker and its leaders.

    python -m paper landscape RUN [--step N] [--worker N] [--grid 31] [--test] [--out DIR]

reads a checkpoint of a run of any method and draws the training loss over a plane, and the
trajectory of one worker since the previous checkpoint. The plane goes through this worker,
the leader of its node and the leader of all; for methods without leaders, through the
center and the best worker. The trajectory is retraced step by step, which gives
bit-identical parameters. It does not lie in the plane, so its distance from the plane is
drawn as well.

The loss is computed as in a test, over a fixed set of training images. Batch statistics are
computed from the same images at every point of the plane.

The command writes landscape.png and landscape.npz (the grid, the trajectory, all positions)
into the run folder and changes nothing else there.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import BinaryIO

import numpy as np
import tyro

import lsgd_jax as lj
from paper import output
from paper.landscape import plots
from paper.landscape.compute import compute_landscape, save
from paper.landscape.saved_run import SavedRun
from train.config import settings
from train.run import cli
from train.run import folder as run_folder


AUTHOR = "python -m paper landscape"
AUTHORS = (AUTHOR.encode(), b"python -m train.landscape")  # the latter before 0.3


@dataclasses.dataclass(frozen=True)
class LandscapeOptions:
    """The options of a landscape."""

    # A run folder.
    run: tyro.conf.Positional[pathlib.Path]
    # Step of the checkpoint. Defaults to the latest one.
    step: int | None = None
    # The worker in the middle. Defaults to the worst one that does not lead.
    worker: int | None = None
    # Points along each side.
    grid: int = 31
    # Number of images over which the loss is averaged.
    images: int = 512
    # Also draw the error on as many test images.
    test: bool = False
    # Length of the longest trajectory to retrace.
    path_steps: int = 1000
    # Width of the margin, as a share of the figure's width.
    margin: float = 0.2
    # Folder of the data. Defaults to the one that the run read.
    data_dir: str | None = None
    # Folder for the results. Defaults to the run folder.
    out: pathlib.Path | None = None

    def __post_init__(self):
        lj.checks.check_positive_int("images", self.images)
        for name, least in (("grid", 2), ("path_steps", 0), ("margin", 0)):
            value = getattr(self, name)
            if not least <= value < np.inf:
                raise ValueError(f"`{name}` must be at least {least}, got {name}={value}")


def files_in(out: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """Returns the paths of the figure and of the arrays, in a folder that it makes.

    Raises:
      ValueError: another program wrote one of them, or the folder cannot be made.
    """
    files = out / "landscape.png", out / "landscape.npz"
    output.make(out)
    for path in files:
        if path.exists() and not any(x in path.read_bytes() for x in AUTHORS):
            raise ValueError(
                f"{path} was not written by this command; choose another folder with --out"
            )
    return files


def write(path: pathlib.Path, fill: Callable[[BinaryIO], None]) -> None:
    """Writes a file completely or not at all."""
    part = path.with_name(f"{path.name}.part")
    try:
        with open(part, "wb") as file:
            fill(file)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def main(arguments: Sequence[str]) -> int:
    """Draws a landscape; returns the exit status.

    Raises:
      ValueError: wrong usage; OSError: the results cannot be written.
    """

    def say(line):
        return print(line, flush=True)

    options = cli.run(LandscapeOptions, arguments, AUTHOR, description=__doc__)
    settings.read(options.run / run_folder.CONFIG)  # before a folder is made
    figure, arrays = files_in(options.out or options.run)

    def warn(line):
        return say(f"warning: {line}")

    run = SavedRun(options.run, options.step, options.data_dir, warn)
    landscape = compute_landscape(run, options, say)
    write(arrays, lambda file: save(landscape, file, AUTHOR))
    write(figure, lambda file: plots.draw(landscape, file, AUTHOR))
    print(figure, arrays, sep="\n")
    return 0
