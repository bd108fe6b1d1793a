"""From the checkpoint of one model to W workers, and back to one checkpoint.

The first checkpoint stands for a pretrained model: a plain tree of arrays without a worker
axis. The last one has the same form and contains the center of the workers.

    python examples/one_checkpoint_to_many_workers.py
"""

import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp

import lsgd_jax as lj


def loss_of(params, x):
    """Returns the squared error of a network that learns the sine of the sum of inputs."""
    y = jnp.tanh(x @ params["in"]) @ params["out"]
    return jnp.square(y - jnp.sin(x.sum(1, keepdims=True))).mean()


def finetune(before: pathlib.Path, after: pathlib.Path, steps: int = 40) -> None:
    """Reads a model, trains it with 2 x 2 workers and writes their center."""
    workers = lj.Workers(nodes=2, locals=2)
    tx = optax.chain(optax.adam(1e-2), lj.lsgd(local_period=4, global_period=8))

    def train_step(params, state, key):  # one worker's step
        x = jax.random.normal(key, [32, 4])
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        updates, state = tx.update(grads, state, params, value=loss)
        return lj.apply_updates(params, updates), state

    with ocp.StandardCheckpointer() as checkpointer:
        params = workers.replicate(checkpointer.restore(before))
        state = workers.map(tx.init)(params)
        step = workers.map(train_step, donate=(0, 1))
        for key in jax.random.split(jax.random.key(1), steps):
            params, state = step(params, state, workers.put(jax.random.split(key, 4)))
        checkpointer.save(after, lj.center(params, state))


def main(folder: pathlib.Path):
    """Returns the losses of the models in both checkpoints, before and after."""
    before, after = folder / "pretrained", folder / "finetuned"
    draw = np.random.default_rng(0).normal
    start = {"in": draw(size=[4, 32]) / 2, "out": draw(size=[32, 1]) / 6}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(before, jax.tree.map(np.float32, start))
    finetune(before, after)
    x = jax.random.normal(jax.random.key(2), [256, 4])
    with ocp.StandardCheckpointer() as checkpointer:
        models = [checkpointer.restore(file) for file in (before, after)]
    assert jax.tree.map(np.shape, models[0]) == jax.tree.map(np.shape, models[1])
    return [float(loss_of(jax.tree.map(jnp.asarray, model), x)) for model in models]


if __name__ == "__main__":
    lj.emulate_devices(4)
    with tempfile.TemporaryDirectory() as folder:
        losses = main(pathlib.Path(folder))
    print(f"loss of one model {losses[0]:.3f} -> {losses[1]:.3f}")
