"""Push-sum: the mass that it conserves, and the weights with which it mixes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import PUSH, PUSHED, UNEQUAL, close, make, mass, rule_of

import lsgd_jax as lj


def landing(state, topology, t):
    """The state after t steps, with what lands of each message in place of the message."""
    in_flight = rule_of(state).in_flight
    for n, message in enumerate(in_flight):
        if t + n < len(in_flight):  # a copy of the start
            taken = topology.taken[(t + n) % len(topology.rounds)]
            share = lambda x, taken=taken: np.einsum("i,i...->i...", taken, np.asarray(x))
            in_flight = (*in_flight[:n], jax.tree.map(share, message), *in_flight[n + 1 :])
    pull = state[1].pulls[0]
    pull = pull._replace(rule=rule_of(state)._replace(in_flight=in_flight))
    return state[0], state[1]._replace(pulls=(pull,))


@pytest.mark.parametrize(
    "topology",
    [pytest.param(UNEQUAL, marks=pytest.mark.slow), PUSHED],
    ids=["unequal", "weighted"],
)
def test_push_sum_conserves_mass(topology):
    run = make(lj.osgp(topology, staleness=3), 4)
    params = run.workers.put(run.start)
    state = run.init(params)
    s, w = mass(params, landing(state, topology, 0))
    weights = []
    for t, batch in enumerate(run.batches, 1):
        step = 0.1 * (np.asarray(params["w"]) - np.asarray(batch["w"])).sum(axis=0)
        params, state = run.compiled(params, state, run.workers.put(batch))
        s_after, w_after = mass(params, landing(state, topology, t))
        close(s_after, s - step, rtol=1e-5, atol=1e-5)
        close(w_after, w)
        s = s_after
        weights.append(np.asarray(rule_of(state).weight))
    assert np.ptp(np.stack(weights), axis=1).max() > 0.1  # weights that are not 1
    # A worker that is not finite has what lands on it, and nothing else.
    numerator, weight = jax.tree.map(np.asarray, rule_of(state).in_flight[0])
    batch = jax.tree.map(lambda g: g.at[2].set(jnp.nan), batch)
    params, _ = run.compiled(params, state, run.workers.put(batch))
    close(params["w"][2], numerator["w"][2] / weight[2])


@pytest.mark.parametrize(
    "staleness, expected",
    [
        # x(t) = x(t - 1) / 2 + x(t - σ) / 2 - 1, with 0 before the first step.
        (2, [-1, -1.5, -2.25, -2.875, -3.5625, -4.21875]),
        (4, [-1, -1.5, -1.75, -1.875, -2.4375, -2.96875]),
    ],
)
def test_workers_begin_with_shares_of_their_common_start_in_flight(staleness, expected):
    tx = optax.chain(optax.sgd(1.0), lj.osgp(staleness=staleness))
    workers = lj.Workers(1, 4)
    x = workers.replicate(jnp.zeros([2]))
    state = workers.map(tx.init)(x)

    def step(x, state):
        u, state = tx.update(jnp.ones([2]), state, x, value=jnp.float32(1))
        return x + u, state

    step = workers.map(step, donate=(0, 1))  # no two messages share a buffer
    for place in expected:
        x, state = step(x, state)
        np.testing.assert_array_equal(x, np.full([4, 2], place))
        np.testing.assert_array_equal(rule_of(state).weight, np.ones(4))


def test_a_start_that_is_not_finite_is_not_in_flight():
    state = lj.osgp(staleness=2).init({"a": jnp.array([1.0, jnp.nan]), "b": jnp.ones(3)})
    ((numerator, weight),) = state.pulls[0].rule.in_flight
    close(numerator, {"a": jnp.zeros(2), "b": jnp.zeros(3)})
    assert weight == 0


def test_push_sum_mixes_with_the_given_weights():
    run = make(lj.sgp(PUSHED), 4)
    s, w = np.asarray(run.start["w"], np.float64), np.ones(4)
    seen, state = run.still(5, run.start)
    for x in seen:
        s, w = np.tensordot(PUSH, s, 1), PUSH @ w
        close(x["w"], s / w[:, None, None])
    close(np.asarray(rule_of(state).weight), w)
    # A worker that is not finite keeps its weight; worker 1 does not get its 0.4.
    with_nan = jax.tree.map(lambda t: t.at[2].set(jnp.nan), run.start)
    seen, state = run.train([with_nan])
    x, y = run.start["w"], seen[0]["w"]
    close(np.asarray(rule_of(state).weight), np.array([0.7, 1.1, 1.3, 0.9]))
    close(y[1], (0.3 * x[0] + 0.8 * x[1]) / 1.1)
    close(y[2], (0.2 * x[0] + 0.1 * x[3]) / 0.3)
