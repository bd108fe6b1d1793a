"""Seconds until workers step on after one of them was killed, and until it is back.

Command:   python benchmarks/lost_worker.py [--processes 3] [--minutes 5] [--seed 0]
Hardware:  any CPU
Prints:    how many processes were killed, one or two at a time, and what became of the
           others: the longest step of each after a kill, medians and the largest; the
           seconds from the start of a process until it steps; whether all workers that
           live have had the same anchor after each exchange

Each process is a worker, which trains dense layers with DiLoCo (`--period`, `--delay`) and
takes at least `--step-ms` for a step. Process 0, which holds jax's coordination service, is
never killed. The victims are killed at random times (SIGKILL), and started again after up
to `--away` seconds. jax calls a process lost after `--heartbeat` seconds of silence.
"""

import argparse
import contextlib
import json
import pathlib
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import zlib

from usage import head, one_line_errors, parser, row


WIDTHS = [256, 512, 512, 128]  # of the layers of a network
SPARE = 16  # CPU devices beside the one that trains
ENDING_S = 180.0  # until all processes have ended after the last kill


def add_options(words: argparse.ArgumentParser) -> None:
    """Adds the options of processes that are killed."""
    words.add_argument("--processes", type=int, default=3)
    words.add_argument("--minutes", type=float, default=5, help="of kills")
    words.add_argument("--seed", type=int, default=0, help="of the kills")
    words.add_argument("--away", type=float, default=10, help="seconds at most")
    words.add_argument("--every", type=float, default=20, help="seconds between kills")
    words.add_argument("--period", type=int, default=20, help="steps between exchanges")
    words.add_argument("--delay", type=int, default=10, help="steps until a target lands")
    words.add_argument("--heartbeat", type=int, default=5, help="seconds of silence")


def checked(options: argparse.Namespace) -> argparse.Namespace:
    """The options, of at least two processes."""
    if options.processes < 2:
        raise ValueError(f"--processes must be at least 2, got {options.processes}")
    return options


def parse(args: list[str] | None = None) -> argparse.Namespace:
    words = parser(__doc__)
    add_options(words)
    words.add_argument("--step-ms", type=float, default=50)
    # Of a process that this program starts.
    words.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    words.add_argument("--address", help=argparse.SUPPRESS)
    words.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    return checked(words.parse_args(args))


# A worker


def train(options: argparse.Namespace) -> None:
    """Trains until the file `end` names the last step, and notes each step."""
    begun = time.time()
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    import lsgd_jax as lj

    jax.config.update("jax_num_cpu_devices", 1 + SPARE)
    jax.config.update("jax_enable_recoverability", True)
    jax.distributed.initialize(
        options.address,
        options.processes,
        options.worker,
        cluster_detection_method="deactivate",
        heartbeat_timeout_seconds=options.heartbeat,
    )
    optimizer = optax.adamw(1e-3)

    def loss_of(params, x, y):
        for layer in params[:-1]:
            x = jax.nn.relu(x @ layer)
        return jnp.square(x @ params[-1] - y).mean()

    def update(state, x, y):
        params, opt_state = state
        loss, grads = jax.value_and_grad(loss_of)(params, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), loss

    normal = np.random.default_rng(0).normal
    pairs = zip(WIDTHS, WIDTHS[1:])
    params = [jnp.float32(normal(size=size) / size[0] ** 0.5) for size in pairs]
    method = lj.diloco(options.period, delay=options.delay)
    step = lj.around(update, method, params=0)
    workers = lj.Workers(nodes=1, locals=options.processes)
    run = workers.loop(step, donate=0, beside=True, min_workers=1)
    state = workers.replicate(step.init((params, optimizer.init(params))))
    state = run.begin(state)
    path = options.folder / f"{options.worker}-{begun:.6f}"
    with path.open("w", buffering=1) as notes:
        while run.steps < last_step(options.folder):
            draw = np.random.default_rng([options.worker, run.steps]).normal
            shapes = (1, 32, WIDTHS[0]), (1, 32, WIDTHS[-1])
            batch = [draw(size=shape).astype(np.float32) for shape in shapes]
            before = time.time()
            state, loss = run(state, *workers.put_owned(batch))
            jax.block_until_ready(loss)
            time.sleep(max(0.0, options.step_ms / 1000 - (time.time() - before)))
            note = {"step": run.steps, "time": time.time(), "live": run.num_workers}
            if run.steps % options.period == 0:
                # λ is 1, so at a landing each worker has the anchor itself.
                here = jax.tree.leaves(state.state[0])
                data = [np.asarray(x.addressable_data(0)).tobytes() for x in here]
                note["anchor"] = zlib.crc32(b"".join(data))
            print(json.dumps(note), file=notes)
    run.close()


def last_step(folder: pathlib.Path) -> float:
    """The last step, once it is known."""
    with contextlib.suppress(OSError, ValueError):
        return int((folder / "end").read_text())
    return float("inf")


