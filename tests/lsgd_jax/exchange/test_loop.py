"""loop: the exchange as a program of its own, run by a host that counts the steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import COLLECTIVE, METHODS, RULES, mostly_slow
from loops import (
    STEPS,
    begun,
    both,
    both_starts,
    draw,
    same,
    sharded_steps,
    start,
    state_in,
    targets_of,
    update,
    workers_of,
)

import lsgd_jax as lj
from lsgd_jax._src.exchange import loop


def check_loop(train, W=4, start=start):
    """Asserts that a loop returns what a step by phases does, bit for bit; returns it.

    It donates the state. What a step does not return must be alive nevertheless.
    """
    workers = workers_of(W)
    run = workers.loop(train, donate=0)
    step = workers.map(train, static="phase")
    state = begun(train, workers, start)
    other = jax.tree.map(jnp.copy, state)
    for t, target in enumerate(map(workers.put, targets_of(W)), start=1):
        expected = step(other, target, phase=train.phase(t, workers.sizes))
        found = run(state, target)
        same(found, expected)
        state = state_in(found)
        other = state_in(expected)
    assert not any(level.misplaced.any() for level in lj.diagnostics(state))
    assert all(level.exchanges for level in lj.diagnostics(state))
    return run


PULLING = {
    name: functools.partial(METHODS[name].make, 4)
    for name in RULES
    if not (METHODS[name].first or METHODS[name].around or name.startswith("palsgd"))
}
# Where steps are whole, the programs are those of the phases, and some rows are enough.
ALONE = [name for name, make in PULLING.items() if lj.outer(make()).is_separable]
CASES = {name: PULLING[name] for name in (*ALONE, "diloco_streaming", "sgp", "parle")} | {
    "fragments": lambda: lj.diloco(4, fragments=2),
    "equal fragments": lambda: lj.diloco(4, fragments=2, scan_axis=0),
    "two levels as int8": lambda: lj.lsgd(0.3, 0.2, 2, 4, wire="int8"),
    "changing periods": lambda: lj.local_sgd(lj.Periods({0: 1, 3: 2}), after=2),
    "host": lambda: lj.diloco(2, memory="host"),
}
FAST = ["lsgd", "changing periods"]


@pytest.mark.parametrize("name", mostly_slow(CASES, FAST))
def test_the_numbers_are_those_of_the_phases(name):
    """Also with a worker that is not finite, which an exchange restores."""
    train = lj.around(update, CASES[name]())
    run = check_loop(train)
    compiled = [program._cache_size() for program in run._programs.values()]
    phases = {train.phase(t, workers_of(4).sizes) for t in range(1, STEPS + 1)}
    others = phases - {lj.Phase()} if train.is_separable else phases
    assert compiled == [1] * (train.is_separable + len(others))


def rows(params):
    """Parameters that are stacks of layers alone, so that fragments are alike."""
    return start({"w": params["w"], "b": params["b"]})


def pair(state, target):
    target.pop("c")
    return update(state, target)


def test_equal_fragments_share_one_program():
    method = lj.diloco(4, fragments=4, scan_axis=0)
    run = check_loop(lj.around(pair, method), W=1, start=rows)
    assert [program._cache_size() for program in run._programs.values()] == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("W", [1, 4])
def test_nested_methods_have_their_own_exchanges(W):
    train = lj.around(
        lj.around(both, lj.local_sgd(1), params="one"), lj.diloco(2), params="two"
    )
    run = check_loop(train, W, both_starts)
    # The step, the exchange of one, and that of both.
    assert train.is_separable and len(run._programs) == 3


@pytest.mark.slow  # rows of the table have whole steps, too
def test_the_own_step_of_an_outer_method_comes_after_the_inner_exchange():
    inner = lj.around(update, lj.local_sgd(2))
    train = lj.around(inner, lj.lsgd(0.3, 0.2, 2, 4), params=("params",))
    check_loop(train)
    assert not train.is_separable


def test_the_step_sends_nothing_and_does_not_branch():
    workers = workers_of(4)
    train = lj.around(update, lj.lsgd(0.3, 0.2, 2, 4))
    run = workers.loop(train)
    state = begun(train, workers)
    target = workers.put(targets_of(4)[0])
    for _ in range(2):
        state, _ = run(state, target)
    text = lambda program, *args: program.lower(*args).compile().as_text()
    step = text(run._programs[None], state, target)
    before = text(workers.map(update), state.state, target)
    branches = [program.count(" conditional(") for program in (step, before)]
    assert not COLLECTIVE.search(step) and branches == [1, 1]  # of the optimizer
    exchange = run._programs[train.at_counts([1], None)]
    counts = workers.put((np.ones(4, bool), np.ones(4, bool)))
    exchange = text(exchange, state, (counts,))
    assert COLLECTIVE.search(exchange)


@pytest.mark.slow  # the numbers are those of the table
@pytest.mark.parametrize("kind", ["automatic", "explicit"])
def test_shards_inside_a_worker_stay_where_they_are(kind):
    workers = lj.Workers(2, 1, inside={"fsdp": 2}, devices=jax.devices()[:4])
    if kind == "explicit":
        mesh = jax.make_mesh((2, 2), ("node", "fsdp"), devices=jax.devices()[:4])
        workers = lj.Workers(mesh=mesh, axes="node")
    train = lj.around(update, lj.diloco(2, wire="int8"))
    run = workers.loop(train, donate=0)
    for state, other in sharded_steps(train, workers, run, 3):
        same(state, other)
        for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(other)):
            assert x.sharding.is_equivalent_to(y.sharding, x.ndim)
    assert "fsdp" in state.state["params"]["w"].sharding.spec


# The count of steps


def test_the_count_is_read_once_and_again_from_another_state(monkeypatch):
    """A state that was saved between exchanges continues at its own step."""
    reads = []
    read = loop._read
    monkeypatch.setattr(loop, "_read", lambda count: reads.append(read(count)) or reads[-1])
    workers = workers_of(1)
    train = lj.around(update, lj.local_sgd(3))
    run = workers.loop(train)
    state = begun(train, workers)
    targets = [workers.put(target) for target in targets_of(1)]
    for target in targets[:4]:
        state, _ = run(state, target)
    assert reads == [0]
    saved = workers.fetch(state)
    for target in targets[4:6]:
        state, _ = run(state, target)
    assert reads == [0]
    again = workers.put(saved)
    for target in targets[4:6]:
        again, _ = run(again, target)
    assert reads == [0, 4]
    same(again, state)
    assert lj.diagnostics(again)[0].exchanges == 2
    assert not lj.diagnostics(again)[0].misplaced.any()


@pytest.fixture(scope="module")
def deferred():
    """One worker with a pull at each second step: programs, and the state after step 2."""
    o = lj.outer(lj.diloco(2, axes=()))
    defer = jax.jit(lambda x, s: o.defer(x + 1, s, loss=0.0))
    exchange = jax.jit(functools.partial(o.exchange, phase=o.phase(2)))
    x, state = jnp.float32(0), o.init(jnp.float32(0))
    for count in (1, -2):
        x, state, counts = defer(x, state)
        assert int(state.exchange.count.value) == count
    return o, defer, exchange, x, state, counts


def test_a_step_after_an_exchange_that_was_omitted_counts_as_misplaced(deferred):
    o, defer, _, x, state, _ = deferred
    _, after, _ = defer(x, state)
    whole = jax.jit(lambda x, s: o.step(x + 1, s, loss=0.0))(x, state)[1]
    by_phase = o.step(x, state, loss=0.0, phase=o.phase(3))[1]
    for found in (after, whole, by_phase):
        (level,) = lj.diagnostics(found)
        assert (int(level.steps), int(level.misplaced), level.exchanges) == (3, 1, 0)
    # What the state itself says, which has taken two steps.
    assert int(lj.diagnostics(state)[0].steps) == 2
    tx = lj.diloco(2, axes=())
    chained = tx.init(x)._replace(count=state.exchange.count)
    _, chained = tx.update(jnp.float32(0), chained, x, loss=0.0)
    assert (int(chained.count.value), int(chained.misplaced)) == (3, 1)


def test_an_exchange_without_its_step_counts_as_misplaced(deferred):
    _, _, exchange, x, state, counts = deferred
    x, once = exchange(x, state, counts)
    assert (int(once.exchange.count.value), int(once.exchange.misplaced)) == (2, 0)
    _, twice = exchange(x, once, counts)
    assert (int(twice.exchange.count.value), int(twice.exchange.misplaced)) == (2, 1)


# Compilers of the user, buffers, and what is refused

COMPILERS = {
    "pmap": functools.partial(jax.pmap, axis_name="w"),
    "vmap": lambda fn, **options: jax.jit(jax.vmap(fn, axis_name="w"), **options),
}


MAPPED = [("pmap", "local_sgd"), ("vmap", "local_sgd"), ("vmap", "wagma")]


@pytest.mark.slow
@pytest.mark.parametrize("name, method", MAPPED)
def test_programs_that_map_over_workers_themselves(name, method):
    """With donated buffers; the rounds of a graph are programs of their own."""
    over = COMPILERS[name]
    make = {"local_sgd": lj.local_sgd, "wagma": functools.partial(lj.wagma, 2)}[method]
    train = lj.around(update, make(3, axes="w"))
    run = train.loop(over, sizes={"w": 4}, donate_argnums=0)
    state = other = over(lambda x: train.init(start(x)))(draw(100, 4))
    state = jax.tree.map(jnp.copy, state)
    step = over(train)
    for target in targets_of(4)[:4]:
        before = state
        state, loss = run(state, target)
        other, there = step(other, target)
        np.testing.assert_allclose(loss, there, rtol=1e-5)
        assert before.state["params"]["w"].is_deleted()
    x, y = (each.state["params"]["w"] for each in (state, other))
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)
    # The program of the next round is compiled, too, and has not been called yet.
    ahead = {"local_sgd": 0, "wagma": 1}[method]
    assert len(run._programs) == {"local_sgd": 2, "wagma": 4}[method] + ahead
    assert lj.diagnostics(state)[0].exchanges and not state.outer.exchange.misplaced.any()


@pytest.mark.parametrize(
    "step, message",
    [
        (update, r"`step` must be .* `lj.around\(step, method\)`, got <function update"),
        (lj.around(update, lj.contrib.palsgd(2)), "has steps without a gradient: call the"),
    ],
)
def test_a_step_that_cannot_loop_is_refused(step, message):
    with pytest.raises(ValueError, match=message):
        workers_of(1).loop(step)


def test_a_state_that_is_not_that_of_the_loop_is_refused():
    run = workers_of(1).loop(lj.around(update, lj.local_sgd(2)))
    with pytest.raises(ValueError, match="the `AroundState` that `init` made .* got dict"):
        run(start(draw(100, 1)), targets_of(1)[0])
    state = run.__wrapped__.init(start(draw(100, 1)))
    with pytest.raises(ValueError, match="outside of `jax.jit`"):
        jax.jit(run)(state, targets_of(1)[0])
