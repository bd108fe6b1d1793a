"""Anchors and centers: their start, their outer optimizer, and restarts."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import mostly_slow, train_rows

import lsgd_jax as lj


@pytest.mark.parametrize(
    ("method", "field"),
    [
        (lj.easgd(), "center"),
        (lj.downpour(1), "center"),
        (lj.diloco(1), "anchor"),
        (lj.parle(0.1), "center"),
    ],
)
def test_a_start_that_is_not_finite_does_not_enter_the_center(method, field):
    workers = lj.Workers(1, 3)
    state = workers.map(method.init)(workers.put(jnp.array([[1.0], [jnp.nan], [4.0]])))
    assert getattr(state.pulls[0].rule, field).value.tolist() == [2.5]


@pytest.mark.parametrize(
    "name", mostly_slow(["diloco", "slowmo", "injected"], fast=["slowmo", "injected"])
)
def test_every_second_exchange_begins_without_momentum(name):
    """Schedules of the outer optimizer go on."""
    rates = [0.5, 0.25, 0.1, 0.0625]  # not geometric, so that each must be the right one
    rate = lambda k: jnp.asarray(rates)[k]
    gradients, m, x = np.random.default_rng(9).normal(size=(4, 1, 17)), 0.0, 0.0
    if name == "slowmo":
        method = lj.slowmo(1, 1.0, 0.5, lambda t: rate(t - 1), restart=2)
    else:
        inject = optax.inject_hyperparams(optax.sgd, ("momentum",))
        outer = inject(rate, momentum=0.5) if name == "injected" else optax.sgd(rate, 0.5)
        method = lj.diloco(1, outer, restart=2)
    tx = optax.chain(optax.sgd(1.0), method)
    seen, _ = train_rows(tx, np.zeros((1, 17)), gradients)
    for k, (g, eta) in enumerate(zip(gradients[:, 0], rates), start=1):
        m = 0.5 * (0.0 if k % 2 == 0 else m) + (g / eta if name == "slowmo" else g)
        x = x - eta * m
        np.testing.assert_allclose(seen[k - 1, 0], x, rtol=1e-5, atol=1e-6)
