"""The example that survives a lost node: processes are killed for good, the rest go on."""

import importlib.util
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import lsgd_jax as lj


ROOT = pathlib.Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "survive_a_lost_node.py"
LIMIT_S = 150  # for each run
NODES, LOCALS, STEPS = 3, 2, 10


class Nodes:
    """The example in three processes, which are all gone at the end."""

    def __init__(self, folder, rounds):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
        environment |= {
            "PYTHONPATH": str(ROOT),
            "JAX_PLATFORMS": "cpu",
            "JAX_NUM_CPU_DEVICES": str(LOCALS),
        }
        self._until = time.monotonic() + LIMIT_S
        self._logs = [folder / f"{i}.txt" for i in range(NODES)]
        self.processes = []
        for i, log in enumerate(self._logs):
            command = f"--coordinator 127.0.0.1:{port} --num-processes {NODES}"
            command += f" --process-id {i} --timeout 6 --round-steps {STEPS}"
            command += f" --rounds {rounds}"
            with log.open("w") as output:
                process = subprocess.Popen(
                    [sys.executable, EXAMPLE, *command.split()],
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                )
            self.processes.append(process)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()

    def output(self, i):
        return self._logs[i].read_text()

    def wait_for(self, pattern, i=0):
        """Returns when process i has written it."""
        while not re.search(pattern, self.output(i)):
            assert self.processes[i].poll() is None, self.output(i)
            assert time.monotonic() < self._until, self.output(i)
            time.sleep(0.05)

    def status(self, i):
        """The exit status of process i."""
        return self.processes[i].wait(max(1, self._until - time.monotonic()))

    def losses(self, i):
        """[round, loss] as process i has written them."""
        found = re.findall(r"round (\d+), loss (\S+),", self.output(i))
        return np.array(found, np.float64)

    def lost(self, i):
        """Which processes were lost after which round, by process i."""
        found = re.findall(r"lost \[(\d+)\] after round (\d+)", self.output(i))
        return [(int(process), int(after)) for process, after in found]


def example():
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("survive", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def expected(lost, rounds):
    """The loss of each round: one process, and nodes taken out after the rounds said."""
    train_step, tx, init = (getattr(example(), x) for x in ("train_step", "TX", "init"))
    grid = lambda n: lj.Workers(n, LOCALS, devices=jax.devices()[: n * LOCALS])
    nodes, workers, losses = list(range(NODES)), grid(NODES), []
    step = workers.map(train_step)
    params = workers.replicate(init(jax.random.key(1)))
    state = params, workers.map(tx.init)(params)
    for done in range(rounds):
        for node in [node for node, after in lost if after == done]:
            rows = np.arange(workers.num_workers).reshape(-1, LOCALS)
            rows = np.delete(rows, nodes.index(node), axis=0).ravel()
            kept = lj.resize(workers.fetch(state), rows)
            nodes.remove(node)
            workers = grid(len(nodes))
            state, step = workers.put(kept), workers.map(train_step)
        for t in range(done * STEPS, (done + 1) * STEPS):
            first = t * workers.num_workers
            seeds = np.arange(first, first + workers.num_workers, dtype=np.uint32)
            *state, loss = step(*state, workers.put(seeds))
        losses.append(float(workers.fetch(loss).mean()))
    return losses


@pytest.mark.parametrize(
    "signals",
    [
        {1: signal.SIGKILL},
        pytest.param({1: signal.SIGKILL, 2: signal.SIGTERM}, marks=pytest.mark.slow),
    ],
    ids=["one", "two"],
)
def test_the_nodes_left_train_on_as_if_the_lost_ones_had_been_taken_out(signals, tmp_path):
    rounds = 100 * len(signals)
    with Nodes(tmp_path, rounds) as nodes:
        nodes.wait_for("round 3,")
        for victim, how in signals.items():
            nodes.processes[victim].send_signal(how)
            assert nodes.status(victim) == -how
            nodes.wait_for(rf"lost \[{victim}\]")
        left = [i for i in range(NODES) if i not in signals]
        assert [nodes.status(i) for i in left] == [0] * len(left), nodes.output(left[-1])
        lost = nodes.lost(0)
        losses = [nodes.losses(i) for i in left]
    assert [victim for victim, _ in lost] == list(signals)
    last = lost[-1][1]
    assert 3 <= lost[0][1] <= last < rounds
    assert losses[0][:, 0].tolist() == list(range(1, rounds + 1))
    for others in losses[1:]:
        np.testing.assert_array_equal(others, losses[0])
    right = expected(lost, last + 5)
    np.testing.assert_allclose(losses[0][: last + 5, 1], right, rtol=1e-4)


def test_nobody_survives_process_0(tmp_path):
    with Nodes(tmp_path, 10**6) as nodes:
        nodes.wait_for("round 1,")
        nodes.processes[0].kill()
        assert all(nodes.status(i) != 0 for i in range(NODES))
