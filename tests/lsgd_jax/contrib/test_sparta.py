"""SPARTA: the entries that a step averages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lsgd_jax as lj


def test_sparta_averages_one_entry_of_every_cell_and_restores_by_the_step_before():
    tx, workers = lj.contrib.sparta(density=0.25, seed=3), lj.Workers(1, 4)
    rng = np.random.default_rng(0)
    x = {"w": rng.normal(size=(4, 3, 7)), "b": rng.normal(size=(4, 2))}
    x = jax.tree.map(jnp.float32, x)
    zero = jax.tree.map(jnp.zeros_like, x)
    step = workers.map(lambda u, s, x, v: tx.update(u, s, x, value=v))
    state, often = workers.map(tx.init)(x), np.zeros(21)
    for _ in range(200):
        u, state = step(workers.put(zero), state, workers.put(x), workers.put(np.ones(4)))
        moved = np.asarray(u["w"]).reshape(4, -1) != 0
        assert (moved == moved[:1]).all()
        # Cells of four, the last one of a single entry, which is drawn now and then.
        per_cell = [moved[0, k : k + 4].sum() for k in range(0, 21, 4)]
        assert per_cell[:5] == [1] * 5 and per_cell[5] <= 1
        mean = np.asarray(x["w"] + u["w"]).reshape(4, -1)[:, moved[0]]
        expected = np.asarray(x["w"]).reshape(4, -1)[:, moved[0]].mean(axis=0)
        np.testing.assert_allclose(mean, np.tile(expected, (4, 1)), rtol=1e-5, atol=1e-6)
        often += moved[0]
    # 200 draws of probability 1/4 each: within 4.5 standard deviations.
    assert np.abs(often - 50).max() < 4.5 * np.sqrt(200 * 0.25 * 0.75)
    assert lj.diagnostics(state)[0].payload == 4 * (6 + 1) + 4


def test_a_leaf_of_more_entries_than_int32_counts_is_refused():
    tx = lj.contrib.sparta()
    leaf = jax.ShapeDtypeStruct((2**20, 2**11), "float32")
    update = jax.vmap(lambda x: tx.update(x, tx.init(x), x), axis_name="node", axis_size=1)
    with pytest.raises(ValueError, match="fewer than 2.31 entries .*1048576, 2048"):
        jax.eval_shape(update, jax.ShapeDtypeStruct((1, *leaf.shape), leaf.dtype))
