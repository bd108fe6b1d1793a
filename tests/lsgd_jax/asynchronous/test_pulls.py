"""The kernel's methods over ports: as in lock step, on a budget, when workers fail."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

import lsgd_jax as lj
from lsgd_jax._src.asynchronous import memory
from lsgd_jax.asynchronous import Pulls, Unreachable


LEVELS = dict(local_pull=0.3, global_pull=0.2, local_period=2, global_period=4)
METHODS = {
    "lsgd": lj.lsgd(**LEVELS),
    "lsgd in the other order": lj.lsgd(**LEVELS, order="combine_then_adapt"),
    "lsgd, proximal": lj.lsgd(**LEVELS, local_proximal=0.1, global_proximal=0.1),
    "lsgd, delayed": lj.lsgd(**LEVELS, delay=1),
    "local sgd": lj.local_sgd(3),
    "diloco": lj.diloco(4),
    "diloco, streaming": lj.diloco(4, fragments=2, delay=1, mixing=0.5),
    "slowmo": lj.slowmo(3, learning_rate=0.05),
    "easgd": lj.easgd(0.4, 3),
    "downpour": lj.downpour(3),
    "d-psgd": lj.dpsgd(),
    "sgp": lj.sgp(),
    "osgp": lj.osgp(),
    "ad-psgd": lj.adpsgd(),
    "pairwise": lj.pairwise("loss"),
    "gosgd": lj.gosgd(),
    "wagma": lj.wagma(2, 5),
    "parle": lj.parle(0.05),
}
QUICK = ("lsgd", "diloco, streaming")
SPREAD = Pulls(lj.lsgd(**LEVELS), budget=True)


def in_lock_step(method, nodes, locals, steps):
    tx = optax.chain(toys.BASE, method)
    workers = lj.Workers(nodes, locals)
    x = workers.replicate(toys.start())
    s, i = workers.map(tx.init)(x), workers.put(np.arange(nodes * locals))

    def step(x, s, i, t):
        loss, g = toys.loss_and_grads(x, i, t.value)
        u, s = tx.update(g, s, x, value=loss)
        return lj.apply_updates(x, u), s

    step = workers.map(step)
    for t in range(1, steps + 1):
        x, s = step(x, s, i, lj.Shared(jnp.int32(t)))
    leaves = [leaf.reshape(len(leaf), -1) for leaf in jax.tree.leaves(jax.device_get(x))]
    return np.concatenate(leaves, axis=1)


@pytest.mark.parametrize(
    "name",
    [n if n in QUICK else pytest.param(n, marks=pytest.mark.slow) for n in METHODS],
)
def test_every_method_is_what_it_is_in_lock_step(name):
    expected = in_lock_step(METHODS[name], 2, 2, steps=10)
    methods = [Pulls(METHODS[name])]
    if name == "lsgd":
        methods.append(SPREAD)
    for method in methods:
        workers = memory.run(toys.training(), method, 2, 2, steps=10)
        np.testing.assert_allclose(toys.stacked(workers), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("grid", [(1, 1), (1, 3), (3, 1)])
def test_grids_of_one_and_of_odd_numbers_of_workers(grid):
    expected = in_lock_step(METHODS["lsgd"], *grid, steps=8)
    workers = memory.run(toys.training(), SPREAD, *grid, steps=8)
    np.testing.assert_allclose(toys.stacked(workers), expected, rtol=1e-6, atol=1e-6)


def test_a_budget_is_spent_exactly_whoever_takes_its_steps():
    counts, rounds = {}, []

    def note(memory, worker):
        counts[worker.index] = worker.count
        if memory.coordinator.number > len(rounds):
            rounds.append(sum(counts.values()) - 1)  # before the step just taken

    workers = memory.run(
        toys.training(),
        Pulls(lj.lsgd(**{**LEVELS, "local_period": 4}), budget=True),
        2,
        2,
        steps=20,
        events=note,
        step_seconds=[1, 1, 1.7, 9],
    )
    assert sum(worker.count for worker in workers) == 4 * 20
    assert [total % 16 for total in rounds[:4]] == [0] * 4
    assert workers[0].count > 2 * workers[3].count
    assert max(worker.report.longest for worker in workers) <= 9  # one step of the slowest


def test_the_rest_goes_on_without_one_that_is_lost():
    def lose(memory, worker):
        if worker.index == 1 and worker.count == 5:
            memory.lose(1)

    workers = memory.run(toys.training(), SPREAD, 2, 2, steps=12, events=lose, grace=3)
    rest = [workers[i] for i in (0, 2, 3)]
    assert workers[1].count == 5 and sum(worker.count for worker in workers) >= 4 * 12 - 1
    assert max(worker.report.longest for worker in rest) <= 3
    # Those who are left still agree about who leads.
    assert np.ptp(toys.stacked(rest), axis=0).max() < 5


def test_one_that_is_lost_and_started_again_takes_over_and_no_step_counts_twice():
    lost = []

    def lose(memory, worker):
        if worker.index == 1 and worker.count == 5 and not lost:
            lost.append(memory.coordinator.taken)
            memory.lose(1)

    method = Pulls(lj.diloco(4), budget=True)
    workers = memory.run(
        toys.training(), method, 2, 2, steps=16, events=lose, grace=3, restarts=True
    )
    assert lost and workers[1].count > 5
    steps = sum(worker.count for worker in workers)
    # It goes on from another one's count; of its own, the step it was lost in is gone.
    assert 4 * 16 - 1 <= steps <= 4 * 16 + 1
    anchors = [worker.running.state()["rules"][0].anchor.value for worker in workers]
    for anchor in anchors[1:]:
        jax.tree.map(np.testing.assert_array_equal, anchor, anchors[0])


@pytest.mark.parametrize("method", [Pulls(lj.dpsgd()), Pulls(lj.local_sgd(2))])
def test_one_that_comes_too_late_in_lock_step_takes_over_from_another(method):
    seen = []

    def delay(memory, worker):
        memory.step_seconds[3] = 30 if (worker.index, worker.count) == (3, 6) else 1
        if worker.index == 3:
            seen.append(worker.count)

    workers = memory.run(
        toys.training(),
        method,
        2,
        2,
        steps=50,
        events=delay,
        grace=4,
        step_seconds=[1] * 4,
    )
    assert [worker.count for worker in workers] == [50] * 4
    assert max(np.diff(seen)) > 5  # it has skipped what the others did meanwhile
    assert max(worker.report.longest for worker in workers[:3]) <= 4
    assert len(np.unique(np.diff(sorted(seen)))) > 1


def test_one_that_is_not_finite_moves_no_other_and_is_restored():
    for method in (SPREAD, Pulls(lj.diloco(4), budget=True)):
        task = toys.broken(toys.training(), 1, steps=[5])
        workers = memory.run(task, method, 2, 2, steps=16)
        assert np.isfinite(toys.stacked(workers)).all()


def test_bfloat16_stays():
    workers = memory.run(toys.training(jnp.bfloat16), SPREAD, 1, 2, steps=8)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(workers[0].params))


def test_all_start_from_the_same_or_the_run_says_so():
    with pytest.raises(ValueError, match="the same parameters, but 2 different"):
        memory.run(toys.resting(), SPREAD, 1, 2, steps=4)


def test_one_that_finds_no_worker_to_take_over_from_says_so():
    def lose(memory, worker):
        if worker.index == 1 and worker.count == 4:
            memory.lose(1)
            for port in memory.ports:
                port.mailbox.serve_state(lambda own=False: None)

    with pytest.raises(Unreachable, match=r"none of the workers .* answered within 2 s"):
        memory.run(
            toys.training(),
            SPREAD,
            1,
            3,
            steps=8,
            events=lose,
            grace=2,
            restarts=True,
        )


@pytest.mark.parametrize(
    "method, message",
    [
        (optax.sgd(0.1), "`exchange` must be a method that pulls"),
        (lj.local_sgd(2, wire="int8"), "`wire` must be 'float32'"),
        (lj.diloco(4, fragments=2), "must have no offset and no delay"),
    ],
)
def test_what_cannot_be_run_is_refused(method, message):
    with pytest.raises(ValueError, match=message):
        Pulls(method, budget=True)
