"""Tests of resize: rows move, shared values stay, and each method's invariants hold."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import exchanged, train

import lsgd_jax as lj


def state_of(tx, nodes, locals, steps=3):
    """Returns parameters and state, on the host, of workers that are not equal."""
    workers, rng = lj.Workers(nodes, locals), np.random.default_rng(0)
    start, *updates = rng.normal(size=(1 + steps, nodes * locals, 3)).astype(np.float32)
    losses = [rng.uniform(size=nodes * locals)] * steps
    seen, state = train(tx, workers, start, updates, losses)
    return seen[-1], workers.fetch(state)


def test_rows_follow_their_worker_and_shared_values_stay():
    state = {"own": np.arange(6).reshape(3, 2), "all": lj.Shared((np.ones(3), 7))}
    other = lj.resize(state, [2, 0, 0, 2])
    assert other["own"].tolist() == [[4, 5], [0, 1], [0, 1], [4, 5]]
    ones, seven = other["all"].value
    assert ones.tolist() == [1, 1, 1] and seven == 7


def test_the_hook_of_every_node_is_called_also_inside_another_node():
    class Node(NamedTuple):
        own: np.ndarray
        inside: Any = ()

        def __lsgd_resized__(self):
            return self._replace(own=-self.own)

    x = np.arange(1, 4)
    other = lj.resize(Node(x, [Node(x, {"deep": Node(x), "x": x})]), [2, 0])
    assert jax.tree.map(np.ndarray.tolist, other) == Node(
        [-3, -1], [Node([-3, -1], {"deep": Node([-3, -1]), "x": [3, 1]})]
    )


# Workers with different out-degrees send different shares, so that weights differ.
UNEVEN = lj.topology.from_edges([[(0, 1), (0, 2), (1, 2), (2, 3), (3, 0)]])


@pytest.mark.slow
@pytest.mark.parametrize(
    "gosgd",
    [False, True],
    ids=["sgp", "gosgd"],
)
def test_weights_are_reset_to_one_so_that_no_worker_counts_twice(gosgd):
    """Without gradients, the workers agree on the plain mean of their starts."""
    before = lj.contrib.gosgd(send_probability=0.5) if gosgd else lj.sgp(UNEVEN)
    after = lj.contrib.gosgd() if gosgd else lj.sgp(lj.topology.exponential(3))
    params, state = state_of(before, 1, 4)
    weight = lambda state: state.pulls[0].rule.weight
    assert np.ptp(weight(state)) > 0.1 and weight(state).sum() == pytest.approx(4)
    sources = [1, 2, 2]
    others, other = lj.resize((params, state), sources)
    assert weight(other).tolist() == [1, 1, 1]
    np.testing.assert_array_equal(others, params[sources])
    met, _ = exchanged(after, lj.Workers(1, 3), others, 80, other)
    expected = np.broadcast_to(params[sources].mean(0), (3, 3))
    np.testing.assert_allclose(met, expected, rtol=1e-5, atol=1e-6)


def test_messages_in_flight_cannot_be_resized():
    ring = lj.topology.ring(4)
    at_once = state_of(lj.osgp(ring, staleness=1), 1, 4)
    assert lj.resize(at_once, [0, 1])[0].shape == (2, 3)
    with pytest.raises(ValueError, match="got staleness=3"):
        lj.resize(state_of(lj.osgp(ring, staleness=3), 1, 4), [0, 1])


def test_a_state_that_is_shared_by_groups_cannot_be_resized():
    _, state = state_of(lj.easgd(0.5, 2, axes="local"), 2, 2)
    with pytest.raises(ValueError, match="the workers must stay the same if a state is"):
        lj.resize(state, [0, 1])


@pytest.mark.slow
def test_losses_follow_their_worker_and_new_workers_elect_the_next_leader():
    tx = lj.lsgd(0.5, 0.5, 2, 4, loss_window=3)
    params, state = state_of(tx, 2, 2, steps=2)
    params, state = lj.resize((params, state), [3, 1, 3])
    local, overall = lj.diagnostics(state)
    assert local.leader.tolist() == overall.leader.tolist() == [-1, -1, -1]
    assert local.score[0] == local.score[2] != local.score[1]
    best = int(np.argmin(overall.score))
    _, state = exchanged(tx, lj.Workers(1, 3), params, 2, state)
    assert lj.diagnostics(state)[1].leader.tolist() == [best] * 3


@pytest.mark.slow
def test_old_leaders_pull_no_worker_until_new_ones_are_elected():
    """Proximal steps keep the parameters of leaders, which led the old workers."""
    tx = lj.lsgd(0.5, 0.5, 2, 4, loss_window=3, local_proximal=1.0)
    params, state = state_of(tx, 2, 2, steps=2)
    params, state = lj.resize((params, state), [3, 1])
    stay, _ = exchanged(tx, lj.Workers(1, 2), params, state=state)
    np.testing.assert_array_equal(stay, params)


@pytest.mark.slow
def test_a_shared_outer_state_continues_with_other_workers():
    """Momentum and anchor stay, so workers without gradients move by the momentum alone."""
    tx = lj.diloco(2, optax.sgd(0.5, momentum=0.9))
    params, state = state_of(tx, 1, 4, steps=4)
    anchor, trace = (
        state.pulls[0].rule.anchor.value,
        state.pulls[0].rule.outer.value[0].trace,
    )
    others, other = lj.resize((params, state), [2])
    met, _ = exchanged(tx, lj.Workers(1, 1), others, 2, other)
    np.testing.assert_allclose(met[0], anchor - 0.5 * 0.9 * trace, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray])
@pytest.mark.parametrize("sources", [[0, 4], [-1, 0], [], [0.0], [True], [[0]], 1])
def test_sources_must_be_indices_of_workers(kind, sources):
    """jax would clamp an index that is out of range, and NumPy counts from the end."""
    with pytest.raises(ValueError, match="`sources` must be .* got sources="):
        lj.resize({"x": kind(np.arange(4.0))}, sources)


def test_device_arrays_and_random_keys():
    tree = {"x": jnp.arange(4.0), "key": jax.random.split(jax.random.key(0), 4)}
    other = lj.resize(tree, [3, 1])
    assert other["x"].tolist() == [3, 1] and other["key"].shape == (2,)
    assert (other["key"][0] == tree["key"][3]).item()
