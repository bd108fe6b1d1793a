"""`jax.pmap`: a GPT in Flax linen, its `TrainState` replicated over the axis `batch`.

Four devices. With plain SGD the program's `pmean` of the gradients equals `allreduce` and
local SGD of period 1. DiLoCo under `pmap` equals DiLoCo on `Workers`.
Tested with flax 0.12.8 and jax 0.10.2.
"""

import functools

import jax
import optax
from flax import jax_utils
from flax import linen as nn
from flax.training.common_utils import shard
from flax.training.train_state import TrainState
from own_loop import compare

import lsgd_jax as lj


class GPT(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        position = self.param("position", nn.initializers.normal(0.1), (16, 16))
        x, mask = nn.Embed(32, 16)(tokens) + position, nn.make_causal_mask(tokens)
        for _ in range(2):
            # The gradient of a key's bias is 0 up to rounding, which Adam would amplify.
            attention = nn.MultiHeadDotProductAttention(num_heads=2, use_bias=False)
            x += attention(nn.LayerNorm()(x), mask=mask)
            x += nn.Dense(16)(nn.gelu(nn.Dense(64)(nn.LayerNorm()(x))))
        return nn.Dense(32)(nn.LayerNorm()(x))


def train_step(state, tokens, axis=None):
    def loss_of(params):
        z = state.apply_fn({"params": params}, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(z, tokens[:, 1:]).mean()

    loss, grads = jax.value_and_grad(loss_of)(state.params)
    grads = jax.lax.pmean(grads, axis) if axis else grads
    return state.apply_gradients(grads=grads), {"loss": loss}


def their_program(step, state, batches):
    state = jax_utils.replicate(state)
    step = jax.pmap(step, axis_name="batch", donate_argnums=0)
    for tokens in batches:
        state, metrics = step(state, shard(tokens))
    return state.params


def with_pmap(method, state, batches):
    train = lj.around(train_step, method)  # new
    state = jax.pmap(train.init, axis_name="batch")(jax_utils.replicate(state))  # new
    step = jax.pmap(train, axis_name="batch", donate_argnums=0)  # new: train
    for tokens in batches:
        state, metrics = step(state, shard(tokens))
    return state.state.params


def with_workers(method, state, batches):
    workers, train = lj.Workers(nodes=4, locals=1), lj.around(train_step, method)  # new
    state = workers.map(train.init)(workers.replicate(state))  # new
    step = workers.map(train, donate=0)  # new, in place of jax.pmap
    for tokens in batches:
        state, metrics = step(state, workers.put(shard(tokens)))  # new: put
    return state.state.params


def main(steps: int = 12):
    tokens = list(jax.random.randint(jax.random.key(1), [steps, 8, 17], 0, 32))
    params = GPT().init(jax.random.key(0), tokens[0][:, :-1])["params"]
    sgd, adam = optax.sgd(0.1), optax.adam(1e-3)
    start = lambda tx: TrainState.create(apply_fn=GPT().apply, params=params, tx=tx)

    theirs = their_program(functools.partial(train_step, axis="batch"), start(sgd), tokens)
    ours = start(optax.chain(lj.allreduce(axes="batch"), sgd))
    compare("allreduce", theirs, their_program(train_step, ours, tokens))
    ours = with_pmap(lj.local_sgd(1, axes="batch"), start(sgd), tokens)
    compare("local SGD", theirs, ours)

    theirs = with_pmap(lj.diloco(4, axes="batch"), start(adam), tokens)
    compare("DiLoCo", theirs, with_workers(lj.diloco(4), start(adam), tokens))


if __name__ == "__main__":
    lj.emulate_devices(4)
    main()
