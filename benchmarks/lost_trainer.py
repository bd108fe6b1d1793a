"""Kills processes of a trainer run at random, each of which comes back.

Command:   python benchmarks/lost_trainer.py [--processes 3] [--minutes 5] [--seed 0]
Hardware:  any CPU
Prints:    how many processes were killed, one or two at a time, and what became of the
           run: the longest step of process 0, how many processes it has told as lost and as
           come in, the validation loss, and whether all have saved the same last step

The run is `python -m train text` with DiLoCo (`--period`, `--delay`) and
`--min-workers 1`, with a test and a checkpoint every 50 steps. Process 0, which holds jax's
coordination service, is never killed; SIGTERM to it ends the run.
"""

import argparse
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

from lost_worker import Processes, add_options, checked, kill_at_random, median_of
from usage import head, one_line_errors, parser, row

from train.metrics import log
from train.process.exit_status import RESUME
from train.run.checkpoints import steps_in
from train.run.folder import CHECKPOINTS


SETTINGS = (
    "text --method diloco --min-workers 1 --workers.nodes 1 --steps 1000000 "
    "--log-every 1 --test-every 50 --checkpoint-every 50"
)
STARTING_S = 240.0  # until all processes have stepped


def parse(args: list[str] | None = None) -> argparse.Namespace:
    words = parser(__doc__)
    add_options(words)
    words.set_defaults(every=30.0, heartbeat=10)
    return checked(words.parse_args(args))


class Trainers(Processes):
    """The processes of a run, of which each is started again and again."""

    def start(self, worker: int) -> None:
        options = self._options
        settings = {
            "workers.locals": options.processes,
            "method.period": options.period,
            "method.delay": options.delay,
            "run-dir": self._folder / "run",
            "distributed.coordinator": self._address,
            "distributed.num-processes": options.processes,
            "distributed.process-id": worker,
            "distributed.heartbeat-timeout": options.heartbeat,
        }
        own = [f"--{name}={value}" for name, value in settings.items()]
        command = [sys.executable, "-m", "train", *SETTINGS.split(), *own]
        with (self._folder / f"printed-{worker}").open("a") as printed:
            self._running[worker] = subprocess.Popen(
                command, stdout=printed, stderr=printed
            )

    def wait_for_first_steps(self) -> None:
        """Waits until all processes have reported steps."""
        own = folders_of(self._folder / "run", self._options.processes)
        deadline = time.monotonic() + STARTING_S
        while not all(has_stepped(folder) for folder in own):
            self.check()
            if time.monotonic() > deadline:
                raise OSError(f"the processes have not begun in {STARTING_S:.0f} s")
            time.sleep(0.5)

    def wait_for_all(self) -> None:
        """Waits until all workers live, for some time."""
        time.sleep(2 * self._options.heartbeat)  # until losses are noticed
        deadline = time.monotonic() + STARTING_S
        wanted = self._options.processes
        while time.monotonic() < deadline and self._live() < wanted:
            self.check()
            time.sleep(0.5)

    def _live(self) -> int:
        """The number of workers that live, as process 0 reports it."""
        return log.read(self._folder / "run")["train"][-1]["workers_live"]

    def stop(self) -> list[int]:
        """Stops the run; returns the exit statuses."""
        self._running[0].send_signal(signal.SIGTERM)
        return self.end()


def folders_of(run: pathlib.Path, processes: int) -> list[pathlib.Path]:
    """The folder of each process of a run."""
    return [run, *(run / f"process-{i}" for i in range(1, processes))]


def has_stepped(folder: pathlib.Path) -> bool:
    """Whether the metrics of a process have a step."""
    return (folder / log.METRICS).exists() and "train" in log.read(folder)


def last_checkpoints(run: pathlib.Path, processes: int) -> list[int]:
    """The step of the last checkpoint of each process."""
    folders = folders_of(run, processes)
    return [max(steps_in(folder / CHECKPOINTS)) for folder in folders]


def main() -> None:
    """Runs the benchmark."""
    options = parse()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        trainers = Trainers(options, folder)
        trainers.wait_for_first_steps()
        kills = kill_at_random(options, trainers)
        trainers.wait_for_all()
        statuses = trainers.stop()
        events = log.read(folder / "run")
        last = last_checkpoints(folder / "run", options.processes)
        steps = [event["seconds"] for event in events["train"]]
        durations = [b - a for a, b in zip(steps, steps[1:])]
        told = events.get("processes", [])
        head("", "")
        row("kills", len(kills))
        row("steps of process 0", events["train"][-1]["step"])
        row("s, its steps: median", median_of(durations))
        row("the same, largest", f"{max(durations):.1f}")
        row("processes told as lost", sum(len(event["lost"]) for event in told))
        row("processes told as come in", sum(len(event["came"]) for event in told))
        row("validation loss of the last test", f"{events['test'][-1]['center_loss']:.3f}")
        row("last checkpoints", " ".join(map(str, last)))
        row("exit statuses", " ".join(map(str, statuses)))
    first, *_ = last
    are_in = [step for step, status in zip(last, statuses) if status == RESUME]
    sys.exit(statuses[0] != RESUME or set(are_in) != {first})


if __name__ == "__main__":
    with one_line_errors():
        main()
