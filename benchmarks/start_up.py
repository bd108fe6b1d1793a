"""Seconds that a start of the trainer takes: for --help, and for one step of `digits`.

    python benchmarks/start_up.py [--repetitions 5]

Each repetition runs these cases in order:

    help    python -m train --help
    usage   python -m train digits --nonsense
    no cache, first, second
            python -m train digits --steps 1: without the cache of compiled programs, with
            an empty cache, and with the cache that the case before has filled

The script prints a Markdown table of wall-clock and CPU seconds, medians (and minima), and
the median ratio to `no cache` of the same repetition. With several cores the CPU seconds
can exceed those of the wall clock. On a busy machine they are the better measure.
"""

import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

from usage import head, median, parser, row


ROOT = pathlib.Path(__file__).parents[1]
ONE_STEP = ["digits", "--steps", "1"]
CASES = ("help", "usage", "no cache", "first", "second")


def parse():
    words = parser(__doc__)
    words.add_argument("--repetitions", type=int, default=5)
    return words.parse_args()


def timed(arguments, **variables):
    """Runs the trainer and returns wall-clock seconds and CPU seconds."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)} | variables
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    begun = time.perf_counter()
    ended = subprocess.run(
        [sys.executable, "-m", "train", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    wall = time.perf_counter() - begun
    now = resource.getrusage(resource.RUSAGE_CHILDREN)
    if ended.returncode not in (0, 2):
        sys.exit(ended.stderr)
    return wall, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime


def repetition():
    """Measures each case once."""
    with tempfile.TemporaryDirectory() as folder:
        cache = {
            "JAX_COMPILATION_CACHE_DIR": f"{folder}/cache",
            "JAX_ENABLE_COMPILATION_CACHE": "true",
        }
        without = {"JAX_ENABLE_COMPILATION_CACHE": "false"}
        step = lambda name: [*ONE_STEP, "--run-dir", f"{folder}/{name}"]
        return {
            "help": timed(["--help"]),
            "usage": timed(["digits", "--nonsense"]),
            "no cache": timed(step("no-cache"), **without),
            "first": timed(step("first"), **cache),
            "second": timed(step("second"), **cache),
        }


def table(measured):
    """Prints medians (and minima) of the repetitions."""
    head("start", "wall clock, s", "CPU, s", "CPU / no cache")
    for case in CASES:
        wall, used = zip(*(each[case] for each in measured))
        ratios = [each[case][1] / each["no cache"][1] for each in measured]
        row(case, median(wall), median(used), f"{statistics.median(ratios):.2f}")


def main():
    options = parse()
    timed(["--help"])  # fills the file cache and Python's cache of bytecode
    table([repetition() for _ in range(options.repetitions)])


if __name__ == "__main__":
    main()
