"""Properties of single methods: conserved quantities, special cases, attacks."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import Run, aggregate, mostly_slow

import lsgd_jax as lj


close = functools.partial(chex.assert_trees_all_close, rtol=1e-5, atol=1e-6)
graph = lj.topology
SGD = optax.sgd(0.1)

# Out-degrees 3, 1, 2, 2: push-sum weights move away from 1.
UNEQUAL = graph.from_edges(
    [[(0, 1), (0, 2), (0, 3), (1, 2), (2, 0), (2, 3), (3, 0), (3, 1)], [(0, 2), (1, 3)]]
)


# Columns sum to 1, and rows do not.
PUSH = np.array([[0.5, 0.2, 0, 0], [0.3, 0.8, 0.4, 0], [0.2, 0, 0.6, 0.1], [0, 0, 0, 0.9]])
PUSHED = graph.from_edges([[(0, 1), (0, 2), (1, 0), (2, 1), (3, 2)]], weights=[PUSH])


def make(tx, W, devices=1, **options):
    return Run(optax.chain(SGD, tx), 1, W, devices, **options)


def total(tree):
    return jax.tree.map(lambda x: np.asarray(x, np.float64).sum(axis=0), tree)


def mean(tree):
    return jax.tree.map(lambda x: np.asarray(x).mean(axis=0), tree)


def rule_of(state):
    """Returns the state of the rule in a chain of SGD and a method with one pull."""
    return state[1].pulls[0].rule


def everywhere(tree, W):
    """Returns a tree of W workers, each with a copy of this one."""
    return jax.tree.map(lambda x: np.broadcast_to(x, (W, *x.shape)), tree)


# Elastic averaging


def test_easgd_conserves_the_sum_without_a_worker_that_is_not_finite():
    """That worker's share of β stays with the center."""
    run = make(lj.easgd(beta=0.8, period=1), 4)
    params = run.workers.put(run.start)
    with_nan = jax.tree.map(lambda x: x.at[2].set(jnp.nan), run.start)
    state = run.init(params)
    after, state = run.compiled(params, state, run.workers.put(with_nan))
    lost = jax.tree.map(lambda x: x[jnp.array([0, 1, 3])], run.start)
    moved = jax.tree.map(lambda x, t: x - 0.1 * (x - t), lost, lost)
    kept = jax.tree.map(lambda x: np.asarray(x)[[0, 1, 3]], after)
    center = jax.device_get(lj.center(after, state))
    before = jax.tree.map(np.add, total(moved), mean(run.start))
    # The other workers had their own start as target, and so zero gradients.
    close(before, jax.tree.map(np.add, total(kept), center))
    close(jax.tree.map(lambda x: np.asarray(x)[2], after), mean(run.start))


def test_easgd_center_follows_its_rule():
    beta = lambda t: 0.1 * t
    run = make(lj.easgd(beta, period=2), 4)
    x, c = np.asarray(run.start["w"]), mean(run.start)["w"]
    seen, state = run.train()
    for t, target in enumerate(run.batches, 1):
        x = y = x - 0.1 * (x - np.asarray(target["w"]))
        if t % 2 == 0:
            x = y - beta(t) / 4 * (y - c)
            c = (1 - beta(t)) * c + beta(t) * y.mean(axis=0)
        close(seen[t - 1]["w"], x)
    close(np.asarray(lj.center(seen[-1], state)["w"]), c)


GROUPED = {
    "easgd": lambda axes: lj.easgd(0.6, 2, axes=axes),
    "diloco": lambda axes: lj.diloco(2, axes=axes),
    "sgp": lambda axes: lj.sgp(graph.exponential, axes=axes),
    "wagma": lambda axes: lj.wagma(2, 3, axes=axes),
}


@functools.cache
def one_group(name, W):
    return make(GROUPED[name](("node", "local")), W)


