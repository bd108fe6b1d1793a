"""Kauldron: a linen model under `kd.train.Trainer`, which owns its loop, with DiLoCo.

Model and optimizer are fields of the trainer. Both are mapped over a leading axis of two
replicas, which lies along Kauldron's mesh, and so does the batch. Tested with kauldron
1.4.4, flax 0.12.12 and jax 0.12.0.
"""

import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from kauldron import kd
from own_loop import batches_of, compare, train

import lsgd_jax as lj


ADAM = optax.adam(1e-2)


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(nn.tanh(nn.Dense(32)(x)))


def with_trainer(method, folder, batches):
    network = nn.vmap(Network, {True: 0}, {"params": False})()  # new
    # Kauldron's loss is a mean over the replicas.
    tx, rows = optax.chain(optax.scale(2.0), ADAM, method), kd.sharding.FIRST_DIM  # new
    tx = optax.GradientTransformation(*(jax.vmap(f, axis_name="node") for f in tx))  # new
    trainer = kd.train.Trainer(
        train_ds=batches,
        model=kd.nn.ExternalModule(model=network, keys="batch.x"),
        optimizer=tx,
        train_losses={"loss": kd.losses.L2(preds="preds", targets="batch.y")},
        num_train_steps=len(batches) - 1,  # Kauldron trains one more
        sharding=kd.sharding.ShardingStrategy(params=rows, opt_state=rows),  # new
        workdir=folder,
        writer=None,
    )
    start = trainer.init_state().params
    return start, trainer.train()[0].params


def main(steps: int = 40):
    method = lj.diloco(period=4)
    rows = [dict(x=np.asarray(x), y=np.asarray(y)) for x, y, _ in batches_of(steps, 2)]
    examples = jax.tree.map(lambda *rows: np.concatenate(rows), *rows)
    data = dict(loader=lambda: examples, num_epochs=1)
    batches = kd.data.InMemoryPipeline(**data, batch_size=2)  # new: a row for each worker
    with tempfile.TemporaryDirectory() as folder:
        start, theirs = with_trainer(method, folder, batches)

    start = jax.tree.map(lambda x: x[0], start)
    loss_of = lambda params, batch: jnp.square(
        Network().apply({"params": params}, batch["x"]) - batch["y"]
    ).mean()
    own = train(loss_of, start, ADAM, method, lj.Workers(nodes=2, locals=1), rows)
    compare("Kauldron", theirs, own)


if __name__ == "__main__":
    lj.emulate_devices(2)
    main()
