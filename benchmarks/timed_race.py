"""Seconds of training to a test error on slow links, timed from the first step on.

    sudo "$(which python)" benchmarks/timed_race.py --data.dir CIFAR --error 55 \\
        --rate 10mbit --out RACE [--only diloco-16 allreduce ...] [options of train]

Hardware:  any CPU; Linux, root, iproute2: 4 hosts are network namespaces on one bridge
Prints:    steps, seconds of training, and seconds on the clock, of each method

Each host runs `python -m train cifar10-cnn7` with the settings and the learning rate at
which the method was best in `races.py`. A run ends after the first test at which the center
is at the error; steps and seconds are interpolated between this test and the one before.
The trainer's stopwatch counts the training: not the compilation, and not the tests, in
which all hosts share the processors of this machine. The clock on the wall counts both,
from the start of the processes to that test.
"""

import argparse
import math
import os
import pathlib
import signal
import sys
import time

from limited_hosts import PORT, Hosts, limited_hosts
from time_to_error import crossing
from usage import head, parser, row

from train.metrics import log


WORKERS = 4
# The methods of the race without momentum, with the rate at which each was best.
BEST = {
    "diloco-16": "--method diloco --method.period 16 --optimizer.learning-rate 0.025",
    "streaming-int8-16": "--method diloco --method.period 16 --method.fragments 4 "
    "--method.delay 2 --method.wire int8 --optimizer.learning-rate 0.025",
    "lsgd-16": "--method lsgd --method.local-pull 0.1 --method.global-pull 0 "
    "--method.local-period 16 --optimizer.learning-rate 0.025",
    "local-sgd-16": "--method local-sgd --method.period 16 --optimizer.learning-rate 0.025",
    "allreduce": "--method allreduce --optimizer.learning-rate 0.05",
}


def command(
    name: str, options: argparse.Namespace, rest: list[str], hosts: Hosts, i: int
) -> list[str]:
    """Returns the command of host i, with further options of the trainer."""
    return [
        *(sys.executable, "-m", "train", "cifar10-cnn7"),
        *("--batch-size", "32"),
        *("--steps", str(options.steps)),
        *("--test-every", str(options.test_every)),
        *("--run-dir", str(folder_of(name, options))),
        *("--distributed.coordinator", f"{hosts.address(0)}:{PORT}"),
        *("--distributed.num-processes", str(WORKERS)),
        *("--distributed.process-id", str(i)),
        *BEST[name].split(),
        *rest,
    ]


def folder_of(name: str, options: argparse.Namespace) -> pathlib.Path:
    """Returns the run folder of a method."""
    return pathlib.Path(options.out).resolve() / name


def reached(error: float, folder: pathlib.Path, measure: str) -> float:
    """Returns the 'step' or the 'seconds' at which a run has come to an error, or inf."""
    if not (folder / log.METRICS).exists():
        return math.inf
    tests = log.read(folder).get("test", [])
    errors = [test["center_error"] for test in tests]
    return crossing(error, [test[measure] for test in tests], errors)


def timed(
    name: str, options: argparse.Namespace, rest: list[str], hosts: Hosts
) -> tuple[float, float, float]:
    """Trains to the error. Returns (steps, seconds of training, seconds on the clock)."""
    folder = folder_of(name, options)
    if folder.exists():
        sys.exit(f"error: {folder} is there already: name another folder with --out")
    processes = [
        hosts.start(i, command(name, options, rest, hosts, i), stdout=sys.stderr)
        for i in range(WORKERS)
    ]
    begun = time.monotonic()
    try:
        while math.isinf(reached(options.error, folder, "step")):
            if any(process.poll() is not None for process in processes):
                break
            time.sleep(0.2)
        clock = time.monotonic() - begun
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # to save would take minutes here
        statuses = [process.wait() for process in processes]
    if any(status not in (0, -signal.SIGKILL) for status in statuses):
        sys.exit("error: a host has failed; its output is above")
    steps = reached(options.error, folder, "step")
    return steps, reached(options.error, folder, "seconds"), clock


def main() -> None:
    """Runs the benchmark."""
    words = parser(__doc__)
    words.add_argument("--out", required=True, metavar="DIR")
    words.add_argument("--error", type=float, default=55.0, help="in percent")
    words.add_argument("--rate", default="10mbit", help="of each link as tc writes it")
    words.add_argument("--steps", type=int, default=768, help="after which a run gives up")
    words.add_argument("--test-every", type=int, default=32)
    words.add_argument("--only", nargs="+", choices=BEST, default=list(BEST))
    options, rest = words.parse_known_args()
    head("method, period", "steps", "seconds of training", "seconds on the clock")
    with limited_hosts(WORKERS, options.rate) as hosts:
        for name in options.only:
            steps, training, clock = timed(name, options, rest, hosts)
            row(name, f"{steps:.0f}", f"{training:.1f}", f"{clock:.1f}")


if __name__ == "__main__":
    main()
