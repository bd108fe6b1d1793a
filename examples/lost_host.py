"""DiLoCo between hosts of which some are lost and come back, in a loop of your own.

    python examples/lost_host.py HOST:PORT 3 0  # on the first host, which is HOST
    python examples/lost_host.py HOST:PORT 3 1  # on the second host
    python examples/lost_host.py HOST:PORT 3 2  # on the third host

The arguments are the address of process 0, the number of processes, and the number of this
process. To try it on one machine, start all commands there, in three terminals, with
127.0.0.1:1234 as the address and ``--emulate``.

Messages travel beside the steps. Kill any process but the first one, and the others go on
without it. The same command brings it back: it takes anchor, momentum and step from the
others, and begins there. Process 0 holds jax's coordination service; if it is lost, jax
ends all of them.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np
import optax

import lsgd_jax as lj


CHANGES = 16  # CPU devices beside each one that trains; messages of new members take others
optimizer = optax.adam(3e-3)


def draw(worker, step):
    """Draws the batch of a worker, which depends on nothing but these two numbers."""
    x = np.random.default_rng([worker, step]).normal(size=(32, 8)).astype(np.float32)
    return x, np.sin(x.sum(axis=1, keepdims=True))


def loss_of(params, x, y):
    return jnp.square(jnp.tanh(x @ params["in"]) @ params["out"] - y).mean()


def update(state, x, y):
    """The step of a worker."""
    loss, grads = jax.value_and_grad(loss_of)(state["params"], x, y)
    updates, opt_state = optimizer.update(grads, state["opt_state"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state}, loss


train_step = lj.around(update, lj.diloco(period=16, delay=8))


def create():
    normal = np.random.default_rng(0).normal
    draws = {"in": normal(size=(8, 64)) / 3, "out": np.zeros((64, 1))}
    params = jax.tree.map(jnp.float32, draws)
    return {"params": params, "opt_state": optimizer.init(params)}


def train(steps):
    """Trains until the last step. All processes call it, those that come back, too."""
    workers = lj.Workers(nodes=1, locals=jax.process_count())
    run = workers.loop(train_step, donate=0, beside=True, min_workers=1)
    # Not `workers.map(train_step.init)`, which would send a message to all processes.
    state = run.begin(workers.replicate(train_step.init(create())))
    if run.steps:
        print(f"came in at step {run.steps}", flush=True)
    alive = run.num_workers
    while run.steps < steps:
        batches = [draw(worker, run.steps + 1) for worker in workers.owned]
        x, y = map(np.stack, zip(*batches))
        state, loss = run(state, *workers.put_owned((x, y)))
        if run.num_workers != alive:
            alive = run.num_workers
            print(f"step {run.steps}: {alive} workers live", flush=True)
        if run.steps % 50 == 0:
            mean = workers.fetch(loss).mean()
            print(f"step {run.steps}: mean loss {mean:.4f}", flush=True)
    center = run.consensus(state.state["params"])
    print(f"norm of the center: {optax.tree.norm(center):.6f}", flush=True)
    run.close()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("coordinator", help="HOST:PORT of process 0")
    parser.add_argument("processes", type=int, help="the number of processes")
    parser.add_argument("process", type=int, help="the number of this process, from 0")
    parser.add_argument("--emulate", action="store_true", help="train on a CPU device")
    parser.add_argument("--steps", type=int, default=2000)
    args = parser.parse_args()
    training = 1 if args.emulate else 0
    jax.config.update("jax_num_cpu_devices", training + CHANGES)
    jax.config.update("jax_enable_recoverability", True)
    jax.distributed.initialize(
        args.coordinator,
        args.processes,
        args.process,
        cluster_detection_method="deactivate",
        heartbeat_timeout_seconds=10,  # until a process that is silent is lost
    )
    train(args.steps)


if __name__ == "__main__":
    main()
