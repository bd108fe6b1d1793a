"""beside: delayed exchanges on devices beside those that train, while steps run."""

import jax
import numpy as np
import pytest
from harness import COLLECTIVE, mostly_slow
from harness import train as trained
from loops import (
    begun,
    both,
    both_starts,
    same,
    sharded_steps,
    start,
    state_in,
    targets_of,
    update,
)

import lsgd_jax as lj
from lsgd_jax._src.exchange.beside import _welcomed


WORKERS = lj.Workers(2, 2, devices=jax.devices()[:4])
CASES = {
    "lsgd": lambda: lj.lsgd(0.3, 0.2, 2, 4, 3, delay=1),
    "local_sgd": lambda: lj.local_sgd(4, delay=3),
    "diloco": lambda: lj.diloco(4, delay=2, mixing=0.5),
    "easgd": lambda: lj.easgd(0.3, 4, delay=2),
    "trimmed mean": lambda: lj.exchange(
        lj.Pull(lj.rules.robust_mean("trimmed_mean"), 1.0, 4, delay=1)
    ),
    "bfloat16": lambda: lj.lsgd(0.3, 0.2, 2, 4, wire="bfloat16", delay=1),
    "verify": lambda: lj.diloco(4, delay=2, verify=True),
    "one level in the step": lambda: lj.exchange(
        lj.Pull(lj.rules.leader("local"), 0.3, 2),
        lj.Pull(lj.rules.average(), 1.0, 4, delay=4, late="add"),
    ),
    "int8": lambda: lj.diloco(4, delay=2, wire="int8"),
    "int4 in fragments": lambda: lj.diloco(4, fragments=2, delay=1, wire="int4"),
    "added, int8 in fragments": lambda: lj.diloco(
        4, fragments=2, delay=3, late="add", wire="int8", mixing=0.5
    ),
    "added, verify": lambda: lj.lsgd(0.3, 0.2, 2, 4, delay=2, late="add", verify=True),
    "top-k": lambda: lj.contrib.sparse_diloco(4, delay=2),
    "changing periods": lambda: lj.local_sgd(lj.Periods({0: 2, 4: 3}), delay=1),
}
FAST = ["one level in the step"]


def near(found, expected):
    """XLA fuses multiplications and additions otherwise in a program of its own."""

    def compare(a, b):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 if a.dtype.kind == "f" else 0)

    assert jax.tree.structure(found) == jax.tree.structure(expected)
    jax.tree.map(compare, found, expected)


def steps(run, train, state, first=1, donate=True):
    """Yields (t, results) of the remaining steps of a loop, or of a step by phases."""
    for t, target in enumerate(targets_of(4)[first - 1 :], start=first):
        target = WORKERS.put(target)
        by_phase = {} if donate else {"phase": train.phase(t, WORKERS.sizes)}
        results = run(state, target, **by_phase)
        yield t, results
        state = state_in(results)


def both_ways(train, start=start):
    """The steps beside, and those with the exchange inside the step."""
    beside = WORKERS.loop(train, donate=0, beside=True)
    inside = WORKERS.map(train, static="phase")
    found = steps(beside, train, begun(train, WORKERS, start))
    expected = steps(inside, train, begun(train, WORKERS, start), donate=False)
    return beside, zip(found, expected)


@pytest.mark.parametrize("name", mostly_slow(CASES, FAST))
def test_states_and_numbers_are_those_of_the_exchange_in_the_step(name):
    """Also with a worker that is not finite, which an exchange restores."""
    train = lj.around(update, CASES[name]())
    run, pairs = both_ways(train)
    for (_, found), (_, expected) in pairs:
        near(found, expected)
    pulls = lj.diagnostics(state_in(found))
    assert not any(pull.misplaced.any() for pull in pulls)
    assert all(pull.exchanges for pull in pulls) and run.waited >= 0


def test_a_step_that_raises_an_error_can_be_taken_again():
    train = lj.around(update, lj.local_sgd(3, delay=2))
    run = WORKERS.loop(train, donate=0, beside=True)
    inside = WORKERS.map(train, static="phase")
    state = begun(train, WORKERS)
    expected = steps(inside, train, begun(train, WORKERS), donate=False)
    for target, (_, results) in zip(targets_of(4), expected):
        with pytest.raises(ValueError):
            run(state, {})
        found = run(state, WORKERS.put(target))
        near(found, results)
        state = state_in(found)


def test_a_checked_loop_tells_its_waiting_and_what_was_moved_behind_it():
    workers = lj.Workers(2, 2, devices=jax.devices()[:4], debug=True)
    train = lj.around(update, lj.local_sgd(3, delay=2))
    run = workers.loop(train, beside=True)
    state = begun(train, workers)
    target = workers.put(targets_of(4)[0])
    state, _ = run(state, target)
    exchange = state.outer.exchange
    moved = exchange._replace(misplaced=exchange.misplaced + 1)
    outer = state.outer._replace(exchange=moved)
    with pytest.raises(ValueError, match="seen on workers 0, 1, 2, 3"):
        run(lj.AroundState(state.state, outer), target)


def noting(compile, texts):
    """`compile`, with the text of each program that is called added to `texts`."""

    def compiled(fn, **options):
        program = compile(fn, **options)

        def call(*args):
            texts.append(program.lower(*args).compile().as_text())
            return program(*args)

        return call

    return compiled


