"""The trainer on a slow link: exchanges that steps wait for, and those that travel beside.

Command:   sudo "$(which python)" benchmarks/trainer_beside.py --rate 10mbit
Hardware:  any CPU; Linux, root, iproute2: 2 hosts are network namespaces on one bridge
Prints:    for each form of the exchange the seconds of training, in all and beside those of
           workers that never exchange, the seconds in which training waited for messages,
           and the seconds on the clock with start, compilation and tests; the medians of
           all rounds, with the least and the largest in brackets

Each run is `python -m train text` on both hosts. The forms take turns, and one round before
the first one fills the cache of compiled programs.
"""

import argparse
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from limited_hosts import PORT, Hosts, limited_hosts
from usage import head, parser, row

from train.metrics import log


PROCESSES = 2
DILOCO = "--method diloco --method.period 40"
FORMS = {
    "none": "--method independent",
    "waits": DILOCO,
    "in the step": f"{DILOCO} --method.delay 30 --beside False",
    "beside, the default": f"{DILOCO} --method.delay 30",
}


def command(
    words: str, folder: pathlib.Path, options: argparse.Namespace, hosts: Hosts, i: int
) -> list[str]:
    """Returns the command of host i."""
    return [
        *(sys.executable, "-m", "train", "text"),
        *("--steps", str(options.steps)),
        *("--run-dir", str(folder)),
        *("--distributed.coordinator", f"{hosts.address(0)}:{PORT}"),
        *("--distributed.num-processes", str(PROCESSES)),
        *("--distributed.process-id", str(i)),
        *words.split(),
        *options.rest,
    ]


def run(
    words: str, folder: pathlib.Path, options: argparse.Namespace, hosts: Hosts
) -> dict[str, float]:
    """Trains once. Returns the seconds of training, of waiting, and on the clock."""
    begun = time.monotonic()
    with open(f"{folder}.txt", "w") as printed:
        processes = [
            hosts.start(
                i,
                command(words, folder, options, hosts, i),
                stdout=printed,
                stderr=subprocess.STDOUT,
            )
            for i in range(PROCESSES)
        ]
        statuses = [process.wait() for process in processes]
    clock = time.monotonic() - begun
    if any(statuses):
        print(pathlib.Path(printed.name).read_text(), file=sys.stderr)
        sys.exit("error: a host has failed; its output is above")
    events = log.read(folder)
    waited = events["train"][-1].get("exchange_wait_s", 0.0)
    return {"training": events["end"][-1]["seconds"], "waited": waited, "clock": clock}


def summary(values: list[float]) -> str:
    """The median, and the least and the largest value."""
    middle = statistics.median(values)
    return f"{middle:.1f} ({min(values):.1f} to {max(values):.1f})"


def main() -> None:
    """Runs the benchmark."""
    words = parser(__doc__)
    words.add_argument("--rate", default="10mbit", help="of each link as tc writes it")
    words.add_argument("--steps", type=int, default=400)
    words.add_argument("--rounds", type=int, default=3)
    words.add_argument("--only", nargs="+", choices=FORMS, default=list(FORMS))
    words.add_argument("--out", type=pathlib.Path, help="keeps the run folders there")
    options, options.rest = words.parse_known_args()
    found: dict[str, list[dict[str, float]]] = {name: [] for name in options.only}
    with tempfile.TemporaryDirectory() as temporary:
        out = options.out or pathlib.Path(temporary)
        out.mkdir(parents=True, exist_ok=True)
        with limited_hosts(PROCESSES, options.rate) as hosts:
            for turn in range(options.rounds + 1):
                for name, own in found.items():
                    folder = out / f"{turn}-{name.replace(' ', '-').replace(',', '')}"
                    own.append(run(FORMS[name], folder.resolve(), options, hosts))
    head("exchange", "training, s", "times", "waited, s", "on the clock, s")
    quiet = statistics.median(each["training"] for each in found[options.only[0]][1:])
    for name, runs in found.items():
        training = [each["training"] for each in runs[1:]]
        waited = statistics.median(each["waited"] for each in runs[1:])
        clock = [each["clock"] for each in runs[1:]]
        times = f"{statistics.median(training) / quiet:.2f}"
        row(name, summary(training), times, f"{waited:.1f}", summary(clock))


if __name__ == "__main__":
    main()
