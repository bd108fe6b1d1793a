"""What methods cost and reach on a language model: one table, one figure.

    python benchmarks/language_model.py --files FILE... --out DIR [--seeds 3] [--steps 2000]

trains the transformer of `python -m train text` with 4 workers and every method, each
worker the same number of steps of the same batch; `independent` is one worker by itself.
DIR gets what `python -m train.compare` writes: compare.md (validation loss of the center,
MB sent per worker, seconds), compare.csv, compare.json and compare.png, and
language_model.png, which leaves out the seconds: they mean something only if nothing else
ran on the machine. The same command goes on with a table that was interrupted;
`--only NAME...` trains some of the rows. `--speed` trains nothing to the end: it prints the
milliseconds of a step of each row, over whole periods in turns, median and least.
"""

import argparse
import json
import pathlib
import statistics
import sys

from side_by_side import Trainer, longest_period

from train import cli, compare
from train.cluster import devices
from train.task.experiment import Experiment


ROWS = {
    "independent": "--workers.locals 1 --method independent",
    "allreduce": "--method allreduce",
    "local-sgd": "--method local-sgd --method.period 16",
    "lsgd": "",  # as the experiment has it
    "lsgd-int8": "--method.wire int8",
    "lsgd-int4": "--method.wire int4",
    "lsgd-fragments": "--method.fragments 4",
    "diloco-30": "--method diloco --method.period 30",
    "diloco-30-int8": "--method diloco --method.period 30 --method.wire int8",
    "diloco-30-int4": "--method diloco --method.period 30 --method.wire int4",
    "diloco-32-fragments": "--method diloco --method.period 32 --method.fragments 4",
    "diloco-100": "--method diloco --method.period 100",
    "streaming-diloco": "--method diloco --method.period 100 --method.fragments 4 "
    "--method.delay 5",
    "streaming-diloco-int8": "--method diloco --method.period 100 --method.fragments 4 "
    "--method.delay 5 --method.wire int8",
    "diloco-30-muon": "--method diloco --method.period 30 --optimizer.name muon",
    "diloco-30-leader": "--method diloco-leader --method.period 30",
    "lsgd-diloco-30": "--workers.nodes 2 --workers.locals 2 --method lsgd-diloco "
    "--method.local-pull 0.5 --method.local-period 10 --method.period 30",
}


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--files", nargs="+", required=True, help="the text")
    parser.add_argument("--out", help="the folder for runs and results")
    parser.add_argument("--speed", action="store_true", help="time steps instead")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS))
    options = parser.parse_args(arguments)
    if not options.speed and options.out is None:
        parser.error("the following arguments are required: --out")
    return options


def command(options: argparse.Namespace) -> list[str]:
    """The arguments of `train.compare`."""
    found = ["text", "--out", options.out, "--seeds", str(options.seeds)]
    for name in options.only:
        found += ["--variant", f"{name}={ROWS[name]}"]
    return [*found, "--steps", str(options.steps), "--data.files", *options.files]


def speeds(options: argparse.Namespace, rounds: int = 3) -> None:
    """Prints how long a step of each row takes."""
    devices.provide(4, 1)
    taken = {}
    rows = [(name, ROWS[name].split()) for name in options.only]
    configs = {
        name: cli.parse(["text", "--data.files", *options.files, *words])
        for name, words in rows
    }
    trainers = {name: Trainer(Experiment(config)) for name, config in configs.items()}
    steps = {
        name: max(16, longest_period(config.method)) for name, config in configs.items()
    }
    for trainer in trainers.values():
        trainer.seconds_per_step(16)  # compiles
    for _ in range(rounds):
        for name, trainer in trainers.items():
            seconds = trainer.seconds_per_step(steps[name])
            taken.setdefault(name, []).append(1e3 * seconds)
    print("| method | ms a step, median | least |\n| --- | --- | --- |")
    for name, found in taken.items():
        print(f"| {name} | {statistics.median(found):.0f} | {min(found):.0f} |")


def main(arguments: list[str]) -> int:
    """Runs the benchmark."""
    options = parse(arguments)
    if options.speed:
        speeds(options)
        return 0
    if status := compare.main(command(options)):
        return status
    out = pathlib.Path(options.out)
    runs = json.loads((out / "compare.json").read_text())
    curves = {}
    for run in runs:
        measure = compare.Measure(*run.pop("measure"))
        key = run.pop("method"), run.pop("seed")
        curves[key] = compare.Curve(measure=measure, **run)
    compare.draw(curves, out / "language_model.png", against=("steps", "megabytes"))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
