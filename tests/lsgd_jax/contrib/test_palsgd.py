"""PALSGD: the numbers of its equations, and steps that never compute a gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import close

import lsgd_jax as lj
from lsgd_jax._src.exchange.skips import Skips


STEPS = 24
PERIOD = 5
RATE = 0.1


def rate_at(t):
    return RATE * (1 - t / 100)


def method(**changed):
    options = dict(period=PERIOD, learning_rate=rate_at, probability=0.4, pull=2.0, seed=3)
    outer = optax.sgd(0.5, momentum=0.5)
    return lj.contrib.palsgd(**{**options, "outer": outer, **changed})


def by_hand(start, grads):
    """The equations in NumPy, with a momentum of 0.9 in the base optimizer."""
    x = start.copy()
    buffer = np.zeros_like(x)
    anchor = start.mean(axis=0)
    outer = np.zeros_like(anchor)
    skips = Skips(0.4, 3)
    seen = []
    for t, g in enumerate(grads, 1):
        rate = rate_at(t)
        if skips.at(t):
            x = x - rate / 0.4 * 2.0 * (x - anchor)
        else:
            buffer = 0.9 * buffer + g
            x = x - rate / (1 - 0.4) * buffer
        if t % PERIOD == 0:
            outer = 0.5 * outer + anchor - x.mean(axis=0)
            anchor = anchor - 0.5 * outer
            x = np.broadcast_to(anchor, x.shape).copy()
        seen.append(x)
    return seen


@pytest.fixture(scope="module")
def data():
    draw = np.random.default_rng(0).normal
    start = draw(size=(4, 3)).astype(np.float32)
    return start, draw(size=(STEPS, 4, 3)).astype(np.float32)


def base():
    return optax.sgd(lambda count: rate_at(count + 1), momentum=0.9)


def in_a_chain(workers, method, start, grads):
    tx = optax.chain(base(), method)

    def step(x, state, g, phase):
        u, state = tx.update(g, state, x, phase=phase)
        return lj.apply_updates(x, u), state

    def skip(x, state, phase):
        x, own = method.skip(x, state[-1], phase=phase)
        return x, (*state[:-1], own)

    step = workers.map(step, static="phase")
    skip = workers.map(skip, static="phase")
    x = workers.put(start)
    state = workers.map(tx.init)(x)
    for t, g in enumerate(grads, 1):
        phase = method.phase(t)
        if phase.needs_gradient:
            x, state = step(x, state, workers.put(g), phase=phase)
        else:
            x, state = skip(x, state, phase=phase)
        yield workers.fetch(x)
    (level,) = lj.diagnostics(workers.fetch(state))
    assert not level.misplaced.any()


def around_a_step(workers, method, start, grads):
    # optax counts the steps with a gradient; the rate is one of all steps.
    moments = optax.trace(0.9)

    def train(state, g, t):
        u, of_base = moments.update(g, state["base"])
        x = jax.tree.map(lambda x, u: x - rate_at(t) * u, state["params"], u)
        return {"params": x, "base": of_base}

    program = lj.around(train, method, loss=None)
    step = workers.map(program, static="phase")
    skip = workers.map(program.skip, static="phase")
    state = workers.put({"params": start, "base": moments.init(start)})
    state = workers.map(program.init)(state)
    for t, g in enumerate(grads, 1):
        phase = program.phase(t)
        if phase.needs_gradient:
            now = workers.put(np.full([4], t, np.float32))
            state = step(state, workers.put(g), now, phase=phase)
        else:
            state = skip(state, phase=phase)
        yield workers.fetch(state.state["params"])


def test_the_numbers_are_those_of_the_equations(data):
    found = around_a_step(lj.Workers(2, 2), method(), *data)
    for got, expected in zip(found, by_hand(*data)):
        close(got, expected)


@pytest.mark.slow
def test_a_chain_skips_its_optimizer(data):
    """Its rate counts the steps that it sees, so it is constant here."""
    start, grads = data
    constant = method(learning_rate=RATE)
    chain = in_a_chain(lj.Workers(2, 2), constant, start, grads)
    x = start.copy()
    anchor = start.mean(axis=0)
    seen = 0
    for t, got in enumerate(chain, 1):
        if t == PERIOD:
            break
        if constant.phase(t).needs_gradient:
            seen += 1
            so_far = _with(constant, grads)[:seen]
            momentum = sum(0.9 ** (seen - 1 - i) * g for i, g in enumerate(so_far))
            x = x - rate_at(seen) / 0.6 * momentum
        else:
            x = x - RATE / 0.4 * 2.0 * (x - anchor)
        close(got, x)


def _with(method, grads):
    """The gradients of the steps that compute one."""
    return [g for t, g in enumerate(grads, 1) if method.phase(t).needs_gradient]


def test_without_skipped_steps_it_is_diloco(data):
    start, grads = data
    never = method(probability=0.0)
    same = lj.diloco(PERIOD, optax.sgd(0.5, momentum=0.5))
    pairs = [in_a_chain(lj.Workers(2, 2), each, start, grads) for each in (never, same)]
    for got, expected in zip(*pairs):
        np.testing.assert_array_equal(got, expected)


def test_a_step_of_the_wrong_kind_is_misplaced(data):
    start, _ = data
    chosen = method()
    t = next(t for t in range(2, 20) if not chosen.phase(t).needs_gradient)
    workers = lj.Workers(2, 2)
    x = workers.put(start)
    state = workers.map(chosen.init)(x)
    skip = workers.map(chosen.skip, static="phase")
    for _ in range(t - 1):
        x, state = skip(x, state, phase=chosen.phase(1)._replace(needs_gradient=False))
    wrong = sum(chosen.phase(i).needs_gradient for i in range(1, t))
    assert lj.diagnostics(workers.fetch(state))[0].misplaced.tolist() == [wrong] * 4


def test_hosts_and_programs_draw_alike():
    for seed in (0, 7, -1):
        skips = Skips(0.2, seed)
        on_host = [skips.at(t) for t in range(1, 5001)]
        np.testing.assert_array_equal(skips.at(jnp.arange(1, 5001)), on_host)
        together = skips.at(np.arange(1, 5001))  # nothing is compiled for them
        assert isinstance(together, np.ndarray)
        np.testing.assert_array_equal(together, on_host)
        assert not on_host[0] and abs(np.mean(on_host) - 0.2) < 0.02
    assert Skips(0.2, 0) != Skips(0.2, 7)
    # A run that resumes with another release skips the same steps.
    assert [t for t in range(1, 13) if Skips(0.4, 5).at(t)] == [5, 7, 9, 12]


def test_a_pull_that_would_overshoot_ends_at_the_anchor():
    chosen = lj.contrib.palsgd(100, 1.0, 0.5, pull=3.0, seed=1)
    workers = lj.Workers(1, 2)
    x = workers.put(np.array([[1.0], [3.0]], np.float32))
    state = workers.map(chosen.init)(x)
    skip = workers.map(chosen.skip)
    for t in range(1, 10):
        x, state = skip(x, state)
        if not chosen.phase(t).needs_gradient:
            assert workers.fetch(x).tolist() == [[2.0], [2.0]]
            return
    raise AssertionError("no step without a gradient")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"probability": 1.0}, r"`probability` must be in \[0, 1\), got probability=1.0"),
        ({"seed": 0.5}, "`seed` must be an int, got seed=0.5"),
        ({"pull": -1.0}, "`pull` must be at least 0"),
        ({"after": 4}, "`palsgd` takes no `after`"),
    ],
)
def test_impossible_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        method(**options)


def test_asynchronous_workers_refuse_it():
    with pytest.raises(
        ValueError, match="asynchronous workers compute a gradient at every"
    ):
        lj.asynchronous.Pulls(method())
