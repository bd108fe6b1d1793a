"""Tunix: a `PeftTrainer` that trains the LoRA leaves of two replicas with DiLoCo.

The trainer owns its loop. Its LoRA leaves have a leading axis of replicas, over which the
loss and the optimizer are mapped; frozen weights are stored once. Tested with google-tunix
0.1.7, flax 0.12.12 and jax 0.11.2.
"""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from own_loop import batches_of, compare, train
from tunix import PeftTrainer, TrainingConfig

import lsgd_jax as lj


ADAM = optax.adam(1e-2)


def loss_of(model, x, y):
    return jnp.square(model(x) - y).mean()


def with_trainer(model, method, workers, batches):
    nnx.update(model, workers.replicate(nnx.state(model, nnx.LoRAParam)))  # new
    lora = nnx.StateAxes({nnx.LoRAParam: 0, ...: None})  # new
    loss = lambda m, x, y: nnx.vmap(loss_of, in_axes=(lora, 0, 0))(m, x, y).sum()  # new
    over = functools.partial(jax.vmap, axis_name="node")  # new
    tx = optax.GradientTransformation(*map(over, optax.chain(ADAM, method)))  # new
    trainer = PeftTrainer(model, tx, TrainingConfig(eval_every_n_steps=100))
    trainer.with_loss_fn(loss).train(batches)
    return nnx.state(model, nnx.LoRAParam)


def main(steps: int = 40):
    workers, method = lj.Workers(nodes=2, locals=1), lj.diloco(period=4)
    first = nnx.LoRALinear(4, 8, lora_rank=2, rngs=nnx.Rngs(0))
    model = nnx.Sequential(first, nnx.relu, nnx.Linear(8, 1, rngs=nnx.Rngs(1)))
    graph, lora, frozen = nnx.split(nnx.clone(model), nnx.LoRAParam, ...)
    batches = [dict(x=x, y=y) for x, y, _ in batches_of(steps, 2)]
    theirs = with_trainer(model, method, workers, batches)

    loss_alone = lambda lora, batch: loss_of(nnx.merge(graph, lora, frozen), **batch)
    compare("Tunix", theirs, train(loss_alone, lora, ADAM, method, workers, batches))


if __name__ == "__main__":
    lj.emulate_devices(2)
    main()