@pytest.mark.parametrize(
    "axes, devices",
    mostly_slow(
        [(axes, devices) for axes in ("local", "node") for devices in (8, 2, 1)],
        fast=[("local", 2)],
    ),
)
@pytest.mark.parametrize("name", GROUPED)
def test_each_group_trains_by_itself(name, axes, devices):
    """Inside the nodes, or across them; each group has its own center."""
    nodes, locals = 2, 4
    run = Run(optax.chain(SGD, GROUPED[name](axes)), nodes, locals, devices)
    seen, state = run.train()
    number = np.arange(8).reshape(nodes, locals)
    centers = []
    for group in number if axes == "local" else number.T:
        rows = lambda tree, group=group: jax.tree.map(lambda x: x[group], tree)
        alone = one_group(name, len(group))
        expected, own = alone.train([rows(b) for b in run.batches], rows(run.start))
        for a, b in zip(seen, expected):
            close(rows(a), b)
        centers.append(jax.device_get(lj.center(expected[-1], own)))
    if name in ("easgd", "diloco"):
        field = {"easgd": "center", "diloco": "anchor"}[name]
        assert list(getattr(rule_of(state), field).axes) == [axes]
    center = jax.device_get(lj.center(seen[-1], state))
    close(center, jax.tree.map(lambda *c: np.mean(c, axis=0), *centers))


@pytest.mark.parametrize(
    ("method", "field"),
    [
        (lj.easgd(), "center"),
        (lj.downpour(1), "center"),
        (lj.diloco(1), "anchor"),
        (lj.parle(0.1), "center"),
    ],
)
def test_a_start_that_is_not_finite_does_not_enter_the_center(method, field):
    workers = lj.Workers(1, 3, devices=jax.devices()[:1])
    state = workers.map(method.init)(workers.put(jnp.array([[1.0], [jnp.nan], [4.0]])))
    assert getattr(state.pulls[0].rule, field).value.tolist() == [2.5]


# Averaging


def test_slowmo_follows_its_rule_under_a_schedule():
    alpha, beta, eta = 0.8, 0.6, lambda t: 0.5 / t
    run = make(lj.slowmo(2, alpha, beta, eta), 4)
    x, a, m = run.start["w"], mean(run.start)["w"], 0.0
    for t, (target, seen) in enumerate(zip(run.batches, run.train()[0]), 1):
        x = x - 0.1 * (x - target["w"])
        if t % 2 == 0:
            m = beta * m + (a - x.mean(axis=0)) / eta(t)
            a = a - alpha * eta(t) * m
            x = jnp.broadcast_to(a, x.shape)
        close(seen["w"], np.asarray(x))


def test_post_local_sgd_switches():
    tx = optax.chain(lj.allreduce(until=3), SGD, lj.local_sgd(3))
    run = Run(tx, 1, 4, 1)
    start = everywhere(mean(run.start), 4)
    seen, _ = run.train(start=start)
    spread = [float(np.ptp(x["w"], axis=0).max()) for x in seen]
    together = [s < 1e-6 for s in spread]
    assert together == [True, True, True, False, False, True, False, False]


# Parle


def test_parle_without_the_center_is_entropy_sgd():
    """The workers are then independent."""
    lr, gamma, L, decay = 0.1, 5.0, 3, 0.75
    tx = lj.parle(lr, L, anchor_pull=1 / gamma, center_pull=0, decay=decay)
    run = make(tx, 3)
    y = x = z = run.start["w"]
    for t, (target, seen) in enumerate(zip(run.batches, run.train()[0]), 1):
        y = y - lr * ((y - target["w"]) + (y - x) / gamma)
        z = decay * z + (1 - decay) * y
        if t % L == 0:
            x = x - lr * (x - z)
            y = z = x
        close(seen["w"], np.asarray(y))


def test_parle_without_the_inner_loop_is_elastic_sgd():
    lr, rho, decay = 0.1, 0.5, 0.75
    tx = lj.parle(lr, 1, anchor_pull=0, center_pull=1 / rho, decay=decay)
    run = make(tx, 3)
    x = np.asarray(run.start["w"])
    center = x.mean(axis=0)
    seen, state = run.train()
    for target, after in zip(run.batches, seen):
        step = -lr * (1 - decay) * lr * (x - np.asarray(target["w"]))
        x = x + step - lr / rho * (x - center)
        center = x.mean(axis=0)
        close(after["w"], x)
    close(np.asarray(lj.center(seen[-1], state)["w"]), center)


