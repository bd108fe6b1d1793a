"""Aggregates of gradients: two attackers of seven, and LICM's band."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from harness import aggregate, close, everywhere

import lsgd_jax as lj


ATTACKS = {
    "sign_flip": lambda g: -3.0 * g,
    "inf": lambda g: jnp.full_like(g, jnp.inf),
    "nan": lambda g: jnp.full_like(g, jnp.nan),
    "huge": lambda g: 1e30 * g,
}
DEFENSES = {
    "mean": lj.allreduce,
    "coordinate_median": lj.robust.coordinate_median,
    "licm": lambda: lj.robust.licm(0.2),
    "cge": lambda: lj.robust.cge(faulty=2),
    "cge_decay": lambda: lj.robust.cge(faulty=2, decay=0.5),
}


@functools.cache
def defended(defense):
    """Returns a function that aggregates gradients [7, 20] three times in a row."""
    tx, workers = DEFENSES[defense](), lj.Workers(1, 7)

    def update(g):
        state = tx.init(g)
        for _ in range(3):
            aggregate, state = tx.update(g, state)
        return aggregate

    update = workers.map(update)
    return lambda g: np.asarray(update(workers.put(g)))


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("defense", DEFENSES)
def test_two_attackers_of_seven(defense, attack):
    honest = 1.0 + 0.1 * np.random.default_rng(0).normal(size=(7, 20))
    honest = jnp.asarray(honest, jnp.float32)
    attacked = honest.at[:2].set(ATTACKS[attack](honest[:2]))
    result = defended(defense)(attacked)
    close(result, everywhere(result[0], 7))
    low, high = np.asarray(honest[2:]).min(axis=0), np.asarray(honest[2:]).max(axis=0)
    scale = 1 - 0.5**3 if defense == "cge_decay" else 1.0  # h starts at 0
    within = ((scale * low - 1e-6 <= result) & (result <= scale * high + 1e-6)).all()
    fooled = defense == "mean" and attack in ("sign_flip", "huge")
    assert within != fooled


def test_licm_averages_inside_the_band():
    g = jnp.array([[1.0, 0.0], [2.0, 0.0], [2.5, 1.0], [3.5, -2.0], [9.0, 0.0]])
    # Medians 2.5 and 0, bands [1.25, 3.75] and [0, 0]. With γ = 0 the medians remain.
    for gamma, inside in ((0.5, 8 / 3), (0.0, 2.5)):
        expected = np.tile(np.float32([inside, 0.0]), (5, 1))
        close(np.asarray(aggregate(lj.robust.licm(gamma), g)), expected)


def test_with_no_worker_finite_gradients_stay():
    g = jnp.array([[jnp.nan, 1.0], [jnp.inf, 2.0]])
    for tx in (lj.allreduce(), lj.robust.cge(0)):
        np.testing.assert_array_equal(aggregate(tx, g), g)


def test_refuses():
    with pytest.raises(ValueError, match=r"less than the number of workers \(4\)"):
        aggregate(lj.robust.cge(4), jnp.ones((4, 2)))
