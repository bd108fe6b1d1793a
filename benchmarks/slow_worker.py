"""Steps in the same time with one slow process: LSGD in lock step and on a budget.

Command:   python benchmarks/slow_worker.py
Hardware:  any CPU; 4 processes of one worker each, the digits
Prints:    of each method the steps per second of every worker, and of all together

A process sleeps before each of its steps, in place of an accelerator's work, so that the
processes do not compete for cores. Counted from the first report to the last one.
"""

import argparse
import json
import os
import pathlib
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from typing import Any

from train.task.experiment import Experiment


PROCESSES = 4
RUN = (
    "digits --workers.nodes 2 --workers.locals 2 --batch-size 8 --method.local-period 8 "
    "--method.global-period 16 --log-every 16 --test-every 100000 --checkpoint-every 100000"
).split()


def slow_down(seconds: float) -> None:
    """Has every batch of this process come so much later."""
    batches = Experiment.batches

    def late(self, steps: range) -> Generator[Any, None, None]:
        for batch in batches(self, steps):
            yield batch
            time.sleep(seconds)  # when the next one is asked for

    Experiment.batches = late  # type: ignore


def measure(method: str, options: argparse.Namespace) -> list[float]:
    """Steps per second of each worker."""
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "run"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        processes = [
            subprocess.Popen(
                [
                    *(sys.executable, __file__, "--step", str(options.step)),
                    *("--slower", str(options.slower), "--process", str(i), "--"),
                    *(*RUN, "--method", method, "--steps", str(options.steps)),
                    *("--run-dir", str(path), "--distributed.process-id", str(i)),
                    *("--distributed.num-processes", str(PROCESSES)),
                    *("--distributed.coordinator", f"127.0.0.1:{port}"),
                ],
                stdout=subprocess.DEVNULL,
            )
            for i in range(PROCESSES)
        ]
        try:
            assert not any([process.wait() for process in processes])
        finally:
            for process in processes:
                process.kill()
        lines = (path / "metrics.jsonl").read_text().splitlines()
        events = [event for event in map(json.loads, lines) if event["kind"] == "train"]
    first, last = events[0], events[-1]
    taken = lambda event: event.get("taken", [event["step"]] * PROCESSES)
    seconds = last["seconds"] - first["seconds"]
    return [(b - a) / seconds for a, b in zip(taken(first), taken(last))]


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--step", type=float, default=0.1, help="seconds of a fast step")
    parser.add_argument("--slower", type=float, default=3.0, help="times, of process 0")
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("run", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process is not None:
        from train.__main__ import main as train

        slow_down(options.step * (1 if options.process else options.slower))
        os._exit(train(options.run))
    totals = []
    for method in ("lsgd", "budget-lsgd"):
        found = measure(method, options)
        totals.append(sum(found))
        each = ", ".join(f"{rate:.2f}" for rate in found)
        print(f"{method}: {each} steps/s, together {sum(found):.2f}", flush=True)
    print(f"on a budget {totals[1] / totals[0]:.2f} times as many steps in the same time")


if __name__ == "__main__":
    main()