def test_parle_takes_schedules():
    pulls = dict(
        anchor_pull=lj.scoping(0.01, 2, period=2),
        center_pull=lj.scoping(1.0, 2, period=2, largest=10.0),
    )
    growing = make(lj.parle(lambda t: 0.1, 2, **pulls), 3).train()[0]
    fixed = make(lj.parle(0.1, 2, anchor_pull=0.01), 3).train()[0]
    close(growing[0], fixed[0])  # the first loop runs at the first values
    assert np.abs(growing[-1]["w"] - fixed[-1]["w"]).max() > 1e-4


# Gossip


def test_wagma_with_groups_that_do_not_fill_a_round():
    """W = 8, S = 4: groups {0..3}, {4..7}, then pairs i, i + 4."""
    run = make(lj.wagma(4, 100), 8)
    seen, _ = run.still(3, run.start)
    first = run.start["w"].reshape(2, 4, 3, 2).mean(axis=1)
    close(seen[0]["w"], np.repeat(first, 4, axis=0))
    close(seen[1], everywhere(mean(run.start), 8))


def mass(params, state):
    """Returns Σ s and Σ w, including messages in flight."""
    target = rule_of(state)
    w = np.asarray(target.weight, np.float64)
    s = np.einsum("i,i...->...", w, np.asarray(params["w"], np.float64))
    for numerator, weight in getattr(target, "in_flight", ()):
        s = s + np.asarray(numerator["w"]).sum(axis=0)
        w = np.append(w, np.asarray(weight))
    return s, w.sum()


@pytest.mark.parametrize("topology", [UNEQUAL, PUSHED], ids=["unequal", "weighted"])
def test_push_sum_conserves_mass(topology):
    run = make(lj.osgp(topology, staleness=3), 4)
    params = run.workers.put(run.start)
    state = run.init(params)
    s, w = mass(params, state)
    weights = []
    for batch in run.batches:
        step = 0.1 * (np.asarray(params["w"]) - np.asarray(batch["w"])).sum(axis=0)
        params, state = run.compiled(params, state, run.workers.put(batch))
        s_after, w_after = mass(params, state)
        close(s_after, s - step, rtol=1e-5, atol=1e-5)
        close(w_after, w)
        s = s_after
        weights.append(np.asarray(rule_of(state).weight))
    assert np.ptp(np.stack(weights), axis=1).max() > 0.1  # weights that are not 1


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


def test_dpsgd_on_a_star_with_metropolis_weights():
    run = make(lj.dpsgd(graph.metropolis([(0, 1), (0, 2), (0, 3)])), 4)
    x = run.start["w"]
    seen, _ = run.still(1, run.start)
    rows = [x.mean(axis=0), *(0.75 * x[i] + 0.25 * x[0] for i in (1, 2, 3))]
    close(seen[0]["w"], jnp.stack(rows))
    with_nan = jax.tree.map(lambda t: t.at[1].set(jnp.nan), run.start)
    seen, _ = run.train([with_nan])
    rows[:2] = [(2 * x[0] + x[2] + x[3]) / 4, x[0]]
    close(seen[0]["w"], jnp.stack(rows))


def test_adpsgd_averages_pairs_and_the_odd_worker_waits():
    run = make(lj.adpsgd(graph.bipartite_exponential(3)), 3)
    x, target = run.start["w"], run.batches[0]["w"]
    seen, _ = run.train(run.batches[:1])
    pair = (x[0] + x[1]) / 2
    close(seen[0]["w"], np.asarray(jnp.stack([pair, pair, x[2]]) - 0.1 * (x - target)))


# Pairs


def peer(x, hop):
    """Returns x_{i - hop} for every worker i."""
    return jnp.roll(x, hop, axis=0)


def test_pairwise_constant_schedule():
    run = make(lj.pairwise(value=lambda t: 0.1 * t), 4)
    seen, _ = run.still(2, run.start)
    x = run.start["w"]
    for t, hop in ((1, 1), (2, 2)):
        x = 0.1 * t * peer(x, hop) + (1 - 0.1 * t) * x
        close(seen[t - 1]["w"], np.asarray(x))


