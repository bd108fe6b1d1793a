"""SparseLoCo: its rounding and its errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import train

import lsgd_jax as lj
import oracles
from lsgd_jax._src.layouts import on_one_device
from lsgd_jax._src.wire.packing import Packing
from lsgd_jax._src.wire.top_k import TopK, quantize


def test_values_are_rounded_as_the_released_code_rounds_them():
    """It rounds a - y, and the wire y - a."""
    unit = oracles.ROWS["units"]["statistical_quantizer"]
    codes, values = quantize(-jnp.array(unit["v"], jnp.float32), bits=2)
    assert codes.tolist() == unit["codes"]
    np.testing.assert_allclose(-values[codes], unit["decoded"], rtol=1e-5, atol=1e-6)


def test_top_k_is_refused_where_parameters_travel_whole():
    wire = lj.TopK(chunk=64)
    for make in (lj.lsgd, lj.local_sgd, lj.dpsgd, lj.contrib.noloco, lj.wagma):
        with pytest.raises(ValueError, match="`wire` may be 'top-k' only for a rule"):
            make(wire=wire)


@pytest.mark.slow
def test_a_worker_that_is_not_finite_sends_nothing_and_keeps_no_error():
    """It takes the anchor, which the others' messages alone have moved; |H| is theirs."""
    tx = lj.contrib.sparse_diloco(1, density=0.25, chunk=4, bits=None)
    u = np.random.default_rng(0).normal(size=(3, 8)).astype(np.float32)
    (moved,), state = train(tx, lj.Workers(1, 3), 0 * u, [u], [[0, np.nan, 0]])
    sent = np.zeros_like(u)
    for i in (0, 2):
        for chunk in (slice(0, 4), slice(4, 8)):
            k = chunk.start + np.abs(u[i, chunk]).argmax()
            sent[i, k] = u[i, k]
    np.testing.assert_allclose(moved, np.tile(sent.sum(axis=0) / 2, (3, 1)), rtol=1e-6)
    error = state.pulls[0].wire.error
    np.testing.assert_allclose(error, np.where([[1], [0], [1]], u - sent, 0), rtol=1e-6)


def test_a_leaf_of_more_entries_than_int32_counts_has_a_message():
    """By shapes alone: a place is a chunk and an index in it."""
    wire = TopK()
    leaf = jax.ShapeDtypeStruct((2**20, 2**11 + 1), "float32")
    with on_one_device():
        chunks = wire.layout(Packing(leaf), 0)
        _, arrived = jax.eval_shape(lambda x: wire.rounded(x, chunks), leaf)
    assert arrived.shape == leaf.shape
