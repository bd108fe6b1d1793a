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
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import psutil
from ray.cluster_utils import Cluster
from usage import head, parser, row

from train.metrics import log


sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))
from trainers import PROXIES, Trainers, numbers, reported  # noqa: E402


COLUMNS = (
    "loss",
    "steps: lost at → goes on from",
    "seconds to the next step",
    "status",
    "parameters at the end",
    "processes left",
)
STEPS = 120
TRAIN = (
    "digits --workers.nodes 3 --workers.locals 2 --batch-size 4 --checkpoint-every 10 "
    f"--log-every 2 --test-every 1000 --steps {STEPS} --distributed.heartbeat-timeout 10 "
    "--ray.processes 3 --ray.devices-per-process 2 --ray.max-failures 5"
).split()


class Host(Trainers):
    """A cluster of four nodes on this machine and one run on it."""

    def __init__(self, folder: pathlib.Path, *more: str):
        self.folder = folder
        os.environ["RAY_AUTH_MODE"] = "disabled"
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        self._nodes = [self._cluster.add_node(num_cpus=1) for _ in range(4)]
        own = ["--ray.address", self._cluster.address, "--run-dir", str(folder)]
        driver = [([], dict.fromkeys(PROXIES, ""))]
        printed = folder.with_name(f"{folder.name}-printed")
        super().__init__(printed, [*TRAIN, *own, *more], driver)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._cluster.shutdown()

    def trainers(self) -> list[psutil.Process]:
        """Returns the training processes of the run, ordered by their number."""
        found = {}
        for process in psutil.process_iter():
            words = _words(process)
            if str(self.folder) in words and "train" in words[3:6]:
                (number,) = [x for x in words if x.startswith("--distributed.process-id=")]
                found[number] = process
        return [found[number] for number in sorted(found)]

    def kill(self, number: int) -> None:
        """Kills a training process."""
        self.trainers()[number].kill()

    def remove(self, count: int) -> None:
        """Kills the raylets of `count` nodes and the processes of the run on them."""
        used = [node for node in self._nodes if self._is_used(node)]
        for node in used[:count]:
            self._cluster.remove_node(node, allow_graceful=False)

    def _is_used(self, node) -> bool:
        (raylet,) = node.all_processes["raylet"]
        below = psutil.Process(raylet.process.pid).children(recursive=True)
        return any("RayTrainWorker" in " ".join(_words(x)) for x in below)

    def starts(self) -> list[dict[str, Any]]:
        """Returns the starts of the run, none before its metrics exist."""
        exist = (self.folder / "metrics.jsonl").exists()
        return log.read(self.folder).get("start", []) if exist else []

    def until_training(self) -> None:
        """Waits for a random step."""
        wanted = random.randrange(12, 40)
        self.until(lambda: reported(self.folder) >= wanted)


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _until_a_checkpoint(host: Host) -> None:
    torn = lambda: list((host.folder / "checkpoints").glob("[1-9]*.orbax-checkpoint-tmp*"))
    host.until(lambda: reported(host.folder) >= 10 and torn())


def _until_joining(host: Host) -> None:
    host.until(lambda: len(host.trainers()) == 3)
    time.sleep(random.uniform(0, 2))


def _until_compiling(host: Host) -> None:
    host.until((host.folder / "metrics.jsonl").exists)


def _twice(host: Host) -> None:
    host.kill(1)
    time.sleep(4)
    host.until(host.trainers)
    host.kill(-1)


class Loss(NamedTuple):
    """A loss, when it happens, options of the run, and the number of nodes at its end."""

    do: Callable[[Host], None]
    wait: Callable[[Host], None] = Host.until_training
    more: tuple[str, ...] = ()
    nodes: int = 3


LOSSES = {
    "kill -9 of process 1": Loss(lambda host: host.kill(1)),
    "kill -9 of process 0": Loss(lambda host: host.kill(0)),
    "kill -9 of a worker of Ray": Loss(lambda host: host.trainers()[1].parent().kill()),
    "kill -9 of process 0 while a checkpoint is written": Loss(
        lambda host: host.kill(0), _until_a_checkpoint
    ),
    "kill -9 of process 2 while the processes join": Loss(
        lambda host: host.kill(2), _until_joining
    ),
    "kill -9 of process 1 while it compiles": Loss(
        lambda host: host.kill(1), _until_compiling
    ),
    "two losses, 4 s apart": Loss(_twice),
    "SIGSTOP of process 1": Loss(lambda host: host.trainers()[1].suspend()),
    "a host is lost, another one is free": Loss(lambda host: host.remove(1)),
    "two hosts are lost, two are left": Loss(
        lambda host: host.remove(2), more=("--ray.min-processes", "2"), nodes=2
    ),
}


def measure(name: str, folder: pathlib.Path, expected: dict[str, np.ndarray]) -> tuple:
    """Measures one loss and returns its cells of the table."""
    loss = LOSSES[name]
    try:
        with Host(folder, *loss.more) as host:
            loss.wait(host)
            loss.do(host)
            lost, begun = time.monotonic(), len(host.starts())
            step = reported(folder)
            host.until(lambda: len(host.starts()) > begun)
            here = host.starts()[-1]["step"]
            host.until(lambda: reported(folder) > here)
            seconds = time.monotonic() - lost
            (status,) = host.end()
    except AssertionError as error:  # has what was printed
        print(error, file=sys.stderr)
        return name, "NOT AGAIN", "", "", "", ""
    nodes, left = host.starts()[-1]["workers"][0], len(host.trainers())
    end = f"{nodes} nodes"
    if loss.nodes == 3:
        found = numbers(folder, STEPS)
        same = all(np.array_equal(found[name], x) for name, x in expected.items())
        end = "bit-identical" if same else "DIFFERENT"
    if left or status or nodes != loss.nodes:
        print(host.printed(0), file=sys.stderr)
    return name, f"{step} → {here}", f"{seconds:.1f}", status, end, left


def main() -> None:
    """Runs the benchmark."""
    words = parser(__doc__)
    words.add_argument("--only", nargs="*", default=list(LOSSES), choices=list(LOSSES))
    options = words.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = pathlib.Path(name)
        with Host(scratch / "undisturbed") as undisturbed:
            assert undisturbed.end() == [0], undisturbed.printed(0)
        expected = numbers(scratch / "undisturbed", STEPS)
        head(*COLUMNS)
        for i, loss in enumerate(options.only):
            row(*measure(loss, scratch / str(i), expected))


if __name__ == "__main__":
    main()