def test_pairwise_with_two_losses_of_zero_averages():
    run = make(lj.pairwise("loss"), 4)
    seen, _ = run.still(1, run.start)  # a loss of 0 for all
    close(seen[0]["w"], np.asarray((run.start["w"] + peer(run.start["w"], 1)) / 2))


def test_pairwise_fetches_with_a_probability():
    still = make(lj.pairwise(fetch_probability=0.0), 4)
    close(still.still(2, still.start)[0][-1], jax.device_get(still.start))
    run = make(lj.pairwise(fetch_probability=0.5, seed=3), 4)
    before, fetched = run.start["w"], []
    for t, after in enumerate(run.still(40, run.start)[0]):
        taken = (np.asarray(before) + np.asarray(peer(before, 2 ** (t % 2)))) / 2
        same = np.abs(after["w"] - np.asarray(before)).max(axis=(1, 2)) < 1e-7
        took = np.abs(after["w"] - taken).max(axis=(1, 2)) < 1e-6
        assert (same | took).all()
        if t < 4:  # later they hardly differ
            fetched.append(took & ~same)
        before = jnp.asarray(after["w"])
    assert 2 <= np.sum(fetched) <= 14
    assert len({tuple(row) for row in fetched}) > 1  # drawn anew each step


@pytest.mark.parametrize("interpolation", ["constant", "clock", "loss"])
def test_pairwise_ignores_a_peer_that_is_not_finite(interpolation):
    run = make(lj.pairwise(interpolation), 4)
    x = run.start["w"]
    with_nan = jax.tree.map(lambda t: t.at[1].set(jnp.nan), run.start)
    seen, state = run.train([with_nan])
    close(seen[0]["w"][2], np.asarray(x[2]))  # its peer is worker 1
    close(seen[0]["w"][1], np.asarray(x[0]))  # restored from its own peer
    assert np.isfinite(np.asarray(rule_of(state).measure)[[0, 2, 3]]).all()


def test_gosgd_conserves_weights_and_weighted_parameters():
    run = make(lj.gosgd(send_probability=0.5, seed=1), 4)
    params = run.workers.put(run.start)
    before = mass(params, run.init(params))
    seen, state = run.still(6, run.start)
    close(mass(seen[-1], state), before)
    assert np.ptp(np.asarray(rule_of(state).weight)) > 0.1
    assert np.abs(seen[-1]["w"] - np.asarray(run.start["w"])).max() > 0.1


# Attackers

ATTACKS = {
    "sign_flip": lambda g: -3.0 * g,
    "inf": lambda g: jnp.full_like(g, jnp.inf),
    "nan": lambda g: jnp.full_like(g, jnp.nan),
    "huge": lambda g: 1e30 * g,
}
DEFENSES = {
    "mean": lj.allreduce,
    "coordinate_median": lj.coordinate_median,
    "licm": lambda: lj.licm(0.2),
    "cge": lambda: lj.cge(faulty=2),
    "cge_decay": lambda: lj.cge(faulty=2, decay=0.5),
}


@functools.cache
def defended(defense):
    """Returns a function that aggregates gradients [7, 20] three times in a row."""
    tx, workers = DEFENSES[defense](), lj.Workers(1, 7, devices=jax.devices()[:1])

    def update(g):
        state = tx.init(g)
        for _ in range(3):
            aggregate, state = tx.update(g, state)
        return aggregate

    update = workers.map(update)
    return lambda g: np.asarray(update(workers.put(g)))


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("defense", DEFENSES)
def test_two_attackers_of_seven(defense, attack):
    honest = 1.0 + 0.1 * np.random.default_rng(0).normal(size=(7, 20))
    honest = jnp.asarray(honest, jnp.float32)
    attacked = honest.at[:2].set(ATTACKS[attack](honest[:2]))
    result = defended(defense)(attacked)
    close(result, everywhere(result[0], 7))
    low, high = np.asarray(honest[2:]).min(axis=0), np.asarray(honest[2:]).max(axis=0)
    scale = 1 - 0.5**3 if defense == "cge_decay" else 1.0  # h starts at 0
    within = ((scale * low - 1e-6 <= result) & (result <= scale * high + 1e-6)).all()
    fooled = defense == "mean" and attack in ("sign_flip", "huge")
    assert within != fooled


