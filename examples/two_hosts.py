"""DiLoCo between several hosts in a loop of your own, saved and resumed by Orbax.

    python examples/two_hosts.py HOST:PORT 2 0 FOLDER  # on the first host, which is HOST
    python examples/two_hosts.py HOST:PORT 2 1 FOLDER  # on the second host

The arguments are the address of process 0, the number of processes, the number of this
process, and a folder for checkpoints that all hosts share. The devices of a host average
their gradients at each step. The hosts exchange parameters every 16 steps. To try it on one
machine, start both commands there, in two terminals, with 127.0.0.1:1234 as the address and
``--emulate 2``.

The same commands continue from the last checkpoint. After a SIGTERM to any process, all
processes save at the same step and end with status 75. If a process is killed or raises an
error, the others end within about half a minute with another status. A resumed run ends
with parameters that are bit-identical to those of an undisturbed one.
"""

import argparse
import hashlib
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

import lsgd_jax as lj


optimizer = optax.chain(lj.allreduce(axes="local"), optax.adam(3e-3))


def draw(worker, step):
    """Draws the batch of a worker, which depends on nothing but these two numbers.

    Workers therefore have different data, and a resumed run continues with the right batch.
    If your loader has a position of its own, save the position beside the state.
    """
    x = np.random.default_rng([worker, step]).normal(size=(32, 8)).astype(np.float32)
    return x, np.sin(x.sum(axis=1, keepdims=True))


def loss_of(params, x, y):
    return jnp.square(jnp.tanh(x @ params["in"]) @ params["out"] - y).mean()


def update(state, x, y):
    """The step of one device, which is a worker."""
    loss, grads = jax.value_and_grad(loss_of)(state["params"], x, y)
    updates, opt_state = optimizer.update(grads, state["opt_state"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state}, loss


train_step = lj.around(update, lj.diloco(period=16, axes="node"))


def start(workers):
    """The state before the first step, equal in all processes."""
    normal = np.random.default_rng(0).normal
    draws = {"in": normal(size=(8, 64)) / 3, "out": np.zeros((64, 1))}
    params = jax.tree.map(np.float32, draws)
    state = {"params": params, "opt_state": optimizer.init(params)}
    return workers.map(train_step.init)(workers.replicate(state))


def train(folder, steps, save_every):
    """Trains until the last step or a SIGTERM. All processes call it."""
    workers = lj.Workers(nodes=jax.process_count(), locals=jax.local_device_count())
    state = start(workers)
    step = workers.loop(train_step, donate=0)
    options = ocp.CheckpointManagerOptions(
        save_interval_steps=save_every, max_to_keep=2, cleanup_tmp_directories=True
    )
    with ocp.CheckpointManager(folder, options=options) as manager:
        begun = manager.latest_step() or 0
        if begun:
            # The shardings say which rows each process reads.
            like = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
            state = manager.restore(begun, args=ocp.args.StandardRestore(like))
            print(f"resumed at step {begun}", flush=True)
        for t in range(begun + 1, steps + 1):
            x, y = zip(*(draw(worker, t) for worker in workers.owned))
            state, loss = step(state, *workers.put_owned((np.stack(x), np.stack(y))))
            if t % 10 == 0:
                print(f"step {t}: loss {loss.mean():.4f}", flush=True)
            # Saves at step 1, every `save_every` steps, and after a SIGTERM to any process,
            # at a step on which they agree. So all of them must call it at every step.
            manager.save(t, args=ocp.args.StandardSave(state), force=t == steps)
            if manager.reached_preemption(t):
                manager.wait_until_finished()
                print(f"stopped and saved at step {t}", flush=True)
                sys.exit(75)  # EX_TEMPFAIL: the same command goes on
    center = workers.fetch(lj.center(state.state["params"], state))
    loss = loss_of(center, *draw(0, 0))  # training begins at step 1
    digest = hashlib.sha256(b"".join(x.tobytes() for x in jax.tree.leaves(center)))
    print(f"loss of the center {loss:.4f}, digest {digest.hexdigest()[:16]}")


def check_shared(folder):
    """Exits unless all processes see one folder. Orbax would wait for minutes."""
    files = [folder / f"seen-by-{i}" for i in range(jax.process_count())]
    folder.mkdir(parents=True, exist_ok=True)
    files[jax.process_index()].touch()
    multihost_utils.sync_global_devices("all processes have made their files")
    if not all(file.exists() for file in files):
        raise SystemExit(f"error: {folder} must be a folder that all hosts share")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("coordinator", help="HOST:PORT of process 0")
    parser.add_argument("processes", type=int, help="the number of processes")
    parser.add_argument("process", type=int, help="the number of this process, from 0")
    parser.add_argument("folder", type=pathlib.Path, help="for checkpoints, shared by all")
    parser.add_argument("--emulate", type=int, metavar="N", help="emulate N CPU devices")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--save-every", type=int, default=20)
    args = parser.parse_args()
    if args.emulate:
        lj.emulate_devices(args.emulate)
    jax.distributed.initialize(
        args.coordinator,
        args.processes,
        args.process,
        cluster_detection_method="deactivate",  # under Slurm, jax would take one GPU only
        heartbeat_timeout_seconds=30,  # until a process that is killed ends the others
        shutdown_timeout_seconds=30,  # until a process that raises an error ends them
    )
    folder = args.folder.absolute()
    check_shared(folder)
    train(folder, args.steps, args.save_every)


if __name__ == "__main__":
    main()
