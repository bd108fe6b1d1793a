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

import argparse
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import BinaryIO, NamedTuple

import numpy as np

import lsgd_jax as lj
from paper.landscape import plots, results
from paper.landscape.compute import compute_landscape
from paper.landscape.saved_run import SavedRun
from train import compilation_cache
from train import config as configuration
from train.arguments import Parser
from train.run import folder as run_folder


AUTHOR = "python -m paper landscape"
AUTHORS = (AUTHOR.encode(), b"python -m train.landscape")  # the second: before 0.3


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options.

    Raises:
      ValueError: one that is not possible.
    """
    parser = Parser(AUTHOR, __doc__)
    add = parser.add_argument
    add("run", type=pathlib.Path, help="a run folder")
    add("--step", type=int, help="of the checkpoint (the latest one)")
    add("--worker", type=int, help="whose landscape (the worst that does not lead)")
    add("--grid", type=int, default=31, help="points along each side (31)")
    add("--images", type=int, default=512, help="images the loss is the mean of (512)")
    add("--test", action="store_true", help="also map the error on as many test images")
    add("--path-steps", type=int, default=1000, help="longest trajectory to retrace (1000)")
    add("--margin", type=float, default=0.2, help="around what is shown, a share (0.2)")
    add("--chunk", type=int, help="points per device at a time (what is quick)")
    add("--data-dir", help="where the data are (where the run found them)")
    add("--out", type=pathlib.Path, help="folder for the results (the run folder)")
    options = parser.parse_args(arguments)
    lj.checks.check_positive_int("images", options.images)
    lj.checks.check_positive_int("chunk", 1 if options.chunk is None else options.chunk)
    for name, least in (("grid", 2), ("path_steps", 0), ("margin", 0)):
        value = getattr(options, name)
        if not least <= value < np.inf:
            raise ValueError(f"`{name}` must be at least {least}, got {name}={value}")
    return options


class Files(NamedTuple):
    """What is written: the figure and the arrays."""

    figure: pathlib.Path
    arrays: pathlib.Path


def files_in(out: pathlib.Path) -> Files:
    """The files to write, in a folder that is made if need be.

    Raises:
      ValueError: one is there and not from this command, or the folder cannot be made.
    """
    files = Files(out / "landscape.png", out / "landscape.npz")
    try:
        out.mkdir(parents=True, exist_ok=True)
        for path in files:
            if path.exists() and not any(x in path.read_bytes() for x in AUTHORS):
                raise ValueError(
                    f"{path} is there and not from this command; choose another folder "
                    "with --out"
                )
    except OSError as error:
        raise ValueError(f"{out} cannot take the results: {error}") from error
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
    """Draws; the exit status is 0, 1 (not written), 2 (wrong usage), 130 (interrupted)."""
    say = lambda line: print(line, flush=True)
    try:
        options = parse(arguments)
        configuration.read(options.run / run_folder.CONFIG)  # before any folder is made
        figure, arrays = files_in(options.out or options.run)
        warn = lambda line: say(f"warning: {line}")
        compilation_cache.use()
        run = SavedRun(options.run, options.step, options.data_dir, warn)
        landscape = compute_landscape(run, options, say)
        write(arrays, lambda file: results.save(landscape, file, AUTHOR))
        write(figure, lambda file: plots.draw(landscape, file, AUTHOR))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: the results cannot be written: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    print(figure, arrays, sep="\n")
    return 0
