"""What methods cost and reach on a language model: one table, one figure.

    python benchmarks/language_model.py --files FILE... --out DIR [--seeds 3] [--steps 2000]

trains the transformer of `python -m train text` with 4 workers and every method, each
worker the same number of steps of the same batch; `independent` is one worker by itself.
DIR gets what `python -m train.compare` writes: compare.md (validation loss of the center,
MB sent per worker, seconds), compare.csv, compare.json and compare.png. The same command
goes on with a table that was interrupted; `--only NAME...` trains some of the rows.
"""

import argparse
import sys

from train.tools import compare


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


def command(arguments: list[str]) -> list[str]:
    """The arguments of `train.compare`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--files", nargs="+", required=True, help="the text")
    parser.add_argument("--out", required=True, help="the folder for runs and results")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS))
    options = parser.parse_args(arguments)
    found = ["text", "--out", options.out, "--seeds", str(options.seeds)]
    for name in options.only:
        found += ["--variant", f"{name}={ROWS[name]}"]
    return [*found, "--steps", str(options.steps), "--data.files", *options.files]


if __name__ == "__main__":
    sys.exit(compare.main(command(sys.argv[1:])))
