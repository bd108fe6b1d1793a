"""Seconds from the loss of a process or host to the next step, in lock step on Ray Train.

    python benchmarks/losses.py [--only NAME ...]

starts clusters of Ray on this machine, each of four nodes with one CPU. A run of three
processes uses three of them. Ten runs suffer one kind of loss each. Every run must end with
status 0. If the number of nodes did not change, its parameters must be bit-identical to
those of an undisturbed run. The script prints one Markdown table.
"""

import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import jax
import numpy as np
import orbax.checkpoint as ocp
import psutil
from ray.cluster_utils import Cluster
from usage import head, parser, row

from train.metrics import log


LIMIT_S = 300.0
STEPS = 120
TRAIN = (
    "digits --workers.nodes 3 --workers.locals 2 --batch-size 4 --checkpoint-every 10 "
    f"--log-every 2 --test-every 1000 --steps {STEPS} --distributed.heartbeat-timeout 10 "
    "--ray.processes 3 --ray.devices-per-process 2 --ray.max-failures 5"
).split()


class Host:
    """A cluster of four nodes on this machine and one run on it."""

    def __init__(self, folder: pathlib.Path, *more: str):
        self.folder = folder
        os.environ["RAY_AUTH_MODE"] = "disabled"
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        self.nodes = [self._cluster.add_node(num_cpus=1) for _ in range(4)]
        address = ["--ray.address", self._cluster.address]
        self._printed = folder.with_name(f"{folder.name}.txt")
        with open(self._printed, "w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "train", *TRAIN, *address, *more]
                + ["--run-dir", str(folder)],
                stdout=file,
                stderr=file,
            )

    def end(self) -> int:
        """Waits for the run, ends the cluster, and returns the run's exit status."""
        try:
            self.process.wait(LIMIT_S)
        finally:
            self.said = self._printed.read_text()
            self.process.kill()
            self._cluster.shutdown()
        return self.process.returncode

    def remove(self, count: int) -> None:
        """Kills the raylets of `count` nodes and the processes of the run on them."""
        used = [node for node in self.nodes if self._processes_of(node)]
        for node in used[:count]:
            self._cluster.remove_node(node, allow_graceful=False)

    def _processes_of(self, node) -> list[psutil.Process]:
        (raylet,) = node.all_processes["raylet"]
        below = psutil.Process(raylet.process.pid).children(recursive=True)
        return [x for x in below if "RayTrainWorker" in " ".join(_words(x))]

    def trainers(self) -> list[psutil.Process]:
        """Returns the training processes of the run, ordered by their number."""
        found = {}
        for process in psutil.process_iter():
            words = _words(process)
            if str(self.folder) in words and "train" in words[3:6]:
                (number,) = [x for x in words if x.startswith("--distributed.process-id=")]
                found[number] = process
        return [found[number] for number in sorted(found)]

    def until(self, holds: Callable[[], object]) -> None:
        """Waits for a condition; raises TimeoutError if the run ends before it holds."""
        deadline = time.monotonic() + LIMIT_S
        while not holds():
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise TimeoutError
            time.sleep(0.02)

    def step(self) -> int:
        """Returns the last step in the run's metrics, or 0."""
        try:
            events = log.read(self.folder).get("train", [])
        except OSError:
            return 0
        return max((event["step"] for event in events), default=0)


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _kill(host: Host, number: int) -> None:
    host.trainers()[number].send_signal(signal.SIGKILL)


def _while_training(do: Callable[[Host], None]) -> Callable[[Host], None]:
    def then(host: Host) -> None:
        wanted = random.randrange(12, 40)
        host.until(lambda: host.step() >= wanted)
        do(host)

    return then


def _ray_worker(host: Host) -> None:
    host.trainers()[1].parent().send_signal(signal.SIGKILL)


def _in_a_checkpoint(host: Host) -> None:
    torn = lambda: list((host.folder / "checkpoints").glob("[1-9]*.orbax-checkpoint-tmp*"))
    host.until(lambda: host.step() >= 10 and torn())
    _kill(host, 0)


