"""python -m paper landscape RUN: the loss around a worker and its leaders.

    python -m paper landscape RUN [--step N] [--worker N] [--grid 31] [--test] [--out DIR]

takes a checkpoint of a run of any method and draws the training loss over the plane through
one worker, the leader of its node and the leader of all (for methods without leaders: the
center and the best worker), and the worker's trajectory since the checkpoint before.
The trajectory is retraced step by step, which gives the same parameters to the bit. It does
not lie in the plane; how far off it is at every step is drawn as well.

The loss is that of the network as it is tested, over a fixed set of training images. Batch
statistics are those of the very images at every point of the plane.

Writes landscape.png and landscape.npz (the grid, the trajectory, all positions) into the
run folder, and changes nothing else there.
"""

import dataclasses
import pathlib
from collections.abc import Callable, Sequence
from typing import BinaryIO

import numpy as np
import tyro

import lsgd_jax as lj
from paper import output
from paper.landscape import plots, results
from paper.landscape.compute import compute_landscape
from paper.landscape.saved_run import SavedRun
from train import cli
from train import config as configuration
from train.run import folder as run_folder


AUTHOR = "python -m paper landscape"
AUTHORS = (AUTHOR.encode(), b"python -m train.landscape")  # the second: before 0.3


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a landscape."""

    # A run folder.
    run: tyro.conf.Positional[pathlib.Path]
    # Step of the checkpoint; by default the latest one.
    step: int | None = None
    # The worker in the middle; by default the worst one that does not lead.
    worker: int | None = None
    # Points along each side.
    grid: int = 31
    # Number of images that the loss is the mean of.
    images: int = 512
    # Whether to map the error on as many test images as well.
    test: bool = False
    # Length of the longest trajectory to retrace.
    path_steps: int = 1000
    # Width of the margin around what is shown, as a share of it.
    margin: float = 0.2
    # Folder of the data; by default where the run found them.
    data_dir: str | None = None
    # Folder for the results; by default the run folder.
    out: pathlib.Path | None = None

    def __post_init__(self):
        lj.checks.check_positive_int("images", self.images)
        for name, least in (("grid", 2), ("path_steps", 0), ("margin", 0)):
            value = getattr(self, name)
            if not least <= value < np.inf:
                raise ValueError(f"`{name}` must be at least {least}, got {name}={value}")


def files_in(out: pathlib.Path) -> tuple[pathlib.Path, pathlib.Path]:
    """The files to write, figure and arrays, in a folder that is made if need be.

    Raises:
      ValueError: one is there and not from this command, or the folder cannot be made.
    """
    files = out / "landscape.png", out / "landscape.npz"
    output.make(out)
    for path in files:
        if path.exists() and not any(x in path.read_bytes() for x in AUTHORS):
            raise ValueError(
                f"{path} is there and not from this command; choose another folder "
                "with --out"
            )
    return files


def write(path: pathlib.Path, fill: Callable[[BinaryIO], None]) -> None:
    """Writes a file whole or not at all."""
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
    say = lambda line: print(line, flush=True)
    options = cli.run(Options, arguments, AUTHOR, description=__doc__)
    configuration.read(options.run / run_folder.CONFIG)  # before any folder is made
    figure, arrays = files_in(options.out or options.run)
    warn = lambda line: say(f"warning: {line}")
    run = SavedRun(options.run, options.step, options.data_dir, warn)
    landscape = compute_landscape(run, options, say)
    write(arrays, lambda file: results.save(landscape, file, AUTHOR))
    write(figure, lambda file: plots.draw(landscape, file, AUTHOR))
    print(figure, arrays, sep="\n")
    return 0