def test_licm_averages_inside_the_band():
    g = jnp.array([[1.0, 0.0], [2.0, 0.0], [2.5, 1.0], [3.0, -1.0], [9.0, 0.0]])
    # Medians 2.5 and 0, bands [1.25, 3.75] and [0, 0]. With γ = 0 the medians remain.
    for gamma in (0.5, 0.0):
        expected = np.tile(np.float32([2.5, 0.0]), (5, 1))
        close(np.asarray(aggregate(lj.licm(gamma), g)), expected)


def test_with_no_worker_finite_gradients_stay():
    g = jnp.array([[jnp.nan, 1.0], [jnp.inf, 2.0]])
    for tx in (lj.allreduce(), lj.cge(1)):
        np.testing.assert_array_equal(aggregate(tx, g), g)


# bfloat16


@pytest.mark.parametrize(
    "method",
    [lambda: lj.local_sgd(1), lambda: lj.sgp(graph.exponential(8)), lambda: lj.wagma(2, 9)],
    ids=["local_sgd", "sgp", "wagma"],
)
def test_means_of_bfloat16_are_computed_in_float32(method):
    run = make(method(), 8, dtype=jnp.bfloat16)
    seen, _ = run.still(3, run.start)
    exact = mean(jax.tree.map(lambda x: np.asarray(x, np.float32), run.start))
    got = jax.tree.map(lambda x: x.astype(np.float32), seen[-1])
    assert seen[-1]["w"].dtype == jnp.bfloat16
    # Three roundings to 8 bits at most; a sum in bfloat16 would be off by more.
    chex.assert_trees_all_close(got, everywhere(exact, 8), rtol=0.02, atol=0.01)


def test_bfloat16_center_moves_by_less_than_a_rounding_step():
    """The center is kept in float32; in bfloat16, a small β could never move it."""
    run = make(lj.easgd(beta=1e-3, period=1), 4, dtype=jnp.bfloat16)
    start = jax.tree.map(jnp.ones_like, run.start)
    targets = jax.tree.map(lambda x: 0 * x + 3, run.start)
    seen, state = run.train([targets] * 4, start)
    center = rule_of(state).center.value["b"]
    assert center.dtype == jnp.float32 and 1.0 < float(center[0]) < 1.004
    assert lj.center(seen[-1], state)["b"].dtype == jnp.bfloat16


# Errors


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: lj.dpsgd(UNEQUAL), "`topology` must be balanced"),
        (lambda: lj.dpsgd(PUSHED), "must be doubly stochastic"),
        (
            lambda: lj.pairwise(
                topology=graph.from_edges([[(0, 1)]], weights=[[[0.9, 0], [0.1, 1]]])
            ),
            "`topology` must have no `weights`",
        ),
        (lambda: lj.adpsgd(graph.ring(4)), "`topology` must pair the workers"),
        (lambda: lj.pairwise(topology=graph.ring(4)), "`topology` must have one peer"),
        (lambda: lj.gosgd(graph.complete(4)), "`topology` must have one peer"),
        (lambda: lj.cge(1, decay=1), "`decay` must be less than 1"),
    ],
)
def test_refuses_arguments(build, message):
    with pytest.raises(ValueError, match=message):
        build()


@pytest.mark.parametrize(
    ("tx", "message"),
    [
        (lj.sgp(graph.ring(3)), "a graph of 4 workers"),
        (lj.pairwise(topology=graph.exponential(8)), "a graph of 4 workers"),
        (lj.adpsgd(lambda W: UNEQUAL), "balanced|pair"),
        (lj.cge(4), r"less than the number of workers \(4\)"),
        (lj.pairwise("loss"), "loss=loss"),
    ],
)
def test_refuses_while_tracing(tx, message):
    with pytest.raises(ValueError, match=message):
        aggregate(tx, jnp.ones((4, 2)))