# The kills


class Processes:
    """The processes of the workers, of which each is started again and again."""

    def __init__(self, options: argparse.Namespace, folder: pathlib.Path):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._address = f"127.0.0.1:{free.getsockname()[1]}"
        self._options = options
        self._folder = folder
        self._running: dict[int, subprocess.Popen] = {}
        for worker in range(options.processes):
            self.start(worker)

    def start(self, worker: int) -> None:
        own = [
            f"--worker={worker}",
            f"--address={self._address}",
            f"--folder={self._folder}",
        ]
        printed = (self._folder / f"printed-{worker}").open("a")
        with printed:
            self._running[worker] = subprocess.Popen(
                [sys.executable, *sys.argv, *own], stdout=printed, stderr=printed
            )

    def kill(self, worker: int) -> None:
        self._running[worker].send_signal(signal.SIGKILL)
        self._running[worker].wait()

    def check(self) -> None:
        """Raises OSError if a process has ended that was not killed."""
        for worker, process in self._running.items():
            if process.poll() is not None:
                printed = (self._folder / f"printed-{worker}").read_text()
                raise OSError(f"process {worker} has ended: {printed[-2000:]}")

    def end(self) -> list[int]:
        deadline = time.monotonic() + ENDING_S
        statuses = []
        for process in self._running.values():
            try:
                statuses.append(process.wait(max(0.0, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                process.kill()
                statuses.append(process.wait())
        return statuses


def notes_of(folder: pathlib.Path, worker: int) -> list[list[dict]]:
    """The notes of each process of a worker, in their order."""
    files = sorted(folder.glob(f"{worker}-*"))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def kill_at_random(options: argparse.Namespace, processes: Processes) -> list[float]:
    """Kills and starts processes. Returns when."""
    draw = random.Random(options.seed)
    kills = []
    end = time.monotonic() + 60 * options.minutes
    while time.monotonic() < end:
        time.sleep(options.every * (0.5 + draw.random()))
        processes.check()
        count = min(draw.choice([1, 1, 1, 2]), options.processes - 1)
        victims = draw.sample(range(1, options.processes), count)
        for worker in victims:
            kills.append(time.time())
            processes.kill(worker)
        time.sleep(options.away * draw.random())
        for worker in victims:
            processes.start(worker)
    return kills


def longest_steps(notes: list[dict], kills: list[float], until: float) -> list[float]:
    """The longest step of a process in some seconds after each kill that it saw."""
    times = [note["time"] for note in notes]
    pairs = list(zip(times, times[1:]))
    found = []
    for kill in kills:
        after = [b - a for a, b in pairs if b > kill and a < kill + until]
        if after and times[0] < kill:
            found.append(max(after))
    return found


def report(options: argparse.Namespace, folder: pathlib.Path, kills: list[float]) -> bool:
    """Prints the figures. Returns whether all workers had the same anchors."""
    runs = [notes_of(folder, worker) for worker in range(options.processes)]
    stayed = longest_steps(runs[0][0], kills, options.every / 2)
    starts = [
        notes[0]["time"] - float(file.name.partition("-")[2])
        for worker in range(1, options.processes)
        for file, notes in zip(sorted(folder.glob(f"{worker}-*"))[1:], runs[worker][1:])
        if notes
    ]
    anchors: dict[int, set[int]] = {}
    for notes in (note for run in runs for note in run):
        for note in notes:
            if "anchor" in note:
                anchors.setdefault(note["step"], set()).add(note["anchor"])
    different = [step for step, found in anchors.items() if len(found) > 1]
    live = [note["live"] for note in runs[0][0]]
    head("", "")
    row("kills", len(kills))
    row("steps of process 0", runs[0][0][-1]["step"])
    row("fewest, mean workers that live", f"{min(live)}, {statistics.mean(live):.2f}")
    row("s, longest step of process 0 after a kill: median", median_of(stayed))
    row("the same, largest", f"{max(stayed, default=0):.1f}")
    row("s, from a start to the first step: median", median_of(starts))
    row("exchanges whose anchors were compared", len(anchors))
    row("of which some differed", len(different))
    return not different


def median_of(values: list[float]) -> str:
    return f"{statistics.median(values):.1f}" if values else "–"


def main() -> None:
    """Runs the benchmark, or one of its processes."""
    options = parse()
    if options.worker is not None:
        train(options)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        processes = Processes(options, folder)
        kills = kill_at_random(options, processes)
        processes.check()
        (steps, *_) = notes_of(folder, 0)
        # Two more exchanges, of all that are back by then.
        last = steps[-1]["step"] + 10 * options.period
        (folder / "end").write_text(str(last // options.period * options.period))
        statuses = processes.end()
        are_equal = report(options, folder, kills)
    row("exit statuses", " ".join(map(str, statuses)))
    sys.exit(not are_equal or any(statuses))


if __name__ == "__main__":
    with one_line_errors():
        main()
