"""A Flax module that names the mesh axes of its parameters, trained by sharded workers.

`nn.with_partitioning` puts each parameter in a box with the names of its axes.
`nn.get_partition_spec` reads these names, and `Workers.replicate` takes them as specs. The
specs are those of one worker. `nn.logical_to_mesh` turns logical names into mesh axes, and
`nn.meta.unbox` removes the boxes: for a parameter in one, Flax calls
`with_sharding_constraint`, which explicit axes do not allow.

The mesh may have explicit axes, as `jax.make_mesh` makes them, or automatic ones.

    python examples/flax_partitioning.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import AxisType

import lsgd_jax as lj


STEPS, RULES = 40, [("embed", None), ("mlp", "fsdp")]  # logical name -> mesh axis


class Network(nn.Module):
    """Two layers, with logical names for the axes of their parameters."""

    @nn.compact
    def __call__(self, x):
        normal = nn.initializers.normal(0.2)
        kernel = nn.with_partitioning(normal, ("embed", "mlp"))
        x = nn.tanh(nn.Dense(64, use_bias=False, kernel_init=kernel)(x))
        out = self.param("out", nn.with_partitioning(normal, ("mlp",)), (64,))
        return (x * out[None]).sum(1)


def main(kind=AxisType.Explicit):
    """Returns the losses [steps, W] and the parameters."""
    mesh = jax.make_mesh((2, 4), ("replica", "fsdp"), axis_types=(kind,) * 2)
    workers = lj.Workers(mesh=mesh, axes="replica")
    network, tx = Network(), optax.chain(optax.adam(1e-2), lj.diloco(period=10))

    boxed = network.init(jax.random.key(0), jnp.zeros([1, 8]))["params"]
    specs = nn.logical_to_mesh(nn.get_partition_spec(boxed), RULES)
    params = workers.replicate(nn.meta.unbox(boxed), specs)

    def train_step(params, state, x):  # one worker's step
        def loss_of(params):
            found = network.apply({"params": params}, x)
            return jnp.square(found - jnp.sin(x.sum(1))).mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, state = tx.update(grads, state, params, value=loss)
        return lj.apply_updates(params, updates), state, loss

    state = workers.map(tx.init)(params)  # lies like the parameters
    step, losses = workers.map(train_step, donate=(0, 1)), []
    for i in range(STEPS):
        x = jax.random.normal(jax.random.key(i), [2, 32, 8])
        params, state, loss = step(params, state, workers.put(x))
        losses.append(loss)
    return np.array(losses), params


if __name__ == "__main__":
    lj.emulate_devices(8)
    losses, params = main()
    print(f"loss {losses[:5].mean():.3f} -> {losses[-5:].mean():.3f}")
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        print(jax.tree_util.keystr(path), leaf.shape, leaf.sharding.spec)
