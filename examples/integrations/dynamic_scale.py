"""Loss scaling with Flax's `DynamicScale`: a worker undoes a step that overflows.

Four workers under `jax.pmap`, and again on `Workers`. Two overflow, one of them in a step
with an exchange. The method stands around the step, so its state is never undone. In the
optimizer's chain it would be undone on these workers alone, and others would wait for them.
Tested with flax 0.12.8 and jax 0.10.2.
"""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import jax_utils
from flax.training import dynamic_scale, train_state
from own_loop import batches_of, compare

import lsgd_jax as lj


class TrainState(train_state.TrainState):
    dynamic_scale: dynamic_scale.DynamicScale


def loss_of(params, batch):
    half, x = optax.tree.cast((params, batch[0]), jnp.float16)
    hidden = jnp.tanh(x @ half["in"]) @ half["out"]
    return jnp.square(hidden.astype(jnp.float32) - batch[1]).mean()


def train_step(state, batch):  # as in Flax's ImageNet example, without its pmean
    value_and_grad = state.dynamic_scale.value_and_grad(loss_of)
    scale, is_finite, loss, grads = value_and_grad(state.params, batch)
    after = state.apply_gradients(grads=grads)
    select = functools.partial(jnp.where, is_finite)
    return after.replace(
        params=jax.tree.map(select, after.params, state.params),
        opt_state=jax.tree.map(select, after.opt_state, state.opt_state),
        dynamic_scale=scale,
    ), {"loss": loss}


def with_pmap(method, state, batches):
    train = lj.around(train_step, method)  # new
    state = jax.pmap(train.init, axis_name="batch")(jax_utils.replicate(state))  # new
    step = jax.pmap(train, axis_name="batch", donate_argnums=0)  # new: train
    for batch in batches:
        state, metrics = step(state, batch)
    return state.state


def with_workers(method, state, batches):
    workers, train = lj.Workers(nodes=4, locals=1), lj.around(train_step, method)  # new
    state = workers.map(train.init)(workers.replicate(state))  # new
    step = workers.map(train, donate=0)  # new, in place of jax.jit
    for batch in batches:
        state, metrics = step(state, workers.put(batch))  # new: put
    return state.state


def main(steps: int = 16):
    batches = [(x, y) for x, y, _ in batches_of(steps, 4)]
    for step, worker in ((6, 2), (8, 1)):  # step 8 has an exchange
        x, y = batches[step - 1]
        batches[step - 1] = x, y.at[worker].set(1e30)
    keys = jax.random.split(jax.random.key(0))
    state = TrainState.create(
        apply_fn=None,
        params={
            "in": jax.random.normal(keys[0], [4, 32]) / 2,
            "out": jax.random.normal(keys[1], [32, 1]) / 6,
        },
        tx=optax.adam(1e-2),
        dynamic_scale=dynamic_scale.DynamicScale(scale=2.0**10),
    )
    ours = with_pmap(lj.local_sgd(period=4, axes="batch"), state, batches)
    lj.checks.check_workers_agree(ours.params)
    assert ours.dynamic_scale.scale.tolist() == [1024, 512, 512, 1024]
    own = with_workers(lj.local_sgd(period=4), state, batches)
    compare("the scale", ours.dynamic_scale, own.dynamic_scale)
    compare("loss scaling", ours.params, own.params)


if __name__ == "__main__":
    lj.emulate_devices(4)
    main()
