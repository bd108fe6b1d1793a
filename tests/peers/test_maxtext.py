"""DiLoCo of MaxText: the steps that its test works out by hand.

AI-Hypercomputer/maxtext (Apache-2.0), commit e591f30cbbf217ed67ef71263ec0538239f9c3b8,
tests/integration/diloco_test.py, test_diloco_training_simulation_with_mesh. Two replicas
fit x · w + b to two examples each, by SGD of rate 0.1 on the mean square. Every 3 steps
comes an outer SGD of rate 1 and Nesterov momentum 0.9. Compared: the losses of both
replicas at steps 1 to 4 and the weights before steps 2, 3 and 4, to the digits of its
comments.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lsgd_jax as lj


INPUTS = np.array([[[0, 1], [1, 0]], [[1, 0], [0, 1]]], np.float32)
LABELS = np.array([[1, 2], [2, 3]], np.float32)
LOSSES = [[1.0, 1.0], [0.49, 0.81], [0.2401, 0.6561], [0.2075, 0.94]]
# (w, b) of both replicas.
PARAMS = [
    [[1.9, 0.9, 0.8], [1.9, 1.1, 1.0]],
    [[1.83, 0.83, 0.66], [1.81, 1.19, 1.0]],
    [[1.5345, 1.0494, 0.5839], [1.5345, 1.0494, 0.5839]],
]


@pytest.mark.slow
def test_diloco():
    outer = optax.sgd(1.0, momentum=0.9, nesterov=True)
    tx = optax.chain(optax.sgd(0.1), lj.diloco(3, outer))
    workers = lj.Workers(1, 2)
    params = workers.replicate({"w": jnp.array([2.0, 1.0]), "b": jnp.array(1.0)})
    state = workers.map(tx.init)(params)

    def loss_of(params, inputs, labels):
        return jnp.mean((inputs @ params["w"] + params["b"] - labels) ** 2)

    @workers.map
    def step(params, state, inputs, labels):
        loss, grads = jax.value_and_grad(loss_of)(params, inputs, labels)
        u, state = tx.update(grads, state, params, loss=loss)
        return lj.apply_updates(params, u), state, loss

    losses, seen = [], []
    for _ in range(4):
        params, state, loss = step(params, state, *workers.put((INPUTS, LABELS)))
        losses.append(loss)
        seen.append(np.column_stack([params["w"], params["b"]]))
    np.testing.assert_allclose(losses[:3], LOSSES[:3], rtol=1e-6)
    np.testing.assert_allclose(losses[3], LOSSES[3], atol=2e-3)
    np.testing.assert_allclose(seen[:3], PARAMS, atol=6e-5)