def test_no_program_of_the_devices_that_train_holds_a_message(monkeypatch):
    monkeypatch.setattr(type(jax.device_put(1)), "is_ready", lambda x: False)
    train = lj.around(update, lj.local_sgd(3, delay=2))
    workers = lj.Workers(2, 2, devices=jax.devices()[:4])
    run = workers.loop(train, beside=True)
    at_home = []
    beside = []
    run._compile = noting(run._compile, at_home)
    workers._twin.compile = noting(workers._twin.compile, beside)
    *_, (_, results) = steps(run, train, begun(train, WORKERS))
    # The step, and what is recorded and lands; beside it what is recorded, sent and landed.
    assert len(set(at_home)) == len(set(beside)) == 3
    assert 0 < run.waited < 60
    assert not any(map(COLLECTIVE.search, at_home)) and any(map(COLLECTIVE.search, beside))
    state = state_in(results)
    (pull,) = state.outer.exchange.pulls
    home = set(WORKERS.mesh.devices.flat)
    there = pull.pending.z["w"].devices()
    assert len(there) == 4 and not there & home
    assert state.state["params"]["w"].devices() == home


@pytest.mark.parametrize(
    "again", ["beside", pytest.param("in the step", marks=pytest.mark.slow)]
)
def test_a_run_resumes_from_any_step_with_its_message_under_way(again):
    train = lj.around(update, lj.lsgd(0.3, 0.2, 2, 4, delay=2, late="add"))
    run, pairs = both_ways(train)
    saved = {}
    for (t, found), (_, expected) in pairs:
        saved[t] = WORKERS.fetch(state_in(found))
        last = expected
    for t in (2, 3, 5):
        state = WORKERS.put(saved[t])
        if again == "beside":
            rest = steps(run, train, state, t + 1)
        else:
            inside = WORKERS.map(train, static="phase")
            rest = steps(inside, train, state, t + 1, donate=False)
        *_, (_, found) = rest
        same(found, last)


def test_a_new_worker_takes_no_sum_of_another_one():
    """Message 2 is in flight when it comes, and of message 6 it takes the target whole."""
    workers = lj.Workers(1, 3)
    tx = lj.local_sgd(4, delay=2, late="add")
    step = np.array([[1.0], [2.0], [6.0]], np.float32)
    seen, state = trained(tx, workers, np.zeros([3, 1], np.float32), [step] * 3)
    is_new = np.array([False, False, True])
    (pull,) = state.pulls
    pull = workers.map(_welcomed)(pull, workers.put(is_new))
    state = state._replace(pulls=(pull,))
    seen, _ = trained(tx, workers, seen[-1], [step] * 5, state=workers.fetch(state))
    # Of message 2 the mean is 6. At step 6 the new worker is at 36 and does not take part.
    np.testing.assert_array_equal(seen[0][:, 0], [4 + 4, 8 + 2, 24])
    target = (10 + 14) / 2
    np.testing.assert_array_equal(seen[4][:, 0], [8 + 4 + 2, 10 + 8 - 2, target])


@pytest.mark.slow
def test_nested_methods_travel_beside_one_another():
    inner = lj.around(both, lj.local_sgd(3, delay=2), params="one")
    train = lj.around(inner, lj.diloco(4, delay=3), params="two")
    _, pairs = both_ways(train, both_starts)
    for (_, found), (_, expected) in pairs:
        near(found, expected)


@pytest.mark.slow
def test_a_single_process_without_further_devices_exchanges_on_its_own():
    workers = lj.Workers(2, 4)
    train = lj.around(update, lj.local_sgd(2, delay=1))
    run = workers.loop(train, donate=0, beside=True)
    step = workers.map(train, static="phase")
    state = begun(train, workers)
    other = begun(train, workers)
    for t, target in enumerate(map(workers.put, targets_of(8)), start=1):
        found = run(state, target)
        expected = step(other, target, phase=train.phase(t))
        same(found, expected)
        state, other = map(state_in, (found, expected))


@pytest.mark.slow
def test_shards_inside_a_worker_go_to_the_devices_beside_them():
    workers = lj.Workers(2, 1, inside={"fsdp": 2}, devices=jax.devices()[:4])
    train = lj.around(update, lj.diloco(3, delay=2))
    run = workers.loop(train, donate=0, beside=True)
    for state, other in sharded_steps(train, workers, run, 7):
        same(state, other)
    (pull,) = state.outer.exchange.pulls
    anchor = pull.rule.anchor.value["w"].sharding.spec
    assert tuple(state.state["params"]["w"].sharding.spec) == ("node", *anchor)


def around(**options):
    return lj.around(update, lj.lsgd(0.1, 0.1, 2, 4, delay=1, **options))


REFUSED = {
    "a method without a `delay`": lambda: lj.around(update, lj.local_sgd(2)),
    "reads the parameters before": lambda: around(order="combine_then_adapt"),
    "step reads what the group agrees on": lambda: around(local_proximal=0.1),
    "a method around another one": lambda: lj.around(around(), lj.lsgd(delay=1)),
    "leave out `scan_axis`": lambda: lj.around(
        update, lj.diloco(4, fragments=2, scan_axis=0, delay=1)
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_methods_that_cannot_travel_beside_are_refused(message):
    train = REFUSED[message]()
    with pytest.raises(ValueError, match=f"`beside` must be False .*{message}"):
        WORKERS.loop(train, beside=True)
