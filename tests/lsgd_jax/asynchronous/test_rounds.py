"""Rounds on a budget: equal to lock step at equal speeds, and otherwise as counted."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lsgd_jax as lj


W, STEPS = 4, 12
NARROW = lj.lsgd(0.2, 0.4, 3, 5, loss_window=2, wire="int8")
PROXIMAL = lj.lsgd(0.2, 0.4, 5, 7, local_proximal=0.5)


class Ahead:
    """A store where another process has already taken some steps of each round."""

    def __init__(self, amount):
        self.amount, self.counts = amount, {}

    def increment(self, key, amount):
        self.counts[key] = self.counts.get(key, self.amount) + amount
        return self.counts[key]


def grad(x, own):
    """Of a quadratic, another one for each worker."""
    return jax.tree.map(lambda x: (own + 1) * (x - own), x)


def begin(workers, tx):
    x = {"w": jnp.arange(W * 3.0).reshape(W, 3), "b": jnp.ones((W, 1))}
    x, own = workers.put((x, jnp.arange(float(W)) / W))
    return x, workers.map(tx.init)(x), own


def stepping(tx, worst=None):
    def step(x, state, own, t):
        loss = own + jnp.mean(x["w"] ** 2)
        if worst is not None:
            loss = jnp.where((own == 0.5) & (t.value == worst), jnp.nan, loss)
        u, state = tx.update(grad(x, own), state, x, value=loss)
        return lj.apply_updates(x, u), state

    return step


def lock_step(exchange, worst):
    workers = lj.Workers(2, 2)
    tx = optax.chain(optax.sgd(0.05, momentum=0.9), exchange)
    x, state, own = begin(workers, tx)
    step = workers.map(stepping(tx, worst))
    for t in range(STEPS):
        x, state = step(x, state, own, workers.share(jnp.int32(t)))
    return x, state


def rounds_of(exchange, worst=None, store=None, steps=STEPS):
    workers, exchange = lj.Workers(2, 2), lj.asynchronous.on_budget(exchange)
    tx = optax.chain(optax.sgd(0.05, momentum=0.9), exchange)
    rounds = lj.asynchronous.Rounds(workers, exchange, store)
    x, state, own = begin(workers, tx)
    step, mine, t = rounds.local.map(stepping(tx, worst)), rounds.enter(own), 0
    for until in rounds.ends(0, steps):
        here = rounds.enter((x, state))
        for _ in rounds.claims(until):
            here = step(*here, mine, rounds.local.share(jnp.int32(t)))
            t += 1
        x, state = rounds.meet(*rounds.leave(here), until)
    return x, state


@pytest.mark.parametrize(
    "exchange, worst",
    [
        (lj.lsgd(0.2, 0.4, 2, 4, loss_window=3), 3),  # nan at a step that is due
        pytest.param(lj.lsgd(0.2, 0.4, 3, 5), None, marks=pytest.mark.slow),
        pytest.param(NARROW, 7, marks=pytest.mark.slow),
        pytest.param(lj.diloco(4), None, marks=pytest.mark.slow),
        pytest.param(lj.easgd(0.3, 3), None, marks=pytest.mark.slow),
        pytest.param(
            lj.lsgd(0.2, 0.4, 5, 7, local_proximal=0.5), 2, marks=pytest.mark.slow
        ),
    ],
)
def test_with_one_process_the_numbers_are_those_of_lock_step(exchange, worst):
    (x, state), (y, rounds) = lock_step(exchange, worst), rounds_of(exchange, worst)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-6, 1e-6), x, y)
    for a, b in zip(lj.diagnostics(state), lj.diagnostics(rounds)):
        assert (a.exchanges, a.bytes_sent, int(a.steps)) == (
            b.exchanges,
            b.bytes_sent,
            int(b.steps),
        )
        assert b.exchanges and not b.misplaced.any()
        assert a.restored.tolist() == b.restored.tolist()
    assert any(level.restored.any() for level in lj.diagnostics(rounds)) == bool(worst)
    assert lj.asynchronous.steps_taken(rounds).tolist() == [STEPS] * W


@pytest.mark.parametrize(
    "ahead, taken", [(4, 3 + 3 + 1), pytest.param(1000, 3, marks=pytest.mark.slow)]
)
def test_steps_that_others_take_are_of_the_budget_and_each_takes_one(ahead, taken):
    """Of 16, 16 and 4 steps; a claim is of four."""
    exchange = lj.lsgd(0.2, 0.4, 4, 4)
    _, state = rounds_of(exchange, store=Ahead(ahead), steps=9)
    assert lj.asynchronous.steps_taken(state).tolist() == [taken] * W


def test_rounds_end_where_a_pull_is_due_and_at_the_end():
    exchange = lj.asynchronous.on_budget(lj.lsgd(0.2, 0.4, 4, 6))
    rounds = lj.asynchronous.Rounds(lj.Workers(1, 2), exchange)
    assert list(rounds.ends(0, 9)) == [2, 4, 6, 8, 9]
    assert list(rounds.ends(5, 8)) == [6, 8]  # resumed after a round that was cut short
    assert [until for until in range(1, 13) if rounds.is_due(until)] == [4, 6, 8, 12]


@pytest.mark.parametrize(
    "exchange, message",
    [
        (lj.allreduce(), "`exchange` must be a method that pulls"),
        (lj.lsgd(0.0, 0.0), "`exchange` must be a method that pulls"),
        (lj.lsgd(delay=1), "no offset and no delay, got offset=0, delay=1"),
    ],
)
def test_what_has_no_form_on_a_budget_is_refused(exchange, message):
    with pytest.raises(ValueError, match=message):
        lj.asynchronous.on_budget(exchange)
