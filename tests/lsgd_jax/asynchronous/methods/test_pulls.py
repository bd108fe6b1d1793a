"""The kernel among asynchronous workers: as in lock step, on a budget, with failures."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from harness import METHODS, RULES, mostly_slow

import lsgd_jax as lj
from lsgd_jax._src.asynchronous.methods.messages import Agreement, alone
from lsgd_jax._src.asynchronous.methods.program import speaks
from lsgd_jax._src.exchange import kernel
from lsgd_jax._src.wire.packing import PACKED_BELOW
from lsgd_jax.asynchronous import Pulls, Training, UnreachableError


LEVELS = dict(local_pull=0.3, global_pull=0.2, local_period=2, global_period=4)
SPREAD = Pulls(lj.lsgd(**LEVELS), budget=True)


def run(method, nodes=2, locals=2, steps=10, training=None, **options):
    training = toys.training() if training is None else training
    return toys.simulate(training, method, nodes, locals, steps, **options)


@pytest.mark.slow
def test_one_method_trains_models_of_several_shapes():
    """In one process, which keeps the compiled functions of a pull."""
    method = Pulls(lj.lsgd(**LEVELS))
    larger = {"w": jnp.ones((2, 2)), "b": jnp.ones(3), "c": jnp.ones(1)}
    still = lambda x, s, own, t: (optax.tree.zeros_like(x), s, own, 1.0 + own)
    other = Training(lambda i: (larger, (), jnp.int32(i)), still)
    first = toys.stacked(run(method, training=other))
    run(method)
    np.testing.assert_array_equal(toys.stacked(run(method, training=other)), first)


def is_asynchronous(name):
    """Whether asynchronous workers take a method. Their messages have one level."""
    row = METHODS[name]
    return not (row.first or row.around or row.lock_step or name.endswith("_across"))


MADE = {name: METHODS[name].make(4) for name in RULES if is_asynchronous(name)}
# All rounds of a graph are one program: its permutations are a part of the message.
MADE["many rounds"] = lj.dpsgd(topology=lj.topology.matchings(8, rounds=6))
# By default fragments in flight, and a narrow format.
QUICK = ["diloco_streaming", "diloco+int4"]


@pytest.mark.parametrize("name", mostly_slow(MADE, fast=QUICK))
def test_every_method_equals_lock_step(name):
    """Also with rounding, as no difference is near a bound between two codes here."""
    grid = (2, 4) if name == "many rounds" else (2, 2)
    expected = toys.in_lock_step(MADE[name], *grid, steps=10)
    methods = [Pulls(MADE[name])]
    if name in ("lsgd", "sgp+int8"):
        methods.append(Pulls(MADE[name], budget=True))
    for asynchronous in methods:
        found = toys.stacked(run(asynchronous, *grid))
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("grid", [(1, 1), (1, 3), (3, 1)])
def test_grids_of_one_and_of_odd_numbers_of_workers(grid):
    expected = toys.in_lock_step(lj.lsgd(**LEVELS), *grid, steps=8)
    found = toys.stacked(run(SPREAD, *grid, steps=8))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_fast_workers_take_more_of_a_budget_which_is_spent_exactly():
    method = Pulls(lj.lsgd(**{**LEVELS, "local_period": 4}), budget=True)
    counts, barriers = {}, []

    def note(worker):
        counts[worker.index] = worker.count
        status = worker.status
        if status is not None and status.number > len(barriers):
            barriers.append(status.taken)

    workers = run(method, steps=20, seconds=[1, 1, 1.7, 9], observe=note)
    assert sum(worker.count for worker in workers) == 4 * 20
    assert workers[0].count > 2 * workers[3].count
    assert max(worker.report.longest for worker in workers) <= 9  # one step of the slowest


def test_a_worker_that_misses_a_round_takes_over_the_reference_of_its_wire():
    method = Pulls(lj.local_sgd(4, wire="int8"), budget=True)
    workers = run(method, steps=20, drops={1: 8.2}, joins={1: 8.9}, timeout=3)
    first, *others = (worker.method.state()["pulls"][0].wire for worker in workers)
    for wire in others:
        jax.tree.map(np.testing.assert_array_equal, wire.reference, first.reference)


@pytest.mark.slow
def test_a_worker_that_starts_again_takes_over_and_no_step_counts_twice():
    method = Pulls(lj.diloco(4), budget=True)
    workers = run(method, steps=16, drops={1: 5.5}, joins={1: 9.5}, timeout=3)
    steps = sum(worker.count for worker in workers)
    # It goes on from another one's count, which is up to a period from its own.
    assert workers[1].count > 6 and 4 * 15 <= steps <= 4 * 17
    anchors = [worker.method.state()["pulls"][0].rule.anchor.value for worker in workers]
    for anchor in anchors[1:]:
        jax.tree.map(np.testing.assert_array_equal, anchor, anchors[0])


@pytest.mark.slow
@pytest.mark.parametrize("method", [Pulls(lj.dpsgd()), Pulls(lj.local_sgd(2))])
def test_a_worker_that_comes_too_late_in_lock_step_takes_over_from_another(method):
    note, seen = toys.noting(lambda worker: worker.count)
    away = dict(drops={3: 6.5}, joins={3: 30.0}, timeout=4)
    workers = run(method, steps=50, observe=note, **away)
    assert [worker.count for worker in workers] == [50] * 4
    assert max(np.diff(seen[3])) > 5  # it has skipped the steps in between
    assert max(worker.report.longest for worker in workers[:3]) <= 4


@pytest.mark.slow
def test_a_worker_that_comes_back_after_the_others_have_finished_counts_as_done():
    """It takes over from a finished peer, once."""
    method = Pulls(lj.diloco(4, delay=1))
    workers = run(method, steps=12, drops={1: 5.5}, joins={1: 100.0}, timeout=3)
    assert [worker.count for worker in workers] == [12] * 4
    np.testing.assert_array_equal(workers[1].vector(), workers[0].vector())


def test_a_worker_that_takes_over_cancels_the_agreements_of_its_old_state():
    cancelled = []

    def take_over(worker):
        if worker.index == 1 and worker.count == 6 and not cancelled:
            cancelled.extend(worker.method.in_flight.values())
            worker.take_over(worker.state())

    run(Pulls(lj.diloco(4, delay=2)), 1, 2, 12, observe=take_over)
    assert [request.answer.cancelled() for request in cancelled] == [True]


@pytest.mark.parametrize("leaves", [12, toys.slow(200)])
def test_a_narrow_agreement_is_one_message_whatever_it_gathers(leaves):
    (pull,) = lj.diloco(1, wire="int8").pulls
    large = jax.ShapeDtypeStruct([PACKED_BELOW + 1], jnp.float32)
    x = {str(i): large for i in range(leaves)}
    state = jax.eval_shape(lambda x: alone(lambda: kernel.init(pull, x)), x)
    given = np.int32(0), x, x, state, np.bool_(True), np.int32(1)
    traced = Agreement(pull, size=2, grid=(1, 2)).send.trace(*given)
    messages = [equation for equation in traced.jaxpr.eqns if speaks(equation)]
    assert [message.params["kind"] for message in messages] == ["gather"]


def test_a_worker_that_is_left_behind_again_and_again_ends_the_run():
    class AlwaysStale(Pulls):
        def bind(self, worker, steps):
            bound = super().bind(worker, steps)

            async def after_step():
                raise lj.asynchronous.StaleWorkerError("too late")

            bound.after_step = after_step
            return bound

    with pytest.raises(RuntimeError, match="left behind 11 times without getting beyond"):
        run(AlwaysStale(lj.local_sgd(2)), 1, 2)


def test_different_initial_parameters_end_the_run():
    with pytest.raises(ValueError, match="the same parameters, got 2 different"):
        run(SPREAD, 1, 2, steps=4, training=toys.resting())


def test_a_worker_that_finds_no_peer_to_take_over_from_ends_the_run():
    def no_state(worker):
        worker.transport.mailbox.state = lambda: None

    with pytest.raises(
        UnreachableError, match=r"none of the workers .* answered within 2 s"
    ):
        run(SPREAD, 1, 3, 12, drops={1: 4.5}, joins={1: 6.5}, timeout=2, observe=no_state)


@pytest.mark.parametrize(
    "method, message",
    [
        (optax.sgd(0.1), "`exchange` must be a method that pulls"),
        (lj.diloco(4, fragments=2), "must have no offset, no fragments and no delay"),
        (lj.diloco(4, delay=2, late="add"), "`late` must be 'replace' for asynchronous"),
        (lj.contrib.grawa(), "`exchange` must have no rule that reads it, as grawa does"),
    ],
)
def test_invalid_pulls_are_refused(method, message):
    with pytest.raises(ValueError, match=message):
        Pulls(method, budget=True)
