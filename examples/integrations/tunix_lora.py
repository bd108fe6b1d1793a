"""Tunix: a `PeftTrainer` that trains the LoRA leaves of two replicas with DiLoCo.

Only LoRA leaves and their optimizer state have a leading axis of replicas; frozen weights
are stored once. Tested with google-tunix 0.1.7, flax 0.12.8 and jax 0.10.2.
"""

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from own_loop import batches_of, compare, train
from tunix import PeftTrainer, TrainingConfig

import lsgd_jax as lj


class Replicas(PeftTrainer):
    def replicate(self, outer, workers):
        lora = workers.replicate(nnx.state(self.model, nnx.LoRAParam))
        nnx.update(self.model, lora)
        nnx.update(self.optimizer, workers.replicate(nnx.state(self.optimizer)))
        self.optimizer.outer = nnx.Variable(jax.vmap(outer.init, axis_name="node")(lora))
        self.outer = outer

    def create_train_step_fn(self):
        def step(model, optimizer, batch):  # of one replica
            loss, aux, norm = self._train_step(model, optimizer, batch)
            lora, state = nnx.state(model, nnx.LoRAParam), optimizer.outer.get_value()
            lora, state = self.outer.step(lora, state, loss=loss)
            nnx.update(model, lora)
            optimizer.outer.set_value(state)
            return loss, aux, norm

        only_lora = nnx.StateAxes({nnx.LoRAParam: 0, ...: None})
        return nnx.vmap(step, in_axes=(only_lora, 0, 0), axis_name="node")


def main(steps: int = 40):
    workers, method = lj.Workers(nodes=2, locals=1), lj.diloco(period=4)
    first = nnx.LoRALinear(4, 8, lora_rank=2, rngs=nnx.Rngs(0))
    model = nnx.Sequential(first, nnx.relu, nnx.Linear(8, 1, rngs=nnx.Rngs(1)))
    graph, lora, frozen = nnx.split(nnx.clone(model), nnx.LoRAParam, ...)
    loss_of = lambda model, x, y: jnp.square(model(x) - y).mean()

    trainer = Replicas(model, optax.adam(1e-2), TrainingConfig(eval_every_n_steps=100))
    trainer.replicate(lj.outer(method), workers)
    rows = [dict(x=x, y=y) for x, y, _ in batches_of(steps, 2)]
    trainer.with_loss_fn(loss_of).train(rows)

    loss_alone = lambda lora, batch: loss_of(nnx.merge(graph, lora, frozen), **batch)
    own = train(loss_alone, lora, optax.adam(1e-2), method, workers, rows)
    compare("Tunix", nnx.state(model, nnx.LoRAParam), own)


if __name__ == "__main__":
    lj.emulate_devices(2)
    main()