def _while_joining(host: Host) -> None:
    host.until(lambda: len(host.trainers()) == 3)
    time.sleep(random.uniform(0, 2))
    _kill(host, 2)


def _while_compiling(host: Host) -> None:
    host.until((host.folder / "metrics.jsonl").exists)
    _kill(host, 1)


def _twice(host: Host) -> None:
    _kill(host, 1)
    time.sleep(4)
    host.until(host.trainers)
    host.trainers()[-1].send_signal(signal.SIGKILL)


def _stop(host: Host) -> None:
    host.trainers()[1].send_signal(signal.SIGSTOP)


# The loss, additional options of the run, the number of nodes at its end.
LOSSES: dict[str, tuple[Callable[[Host], None], tuple[str, ...], int]] = {
    "kill -9 of process 1": (_while_training(lambda host: _kill(host, 1)), (), 3),
    "kill -9 of process 0": (_while_training(lambda host: _kill(host, 0)), (), 3),
    "kill -9 of a worker of Ray": (_while_training(_ray_worker), (), 3),
    "kill -9 of process 0 while a checkpoint is written": (_in_a_checkpoint, (), 3),
    "kill -9 of process 2 while the processes join": (_while_joining, (), 3),
    "kill -9 of process 1 while it compiles": (_while_compiling, (), 3),
    "two losses, 4 s apart": (_while_training(_twice), (), 3),
    "SIGSTOP of process 1": (_while_training(_stop), (), 3),
    "a host is lost, another one is free": (
        _while_training(lambda host: host.remove(1)),
        (),
        3,
    ),
    "two hosts are lost, two are left": (
        _while_training(lambda host: host.remove(2)),
        ("--ray.min-processes", "2"),
        2,
    ),
}


def numbers(folder: pathlib.Path) -> list[np.ndarray]:
    """Returns all arrays of the last checkpoint."""
    path = (folder / "checkpoints" / str(STEPS) / "state").absolute()
    checkpointer = ocp.PyTreeCheckpointer()
    kinds = checkpointer.metadata(path).item_metadata.tree
    whole = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), kinds)
    return jax.tree.leaves(checkpointer.restore(path, restore_args=whole))


def measure(name: str, folder: pathlib.Path, expected: list[np.ndarray]) -> tuple:
    """Measures one loss and returns its cells of the table."""
    do, more, nodes = LOSSES[name]
    host = Host(folder, *more)
    try:
        do(host)
        lost, step = time.monotonic(), host.step()
        begun = len(log.read(folder).get("start", [])) if folder.exists() else 0
        again = lambda: len(log.read(folder).get("start", [])) > begun
        host.until(lambda: (folder / "metrics.jsonl").exists() and again())
        here = log.read(folder)["start"][-1]["step"]
        host.until(lambda: host.step() > here)
        seconds = time.monotonic() - lost
    except TimeoutError:
        host.end()
        print(host.said, file=sys.stderr)
        return name, "NOT AGAIN", "", "", "", ""
    status = host.end()
    grid = log.read(folder)["start"][-1]["workers"]
    if nodes == 3:
        pairs = zip(expected, numbers(folder), strict=True)
        same = all(np.array_equal(a, b) for a, b in pairs)
        end = "bit-identical" if same else "DIFFERENT"
    else:
        end = f"{grid[0]} nodes"
    left = len(host.trainers())
    if left or status or grid[0] != nodes:
        print(host.said, file=sys.stderr)
    return name, f"{step} → {here}", f"{seconds:.1f}", status, end, left


def main() -> None:
    """Runs the benchmark."""
    words = parser(__doc__)
    words.add_argument("--only", nargs="*", default=list(LOSSES), choices=list(LOSSES))
    options = words.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = pathlib.Path(name)
        undisturbed = Host(scratch / "undisturbed")
        assert undisturbed.end() == 0, undisturbed.said
        expected = numbers(scratch / "undisturbed")
        head(
            "loss",
            "steps: lost at → goes on from",
            "seconds to the next step",
            "status",
            "parameters at the end",
            "processes left",
        )
        for i, loss in enumerate(options.only):
            row(*measure(loss, scratch / str(i), expected))


if __name__ == "__main__":
    main()
