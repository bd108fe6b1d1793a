"""Settings of jax that must not break a method; see CONTRIBUTING for the whole table."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lsgd_jax as lj
from lsgd_jax._src.wire.group import Group


TX = optax.chain(
    optax.sgd(0.1),
    lj.exchange(
        lj.lsgd(0.3, 0.2, 2, 4),
        lj.diloco(2, wire="int8"),
        lj.sgp(),
        lj.Pull(lj.rules.robust_mean("trimmed_mean"), 0.5, every=2),
    ),
)
X = {"w": np.arange(8.0, dtype=np.float32).reshape(2, 4), "b": np.ones((2, 3), np.float32)}


def step(x, state, batch):
    loss = optax.tree.norm(jax.tree.map(jnp.subtract, x, batch), squared=True)
    u, state = TX.update(batch, state, x, value=loss)
    return lj.apply_updates(x, u), state


@pytest.mark.slow
def test_methods_are_traced_under_a_check_for_leaks():
    """`test_methods_conformance.py` has float64 and strict promotion."""
    workers = lj.Workers(1, 2, devices=jax.devices()[:1])
    with jax.check_tracer_leaks(True):
        state = jax.eval_shape(workers.map(TX.init), X)
        after = jax.eval_shape(workers.map(step), X, state, X)
    kind = lambda x: (x.shape, x.dtype)
    assert jax.tree.map(kind, after) == jax.tree.map(kind, (X, state))


@pytest.mark.slow
def test_draws_do_not_depend_on_the_default_generator_and_the_devices():
    def draw(devices):
        workers = lj.Workers(1, 8, devices=jax.devices()[:devices])
        group = lambda t: Group(("node", "local")).bernoulli(0.5, 0, t)
        return workers.map(group)(workers.put(np.full(8, 3, np.int32))).tolist()

    expected = draw(8)
    assert 0 < sum(expected) < 8
    with jax.default_prng_impl("rbg"):
        assert draw(8) == expected
        assert draw(1) == expected
