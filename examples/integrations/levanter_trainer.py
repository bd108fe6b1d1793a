"""Levanter: a toy GPT-2 under its `Trainer`, which owns its loop, with DiLoCo.

Model, loss and optimizer are arguments of the trainer. They get an axis `worker`, which
lies along the axis `replica` of Levanter's mesh. Tested with marin-levanter
0.2.227.dev40316220070, jax 0.11.2, optax 0.2.6, Python 3.12.
"""

import functools

import equinox as eqx
import haliax as hax
import jax
import optax
from jax import random
from levanter.models.gpt2 import Gpt2Config
from levanter.models.lm_model import LmExample
from levanter.optim.config import AdamConfig
from levanter.tracker.tracker import NoopConfig
from levanter.trainer import Trainer, TrainerConfig
from levanter.utils.mesh import MeshConfig
from own_loop import compare, train

import lsgd_jax as lj


ADAM = AdamConfig(1e-3, warmup=0.0, lr_schedule="constant", weight_decay=0.0)
WORKER, VOCAB = hax.Axis("worker", 2), hax.Axis("vocab", 32)
# The gradient of a key's bias is 0 up to rounding, which Adam would amplify.
SIZE = dict(max_seq_len=16, hidden_dim=16, num_layers=2, num_heads=2, use_bias=False)
GPT = Gpt2Config(**SIZE, embed_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)


def loss_of(model, tokens, key=None):
    example = hax.vmap(LmExample.causal, "batch")(tokens)
    return model.compute_next_token_loss(example, key=key).scalar()


def with_trainer(config, method, create, batches):
    loss = lambda m, x, key: hax.vmap(loss_of, WORKER)(m, x, random.split(key)).sum()  # new
    tx = ADAM.build(len(batches))
    tx, over = optax.chain(tx, method), functools.partial(jax.vmap, axis_name="node")  # new
    tx = optax.with_extra_args_support(optax.GradientTransformation(*map(over, tx)))  # new
    create = hax.vmap(create, WORKER)  # new
    with Trainer(config, tx, loss, add_default_hooks=False) as trainer:
        state = trainer.initial_state(random.key(2), model_init=create)
        return trainer.train(state, batches).state.model


def main(steps: int = 24):
    mesh = MeshConfig(
        axes={"data": 1, "replica": 2},
        compute_mapping={"batch": "data"},
        shared_mapping={"worker": "replica"},  # new
    )
    quiet = dict(tracker=NoopConfig(), log_jaxprs=False, log_xla_hlo=False)
    sizes = dict(num_train_steps=steps, train_batch_size=4, per_device_parallelism=4)
    config = TrainerConfig(id="toy", mesh=mesh, **sizes, **quiet)
    create, method = lambda: GPT.build(VOCAB, key=random.key(0)), lj.diloco(period=4)
    rows = list(random.randint(random.key(1), [steps, 2, 4, 16], 0, 32))
    batches = [hax.named(x, ("worker", "batch", "position")) for x in rows]
    theirs = with_trainer(config, method, create, batches)

    arrays, static = eqx.partition(create(), eqx.is_inexact_array)
    named = lambda tokens: hax.named(tokens, ("batch", "position"))
    loss_alone = lambda arrays, x: loss_of(eqx.combine(arrays, static), named(x))
    workers = lj.Workers(nodes=2, locals=1)
    own = train(loss_alone, arrays, ADAM.build(steps), method, workers, rows)
    compare("levanter's trainer", eqx.filter(theirs, eqx.is_inexact_array), own)


if __name__ == "__main__":
    lj.emulate_devices(2)
    main()
