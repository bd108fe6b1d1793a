"""Methods on a language model, their cost and their loss: one table, one figure.

    python benchmarks/language_model.py --files FILE... --out DIR [--seeds 3] [--steps 2000]

trains the transformer of `python -m train text` with 4 workers and every method. Each
worker takes the same number of steps with the same batch size; `independent` is a single
worker. DIR gets the files of `python -m train.compare`: compare.md (validation loss of the
center, MB sent per worker, seconds), compare.csv, compare.json and compare.png. It also
gets language_model.png without the seconds, which mean something only on a quiet machine.
The same command resumes an interrupted table, and `--only NAME...` trains some of the rows.
`--speed` times steps instead: it prints the milliseconds per step of each row over whole
periods, in turns, median and least.
"""

import argparse
import itertools
import pathlib
import statistics
import sys

from side_by_side import Trainer, in_turns, steps_of
from usage import head, one_line_errors, parser, row

from train import cli, compare
from train.cluster import devices
from train.task.experiment import Experiment


ROWS = {
    "independent": "--workers.locals 1 --method independent",
    "independent-muon": "--workers.locals 1 --method independent --optimizer.name muon",
    "allreduce": "--method allreduce",
    "allreduce-muon": "--method allreduce --optimizer.name muon",
    "local-sgd": "--method local-sgd --method.period 16",
    "lsgd": "",  # the experiment's own method
    "lsgd-int8": "--method.wire int8",
    "lsgd-int4": "--method.wire int4",
    "lsgd-fragments": "--method.fragments 4",
    "grawa": "--method grawa --method.period 16 --method.pull 0.5",
    "diloco-30": "--method diloco --method.period 30",
    "diloco-30-int8": "--method diloco --method.period 30 --method.wire int8",
    "diloco-30-int4": "--method diloco --method.period 30 --method.wire int4",
    "sparse-diloco-30": "--method sparse-diloco --method.period 30",
    "diloco-32-fragments": "--method diloco --method.period 32 --method.fragments 4",
    "diloco-100": "--method diloco --method.period 100",
    "streaming-diloco": "--method diloco --method.period 100 --method.fragments 4 "
    "--method.delay 5",
    "streaming-diloco-int8": "--method diloco --method.period 100 --method.fragments 4 "
    "--method.delay 5 --method.wire int8",
    "diloco-30-muon": "--method diloco --method.period 30 --optimizer.name muon",
}


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parses the command line."""
    words = parser(__doc__)
    words.add_argument("--files", nargs="+", required=True, help="files of the text")
    words.add_argument("--out", help="folder for runs and results")
    words.add_argument("--speed", action="store_true", help="time steps instead")
    words.add_argument("--seeds", type=int, default=3)
    words.add_argument("--steps", type=int, default=2000)
    words.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS))
    options = words.parse_args(arguments)
    if not options.speed and options.out is None:
        words.error("the following arguments are required: --out")
    return options


def command(options: argparse.Namespace) -> list[str]:
    """Returns the arguments of `train.compare`."""
    found = ["text", "--out", options.out, "--seeds", str(options.seeds)]
    for name in options.only:
        found += ["--variant", f"{name}={ROWS[name]}"]
    return [*found, "--steps", str(options.steps), "--data.files", *options.files]


def speeds(options: argparse.Namespace, rounds: int = 3) -> None:
    """Prints the milliseconds per step of each row."""
    devices.provide(4, 1)
    rows = [(name, ROWS[name].split()) for name in options.only]
    with one_line_errors():
        configs = {
            name: cli.parse(["text", "--data.files", *options.files, *words])
            for name, words in rows
        }
        trainers = {name: Trainer(Experiment(config)) for name, config in configs.items()}
    steps = {name: steps_of(config.method, 16) for name, config in configs.items()}
    head("method", "ms a step, median", "least")
    for name, found in in_turns(trainers, rounds, steps).items():
        row(name, f"{statistics.median(found):.0f}", f"{min(found):.0f}")


def main(arguments: list[str]) -> int:
    """Runs the benchmark."""
    options = parse(arguments)
    if options.speed:
        speeds(options)
        return 0
    if status := compare.main(command(options)):
        return status
    out = pathlib.Path(options.out)
    keys = itertools.product(options.only, range(options.seeds))
    curves = {(name, seed): compare.read(out / f"{name}-{seed}") for name, seed in keys}
    compare.draw(curves, out / "language_model.png", against=("steps", "megabytes"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
