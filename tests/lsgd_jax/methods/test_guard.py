"""EDiT's guard: workers whose pseudo-gradient is anomalous."""

import numpy as np
import optax
import pytest
from harness import inputs_of, train_rows

import lsgd_jax as lj


def test_a_worker_with_a_gradient_20_times_as_large_has_no_influence():
    """At t = 8 worker 1 is anomalous: the rest goes on as if it stood at the anchor."""
    spikes = np.ones((2, 8, 3, 1))
    spikes[:, 7, 1, 0] = 20, 1000
    start, gradients = inputs_of("edit-3")
    guard = lj.Guard(decay=0.3, warmup=2, threshold=3.0, temperature=1.0, clip=1.0)
    tx = optax.chain(optax.sgd(0.1), lj.diloco(2, guard=guard))
    (seen, _), (again, _) = (
        train_rows(tx, start, gradients[:8] * spike) for spike in spikes
    )
    np.testing.assert_array_equal(seen[7], again[7])


@pytest.mark.parametrize("wire", ["float32", pytest.param("int8", marks=pytest.mark.slow)])
def test_all_bad_rolls_back_what_is_bad(wire):
    """Leaf b of all workers jumps after the warm-up: its anchor and momentum stay."""
    outer = optax.sgd(optax.constant_schedule(0.5), 0.9)
    guard = lj.Guard(warmup=2, threshold=1.0, decay=0.3, layerwise=True)
    gradients = np.random.default_rng(5).normal(size=(5, 2, 17))
    gradients[4, :, 12:] *= 100
    tx = optax.chain(optax.sgd(0.1), lj.diloco(1, outer, guard=guard, wire=wire))
    seen, state = train_rows(tx, np.zeros((2, 17)), gradients, 2)
    _, before = train_rows(tx, np.zeros((2, 17)), gradients[:4], 2)
    np.testing.assert_array_equal(seen[4, :, 12:], seen[3, :, 12:])
    assert np.abs(seen[4, :, :12] - seen[3, :, :12]).max() > 1e-2
    outers = [s[1].pulls[0].rule.outer for s in (state, before)]
    after, before = (optax.tree.get(outer, "trace") for outer in outers)
    same = {leaf: bool((after[leaf] == before[leaf]).all()) for leaf in after}
    assert same == {"a": False, "b": True}
    assert optax.tree.get(outers[0], "count").tolist() == [5, 4]


@pytest.mark.slow  # the oracle of `edit_layer` has weights by hand
def test_a_high_temperature_weighs_all_alike():
    start, gradients = np.zeros((3, 17)), np.random.default_rng(6).normal(size=(4, 3, 17))
    alike = lj.Guard(temperature=float("inf"))
    methods = lj.diloco(2, guard=alike), lj.diloco(2)
    seen, plain = (
        train_rows(optax.chain(optax.sgd(0.1), method), start, gradients)[0]
        for method in methods
    )
    np.testing.assert_allclose(seen, plain, rtol=1e-5, atol=1e-6)
