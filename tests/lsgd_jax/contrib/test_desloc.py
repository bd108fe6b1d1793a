"""DES-LOC: the moments that travel."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import (
    train,
)

import lsgd_jax as lj


@pytest.mark.parametrize(
    "base, periods, moment",
    [
        (optax.adam(0.1), [2, 6, 12], "mu"),
        pytest.param(optax.sgd(0.1, momentum=0.9), [2, 6], "trace", marks=pytest.mark.slow),
    ],
)
def test_desloc_averages_the_moments_of_its_part_whatever_the_base(base, periods, moment):
    """Leaf "b" and its moments stay with their worker."""
    x = {"a": np.ones((2, 3), np.float32), "b": np.ones((2, 4), np.float32)}
    apart = jax.tree.map(lambda x: x * np.array([[1], [-3]], np.float32), x)
    tx = lj.contrib.desloc(base, period=2, part=["a"])
    seen, state = train(tx, lj.Workers(1, 2), x, [apart] * 12)
    levels = lj.diagnostics(state)
    assert [level.period for level in levels] == periods
    assert {level.payload for level in levels} == {4 * 3 + 4}
    for tree in (seen[-1], optax.tree.get(state, moment)):
        equal = jax.tree.map(lambda x: bool(np.allclose(x[0], x[1])), tree)
        assert equal == {"a": True, "b": False}


def test_moments_of_desloc_are_checked():
    with pytest.raises(ValueError, match="has none of 'mu', 'trace', 'nu'"):
        lj.contrib.desloc(optax.sgd(0.1)).init(jnp.ones(2))
    with pytest.raises(ValueError, match=r"`moments\['mu'\]` must be a positive int"):
        lj.contrib.desloc(optax.adam(0.1), moments={"mu": 0})
