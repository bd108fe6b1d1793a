"""The steps at which a pull acts: by their definition, on the host and in programs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import close, mostly_slow

import lsgd_jax as lj
from lsgd_jax._src.exchange.schedule import Schedule


GROWING = lj.Periods({0: 1, 3: 4, 12: 2})
SCHEDULES = {
    "every step": Schedule(1),
    "plain": Schedule(3),
    "offset": Schedule(4, (1,), 3),
    "fragments": Schedule(6, (3, 5, 1), 3),
    "a whole period late": Schedule(3, (0,), 3, after=4),
    "growing": Schedule(GROWING),
    "growing late": Schedule(lj.Periods({0: 3, 7: 5}), (0,), 2, after=2),
}
STEPS = range(1, 31)


def by_definition(schedule):
    """For each step the fragments that agree, send and land at it."""

    def fragments(t, delay):
        if t <= schedule.after:
            return []
        since, every = schedule.after, schedule.every
        if isinstance(every, lj.Periods):
            begun = [piece for piece in every.pieces if piece[0] + schedule.after < t]
            since, every = begun[-1][0] + schedule.after, begun[-1][1]
        offsets = enumerate(schedule.offsets)
        return [i for i, o in offsets if (t - since - o + delay) % every == 0]

    agree = {t: fragments(t, schedule.delay) for t in range(STEPS[-1] + 1)}
    land = {t: fragments(t, 0) for t in STEPS}
    send = {t: agree[t - 1] for t in STEPS} if schedule.delay else land
    return agree, send, land


@pytest.mark.parametrize("name", SCHEDULES)
def test_acts_are_those_of_the_definition(name):
    schedule = SCHEDULES[name]
    expected = by_definition(schedule)
    acts = schedule.agrees, schedule.sends, schedule.lands
    which = (
        schedule.fragment_agreeing,
        schedule.fragment_sending,
        schedule.fragment_landing,
    )
    ts = jnp.array(STEPS)
    for due, act, index in zip(expected, acts, which):
        found = [bool(act(t)) for t in STEPS]
        assert found == [bool(due[t]) for t in STEPS]
        program = jax.jit(act)
        np.testing.assert_array_equal([program(t) for t in ts], found)
        fragments = jax.vmap(index)(ts)
        for t in np.flatnonzero(found) + 1:
            assert due[t] == [fragments[t - 1]]


@pytest.mark.parametrize("name", SCHEDULES)
def test_exchanges_are_numbered_by_their_period(name):
    schedule = SCHEDULES[name]
    steps = range(schedule.after + 1, STEPS[-1])
    numbers = [schedule.number(t) for t in steps]
    np.testing.assert_array_equal(jax.vmap(schedule.number)(jnp.array(steps)), numbers)
    assert numbers[0] == 1 and set(np.diff(numbers)) <= {0, 1}
    for before, after, t in zip(numbers, numbers[1:], steps):
        if before != after:
            assert schedule.end_of(before) == t
            every, since = schedule.period_at(t)
            assert (t - since) % every == 0


@pytest.mark.parametrize("name", SCHEDULES)
def test_messages_come_in_runs_of_one_period(name):
    for offset in SCHEDULES[name].offsets:
        schedule = dataclasses.replace(SCHEDULES[name], offsets=(offset,))
        expected = [t for t in STEPS if schedule.sends(t)]
        runs = schedule.messages(len(expected))
        found = [range(first, first + every * n, every) for every, first, n in runs]
        assert [t for steps in found for t in steps] == expected


@pytest.mark.parametrize("name", SCHEDULES)
def test_phases_are_those_of_all_steps(name):
    given = SCHEDULES[name]
    fragments = len(given.offsets)
    offset = given.offsets if fragments > 1 else given.offsets[0]
    pull = lj.Pull(
        lj.rules.average(),
        1.0,
        every=given.every,
        offset=offset,
        delay=given.delay,
        after=given.after,
        fragments=fragments,
        late="add" if given.delay == given.every else "replace",
    )
    assert pull.schedule == given
    method = lj.exchange(pull)
    seen = [method.phase(t) for t in range(2, 60)]
    assert set(method.phases()) == set(seen)
    first = next(t for t in range(1, 60) if method.phase(t).sends or given.delay == 0)
    assert given.first_landing() >= first


def test_a_change_waits_for_the_end_of_the_round():
    assert lj.Periods({0: 4, 5: 3, 6: 2}).pieces == ((0, 4), (8, 2))
    assert lj.Periods({0: 4, 8: 4, 12: 8}).pieces == ((0, 4), (12, 8))
    assert str(lj.Periods({0: 4, 1000: 8})) == "4, 1000: 8"


def test_the_quadratic_rule_by_hand():
    """After a warm-up of five steps; at a rate of 0 the last round ends with the run."""
    rates = np.array([0.0, 0.1, 0.2, 0.3, 0.4, 0.4, 0.3, 0.2, 0.2, 0.2, 0.1, 0.1, 0.0, 0.0])
    periods = lj.Periods.quadratic(lambda t: jnp.array(rates)[t], 14, alpha=0.4, smallest=1)
    # At steps 0 to 6 one step each: (0.4 / 0.4)², and ⌊(0.4 / 0.3)²⌋ = 1; then 4, then ∞.
    assert periods.pieces == ((0, 1), (7, 4), (11, 3))
    constant = lj.Periods.quadratic(0.1, 20, alpha=0.25, smallest=2)
    assert constant.pieces == ((0, 6), (18, 2))


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: lj.Periods({}), "`pieces` must have a period from 0 on"),
        (lambda: lj.Periods({1: 4}), "`pieces` must have a period from 0 on"),
        (lambda: lj.Periods({0: 0}), "`every` must be a positive int, got every=0"),
        (lambda: lj.Periods.quadratic(0.1, 8, alpha=0.0), "`alpha` must be positive"),
        (lambda: lj.local_sgd(4, after=-1), "`after` must be an int of at least 0"),
        (lambda: lj.local_sgd(GROWING, delay=1), r"`delay` must be an int in \[0, 1\)"),
        (lambda: lj.local_sgd(GROWING, fragments=2), "`fragments` must be 1 where"),
        (
            lambda: lj.Pull(lj.rules.average(), 1.0, 4, offset=(1, 1), fragments=2),
            "`offset` must be an int, or a tuple of one for each fragment, all different",
        ),
        (
            lambda: lj.Pull(lj.rules.average(), 1.0, lj.Periods({0: 2, 4: 4}), offset=1),
            "`offset` must be 0 where the period changes",
        ),
        (
            lambda: lj.lsgd(local_period=GROWING, local_proximal=0.1),
            "`local_period` must be a positive int, got local_period=1, 3: 4, 15: 2",
        ),
    ],
)
def test_impossible_schedules_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def losses_and_rows(steps=14, W=4):
    draw = np.random.default_rng(1).normal
    return draw(size=(W, 3)).astype(np.float32), draw(size=(steps, W, 3)).astype(np.float32)


@pytest.mark.parametrize(
    "form, delay",
    mostly_slow(
        [(form, delay) for form in ("count", "phase") for delay in (0, 2)],
        fast=[("count", 0), ("phase", 2)],
    ),
)
def test_local_sgd_with_a_growing_period_against_numpy(delay, form):
    periods = lj.Periods({0: 3, 5: 4})  # exchanges at 3, 6, 10 and 14
    start, grads = losses_and_rows()
    expected, agreed, x = [], {}, start.copy()
    for t, g in enumerate(grads, 1):
        x = x - 0.1 * g
        agreed[t] = x.mean(axis=0)
        if t in (3, 6, 10, 14):
            x = np.broadcast_to(agreed[t - delay], x.shape).copy()
        expected.append(x)
    workers = lj.Workers(2, 2)
    method = lj.local_sgd(periods, delay=delay)
    tx = optax.chain(optax.sgd(0.1), method)

    def step(x, state, g, phase):
        u, state = tx.update(g, state, x, phase=phase)
        return lj.apply_updates(x, u), state

    step = workers.map(step, static="phase")
    x = workers.put(start)
    state = workers.map(tx.init)(x)
    for t, (g, y) in enumerate(zip(grads, expected), 1):
        phase = method.phase(t) if form == "phase" else None
        x, state = step(x, state, workers.put(g), phase=phase)
        close(workers.fetch(x), y)
    (level,) = lj.diagnostics(workers.fetch(state))
    assert level.exchanges == 4 and not level.misplaced.any()
    assert level.period == 4 and level.is_due(14) == (delay == 0)
    (level,) = lj.diagnostics(workers.fetch(state), method)
    due = [t for t in range(1, 15) if level.is_due(t)]
    assert due == [t - delay + (delay > 0) for t in (3, 6, 10, 14)]
    with pytest.raises(ValueError, match="`method` must be that of the state, which has 1"):
        lj.diagnostics(state, lj.lsgd())


@pytest.mark.slow
def test_workers_train_alone_before_the_first_period():
    """From there on they train as those that begin with it."""
    start, grads = losses_and_rows(12)
    method = functools.partial(lj.local_sgd, 4, fragments=2, delay=1)
    tree = lambda x: {"a": x, "b": 2 * x}
    x = tree(start)

    def trained(method, x, grads):
        workers = lj.Workers(2, 2)
        tx = optax.chain(optax.sgd(0.1), method)
        step = workers.map(lambda x, s, g: _step(tx, x, s, g))
        x = workers.put(x)
        state = workers.map(tx.init)(x)
        for g in grads:
            x, state = step(x, state, workers.put(tree(g)))
        return workers.fetch(x), lj.diagnostics(workers.fetch(state))

    alone, _ = trained(lj.exchange(), x, grads[:4])
    got, _ = trained(method(after=4), x, grads[:4])
    close(got, alone)
    got, levels = trained(method(after=4), x, grads)
    expected, _ = trained(method(), alone, grads[4:])
    close(got, expected)
    assert [level.exchanges for level in levels] == [2, 2]


def _step(tx, x, state, g):
    u, state = tx.update(g, state, x)
    return lj.apply_updates(x, u), state
