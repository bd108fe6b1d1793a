"""Levanter: a toy GPT-2 in a `TrainerState`, whose optimizer ends with a method.

`take_step` passes `loss=` to the optimizer, which methods with leaders need.
Tested with marin-levanter 0.2.227.dev40316220070, jax 0.11.2, optax 0.2.6, Python 3.12.
"""

import equinox as eqx
import haliax as hax
import jax
import optax
from levanter.models.gpt2 import Gpt2Config
from levanter.models.lm_model import LmExample
from levanter.trainer_state import TrainerState
from own_loop import compare, train

import lsgd_jax as lj


def loss_of(model, tokens):
    tokens = hax.named(tokens, ("batch", "position"))
    example = hax.vmap(LmExample.causal, "batch")(tokens)
    return model.compute_next_token_loss(example).scalar()


def main(steps: int = 24):
    base, method = optax.adam(1e-2), lj.lsgd(local_period=4, global_period=8)
    # The gradient of a key's bias is 0 up to rounding, which Adam would amplify.
    size = dict(max_seq_len=16, hidden_dim=16, num_layers=2, num_heads=2)
    config = Gpt2Config(**size, use_bias=False)
    model = config.build(hax.Axis("vocab", 32), key=jax.random.key(0))
    batches = list(jax.random.randint(jax.random.key(1), [steps, 2, 4, 16], 0, 32))

    def start(model):
        optimizer = optax.chain(base, method)  # new
        return TrainerState.init(optimizer, model, key=jax.random.key(2))

    def step(state, tokens):
        loss, grads = eqx.filter_value_and_grad(loss_of)(state.model, tokens)
        return state.take_step(grads, loss=loss, key=state.training_key)[0]

    start = eqx.filter_vmap(start, in_axes=None, axis_size=2, axis_name="node")  # new
    step = eqx.filter_vmap(step, axis_name="node")  # new
    state, step = start(model), eqx.filter_jit(step)
    for tokens in batches:
        state = step(state, tokens)

    arrays, static = eqx.partition(model, eqx.is_inexact_array)
    loss_alone = lambda arrays, tokens: loss_of(eqx.combine(arrays, static), tokens)
    own = train(loss_alone, arrays, base, method, lj.Workers(nodes=2, locals=1), batches)
    compare("levanter", eqx.filter(state.model, eqx.is_inexact_array), own)


if __name__ == "__main__":
    lj.emulate_devices(2)
    main()
