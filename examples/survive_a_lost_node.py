"""Training that goes on with the nodes that are left when one is lost, without a restart.

Start one process per node, each with all devices of its node; process 0 is at the
coordinator's address, and is the one that must not be lost:

    python examples/survive_a_lost_node.py --coordinator node0:8476 \\
        --num-processes 3 --process-id 0    # 1 and 2 on the others

Under Slurm these three options are left out. Every worker trains a small network of its
own, and LSGD pulls it to the leader of its node and to the leader of all. Training goes in
rounds. At the end of a round all agree (`live_devices`) on who is still there. If everybody
is, every process keeps the state after the round in its host's memory; if not, those who
are left go back to the state before the round, take the workers of their nodes from it, and
go on with these. So a lost node costs the round that it was lost in, and the wait until it
is known to be lost. An error while all are there ends all.

jax calls this part of itself experimental; see docs/clusters.md for what was tried.
"""

import argparse
import contextlib
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental import multihost_utils

import lsgd_jax as lj


def arguments() -> argparse.Namespace:
    """What was asked for on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--coordinator", help="HOST:PORT of process 0")
    parser.add_argument("--num-processes", type=int)
    parser.add_argument("--process-id", type=int)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--round-steps", type=int, default=64, help="steps in a round")
    parser.add_argument(
        "--timeout", type=int, default=30, help="seconds of silence that mean a loss"
    )
    return parser.parse_args()


TX = optax.chain(optax.sgd(0.05), lj.lsgd(local_period=4, global_period=16))


def network(params, x):
    """A layer of 32 units on top of 8 inputs; x: [batch, 8]."""
    return jnp.tanh(x @ params["hidden"]) @ params["out"]


def init(key):
    """The parameters of one worker."""
    hidden, out = jax.random.split(key)
    return {
        "hidden": jax.random.normal(hidden, (8, 32)) / 8**0.5,
        "out": jax.random.normal(out, (32, 1)) / 32**0.5,
    }


def train_step(params, state, seed):
    """One worker's step towards a network that it only sees the answers of."""
    teacher = init(jax.random.key(0))
    x = jax.random.normal(jax.random.key(seed), (64, 8))
    error = lambda params: jnp.mean((network(params, x) - network(teacher, x)) ** 2)
    loss, grads = jax.value_and_grad(error)(params)
    updates, state = TX.update(grads, state, params, value=loss)
    return lj.apply_updates(params, updates), state, loss


class Training:
    """The workers of the nodes that are there.

    Args:
      devices: of these nodes, as many on each.
      kept: the workers' state, on the host; None: they are at the beginning.
    """

    def __init__(self, devices, kept=None):
        self.nodes = sorted({device.process_index for device in devices})
        self.workers = lj.Workers(len(self.nodes), devices=devices)
        self._step = self.workers.map(train_step)
        if kept is None:
            params = self.workers.replicate(init(jax.random.key(1)))
            self._state = params, self.workers.map(TX.init)(params)
        else:
            self._state = self.workers.put(kept)

    def round(self, steps):
        """Takes these steps; returns the state after them, on the host, and the loss."""
        w = self.workers.num_workers
        params, state = self._state
        for step in steps:
            seeds = np.arange(step * w, (step + 1) * w, dtype=np.uint32)
            params, state, loss = self._step(params, state, self.workers.put(seeds))
        self._state = params, state
        kept, losses = self.workers.fetch((self._state, loss))
        return kept, losses.mean()

    def without(self, lost, kept):
        """The training that goes on from `kept` when these nodes are lost."""
        left = [d for d in self.workers.mesh.devices.flat if d.process_index not in lost]
        if kept is not None:
            of_nodes = np.arange(self.workers.num_workers).reshape(len(self.nodes), -1)
            stay = [node not in lost for node in self.nodes]
            kept = lj.resize(kept, of_nodes[stay].ravel())
        return Training(left, kept)


def join(options: argparse.Namespace) -> None:
    """Joins the other processes, so that the loss of one is not the end of all."""
    # A collective with a lost process must fail; by itself it waits, for half an hour on
    # CPUs and for ever on GPUs.
    os.environ["XLA_FLAGS"] = (
        f"--xla_cpu_collective_timeout_seconds={options.timeout} "
        "--xla_gpu_nccl_terminate_on_error=false --xla_gpu_nccl_async_execution=true "
        "--xla_gpu_nccl_blocking_communicators=false " + os.environ.get("XLA_FLAGS", "")
    )
    os.environ["XLA_PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE"] = "1"
    jax.config.update("jax_enable_recoverability", True)
    # Otherwise SIGTERM would be for the program to ask about; here it is one more loss.
    jax.config.update("jax_enable_preemption_service", False)
    jax.distributed.initialize(
        options.coordinator,
        options.num_processes,
        options.process_id,
        local_device_ids=[],  # all of the node
        heartbeat_timeout_seconds=options.timeout,
    )


def leave() -> None:
    """Lets process 0 go last: the others do not survive it, not even at their end."""
    if jax.process_index() == 0:
        with contextlib.suppress(multihost_utils.ProcessFailureError):
            with multihost_utils.live_devices(jax.devices()):
                pass  # until nobody else is left
    jax.distributed.shutdown()


def main() -> None:
    """Trains for so many rounds, with whoever is left."""
    options = arguments()
    join(options)
    say = lambda text: print(f"process {jax.process_index()}: {text}", flush=True)
    training, kept, done = Training(jax.devices()), None, 0
    say(training.workers)
    began = time.monotonic()
    while done < options.rounds:
        first = done * options.round_steps
        try:
            with multihost_utils.live_devices(jax.devices()):
                after, loss = training.round(range(first, first + options.round_steps))
        except multihost_utils.ProcessFailureError as error:
            lost = {device.process_index for device in error.failed_devices}
            training = training.without(lost, kept)
            say(f"lost {sorted(lost)} after round {done}, on with {training.workers}")
        else:
            kept, done = after, done + 1
            say(f"round {done}, loss {loss:.6g}, {time.monotonic() - began:.1f} s")
    leave()


if __name__ == "__main__":
    main()
