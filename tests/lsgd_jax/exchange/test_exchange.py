"""Tests of exchange: offsets, delays, parts, finiteness, chains, states, counters."""

import flax.jax_utils
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import after, around, close, exchanged, mostly_slow, train

import lsgd_jax as lj
from lsgd_jax._src.exchange import kernel, parts
from lsgd_jax._src.exchange.kernel import IDLE, RECORDED
from lsgd_jax._src.exchange.traffic import Traffic, total


def pair():
    return lj.Workers(1, 2)


# Offsets, parts and delays


@pytest.mark.parametrize(
    ("delay", "turns", "late"),
    mostly_slow(
        [
            (3, [0], "replace"),
            (0, [2, 0], "replace"),
            (1, [2, 0], "replace"),
            (3, [2, 0], "replace"),  # two in flight
            (4, [2, 0], "add"),
        ],
        fast=[(3, [2, 0], "replace")],
    ),
)
def test_delayed_and_fragmented_lsgd_by_hand(delay, turns, late):
    """z is the y of the leader elected `delay` steps before; τ = 4, λ = 0.25."""
    rng = np.random.default_rng(0)
    start = rng.normal(size=(len(turns), 4, 3)).astype(np.float32)
    steps = rng.normal(size=(12, len(turns), 4, 3)).astype(np.float32)
    losses = rng.uniform(size=(12, 4))
    tx = lj.lsgd(0.25, 0.0, 4, loss_window=1, fragments=len(turns))
    tx = lj.exchange(tx, delay=delay, late=late)
    workers = lj.Workers(1, 4)
    seen, _ = train(tx, workers, list(start), [list(s) for s in steps], list(losses))
    for part, turn in enumerate(turns):
        x = start[part]
        sent = y = None
        for t in range(1, 13):
            x = x + steps[t - 1, part]
            if (t + delay) % 4 == turn and delay == 0:
                sent = x[losses[t - 1].argmin()]
            if t % 4 == turn and sent is not None:
                x = x + 0.25 * (sent - (y if late == "add" else x))
            if (t + delay) % 4 == turn and delay:
                y = x
                sent = x[losses[t - 1].argmin()]
            close(seen[t - 1][part], x)


def streaming(layers, overlap, alpha, outer):
    """MaxText's streaming DiLoCo: fragment 0 is all that is no layer, and then each layer.

    At step t ≡ f its mean moves the outer parameters, which the workers take V steps later.
    """
    rule, F = lj.rules.anchored(outer, "local"), layers + 1
    of = lambda f, part: lj.Pull(rule, 1 - alpha, F, (f + overlap) % F, overlap, part=part)
    rest = of(0, lambda path: not path.startswith("layers"))
    stacked = lj.Pull(
        rule,
        1 - alpha,
        F,
        offset=tuple((f + overlap) % F for f in range(1, F)),
        delay=overlap,
        part=["layers"],
        fragments=layers,
        scan_axis=0,
    )
    return lj.exchange(rest, stacked)


@pytest.mark.slow  # `tests/peers/test_torchft.py` has streaming DiLoCo by hand
@pytest.mark.parametrize(
    "layers, overlap, alpha",
    [(3, 2, 0.25), (36, 2, 0.0)],  # the last is its own default
)
def test_streaming_diloco_is_that_of_maxtext(layers, overlap, alpha):
    F, rate, beta = layers + 1, 0.1, 0.9
    rng = np.random.default_rng(0)
    # A row for each fragment: the embedding, and the layers.
    steps = 0.1 * rng.normal(size=(3 * F + 1, 2, F, 2)).astype(np.float32)
    method = streaming(layers, overlap, alpha, optax.sgd(rate, beta, nesterov=True))
    tree = lambda rows: {"embedding": rows[:, 0], "layers": {"w": rows[:, 1:]}}
    workers = pair()
    tx = optax.chain(optax.sgd(1.0), method)
    x = workers.put(tree(np.zeros([2, F, 2], np.float32)))
    state = workers.map(tx.init)(x)

    def step(x, state, g, phase):
        u, state = tx.update(g, state, x, phase=phase)
        return lj.apply_updates(x, u), state

    run = workers.map(step, static="phase")
    inner, outer = np.zeros([2, F, 2]), np.zeros([F, 2])
    trace = np.zeros([F, 2])
    for t, gradient in enumerate(steps, 1):
        x, state = run(x, state, workers.put(tree(gradient)), phase=method.phase(t))
        inner = inner - gradient
        f, late = t % F, t - overlap
        delta = outer[f] - inner[:, f].mean(0)
        trace[f] = delta + beta * trace[f]
        outer[f] = outer[f] - rate * (delta + beta * trace[f])
        if late > 0:
            f = late % F
            inner[:, f] = alpha * inner[:, f] + (1 - alpha) * outer[f]
        close(workers.fetch(x), tree(inner.astype(np.float32)))
    assert len(method.phases()) == 4  # the rest is recorded, sent, lands, or does nothing
    assert [level.misplaced.max() for level in lj.diagnostics(state)] == [0] * F


def test_a_pull_acts_on_its_part_at_its_offset():
    mean = lambda part, offset: lj.Pull(lj.rules.average(), 1.0, 3, offset, part=part)
    tx = lj.exchange(mean(lambda path: path == "a/w", 1), mean(lj.fragment(1, 2), 2))
    start = {"a": {"w": np.array([0.0, 2.0])}, "b": np.array([4.0, 8.0])}
    still = jax.tree.map(np.zeros_like, start)
    seen, state = train(tx, pair(), start, [still] * 4)
    assert seen[0] == {"a": {"w": pytest.approx([1, 1])}, "b": pytest.approx([4, 8])}
    assert seen[1] == {"a": {"w": pytest.approx([1, 1])}, "b": pytest.approx([6, 6])}
    levels = lj.diagnostics(state)
    assert [level.exchanges for level in levels] == [2, 1]
    assert [level.bytes_sent for level in levels] == [16, 8]
    due = [[t for t in range(1, 7) if level.is_due(t)] for level in levels]
    assert due == [[1, 4], [2, 5]]


@pytest.mark.parametrize(
    "sizes", [[1, 1], [5, 1, 1, 1], [1, 1, 1, 9], [3] * 7, [0, 4, 0, 4]]
)
@pytest.mark.parametrize("count", [1, 2])
def test_fragments_are_runs_of_leaves_and_none_is_empty(sizes, count):
    tree = [np.zeros(size) for size in sizes]
    owned = []
    for i in range(count):
        selected = parts.select(lj.fragment(i, count), tree)
        inside = lambda leaf: not isinstance(leaf, optax.MaskedNode)
        mine = [k for k, leaf in enumerate(selected) if inside(leaf)]
        assert mine
        owned += mine
    assert owned == list(range(len(sizes)))


# Workers that are not finite


def test_a_step_without_a_finite_loss_moves_finite_elements_only():
    tx = lj.local_sgd(100)
    seen, _ = train(
        tx,
        pair(),
        np.zeros((2, 3), np.float32),
        [np.array([[1.0, np.nan, np.inf], [1.0, 2.0, 3.0]])],
        [[np.nan, 1.0]],
        optax.apply_updates,
    )
    assert seen[0].tolist() == [[1, 0, 0], [1, 2, 3]]


@pytest.mark.slow
def test_a_fragment_that_was_restored_does_not_restore_the_rest():
    tx = lj.diloco(2, optax.sgd(1.0), fragments=2)
    start = {"a": np.zeros(2, np.float32), "b": np.zeros(2, np.float32)}
    bad = {"a": np.array([np.nan, 1.0]), "b": np.array([np.nan, 1.0])}
    still = jax.tree.map(np.zeros_like, start)
    seen, state = train(tx, pair(), start, [bad, still])
    np.testing.assert_array_equal(seen[0]["a"], [1, 1])
    assert np.isfinite(seen[0]["b"]).all() and seen[0]["b"][1] == 1
    np.testing.assert_array_equal(seen[1]["a"], [1, 1])
    assert np.ptp(seen[1]["b"]) == 0
    assert not lj.waiting(state).any()


NOT_FINITE = [
    (*case, form)
    for form in ("chain", "outer")
    for case in ((2, 4, 2), (3, 8, 8), (4, 8, 8))
]


@pytest.mark.parametrize(
    "bad, restored, target, form", mostly_slow(NOT_FINITE, fast=[NOT_FINITE[0]])
)
def test_a_late_sum_restores_workers_that_took_no_part_in_its_agreement(
    bad, restored, target, form
):
    """Agreements are about steps 2 and 6. Of two finite workers the first moves by 2."""
    method = lj.local_sgd(4, delay=2, late="add")
    steps = [np.array([[1.0], [3.0]], np.float32) for _ in range(9)]
    steps[bad - 1][1] = np.nan
    tx = around(lj.outer(method)) if form == "outer" else method
    apply = after if form == "outer" else lj.apply_updates
    seen, state = train(tx, pair(), np.zeros([2, 1], np.float32), steps, apply=apply)
    assert seen[restored - 1][1] == target
    assert seen[restored][1] == target + 3
    assert seen[3][0] == (4 if bad == 2 else 6)
    (pull,) = lj.diagnostics(state)
    assert pull.restored.tolist() == [0, 1] and not lj.waiting(state).any()


# Numbers


@pytest.mark.parametrize(
    "strength, reached",
    mostly_slow([(3.0, [[1], [1]]), (-1.0, [[0], [2]])], fast=[(3.0, [[1], [1]])]),
)
def test_a_scheduled_pull_never_overshoots_its_target(strength, reached):
    tx = lj.exchange(lj.Pull(lj.rules.average(), lambda t: strength * t))
    assert exchanged(tx, pair(), np.array([[0.0], [2.0]]))[0].tolist() == reached


@pytest.mark.slow
@pytest.mark.parametrize("method", [lj.diloco, lj.downpour])
def test_all_workers_hold_the_same_target_in_bfloat16(method):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 500)), jnp.bfloat16)
    grads = [jnp.asarray(rng.normal(size=(2, 500)), jnp.bfloat16) for _ in range(2)]
    tx = optax.chain(optax.sgd(0.3), method(2))
    seen, state = train(tx, pair(), x, grads)
    np.testing.assert_array_equal(seen[1][0], seen[1][1])
    assert seen[1].dtype == jnp.bfloat16
    assert (seen[1][0] != seen[0][0]).any()


@pytest.mark.slow
def test_push_sum_weights_are_as_exact_as_the_parameters():
    """With out-degrees 2, 1, 1, the weights are not powers of two."""
    graph = lj.topology.from_edges([[(0, 1), (0, 2), (1, 2), (2, 0)]])
    with jax.enable_x64(True):
        x = np.random.default_rng(0).normal(size=(3, 4))
        workers = lj.Workers(1, 3)
        got, _ = exchanged(lj.sgp(graph), workers, x, steps=5)
        w, s = np.ones(3), x
        for _ in range(5):
            s, w = graph.mixing[0] @ s, graph.mixing[0] @ w
        assert got.dtype == np.float64
        np.testing.assert_allclose(got, s / w[:, None], rtol=1e-13)


# States


@pytest.mark.slow
def test_flax_and_optax_can_read_states():
    workers = pair()
    tx = optax.chain(optax.adam(0.1), lj.easgd(0.5, 2), lj.lsgd(0.1, 0.1, 2, 2))
    x = {"w": np.ones((2, 3), np.float32)}
    _, state = train(tx, workers, x, [x] * 2)
    saved = flax.serialization.to_bytes(state)
    fresh = workers.map(tx.init)(workers.put(x))
    back = flax.serialization.from_bytes(fresh, saved)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    close(back, jax.device_get(state))
    assert optax.tree.get(state, "center").value["w"].shape == (3,)
    assert optax.tree.get(state[1], "count").value == 2


@pytest.mark.slow
def test_a_state_may_be_continued_with_another_period():
    x = np.ones((2, 3), np.float32)
    _, state = exchanged(lj.local_sgd(2), pair(), x, steps=4)
    _, state = exchanged(lj.local_sgd(3), pair(), x, 2, jax.device_get(state))
    (level,) = lj.diagnostics(state)
    assert (level.period, level.exchanges, level.bytes_sent) == (3, 3, 3 * 16)


def test_bytes_are_exact_beyond_what_an_int32_holds():
    traffic = Traffic.zero("local", 1, 0)
    for _ in range(5):
        traffic = traffic.sent(3e9)
    assert total(traffic.bytes_sent.value) == 15_000_000_000
    assert total(traffic.bytes_each.value) == 3_000_000_000


def test_resize_discards_messages_in_flight():
    tx = lj.lsgd(0.5, 0.0, 2, 2, delay=1, loss_window=1)
    x = np.array([[0.0], [8.0]], np.float32)
    _, state = train(tx, pair(), x, [0 * x], [[1.0, 2.0]])
    pending = state.pulls[0].pending
    assert pending.takes_part.all() and pending.z.tolist() == x.tolist()
    assert pending.stage.tolist() == [RECORDED] * 2
    resized = lj.resize(state, [1, 1, 0]).pulls[0].pending
    assert resized.stage.tolist() == [IDLE] * 3


# Errors


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: lj.lsgd(axes=((), "node")),
            r"`axes` must be a name .* got axes=\(\(\), 'no",
        ),
        (lambda: lj.lsgd(axes=("a", "b", "c")), "`axes` must be one or two mesh axes"),
        (
            lambda: lj.rules.average(axes=(("a", "b"), "c")),
            "`axes` must be a name of a mesh axis",
        ),
        (lambda: lj.allreduce(axes=3), "or a tuple of names, got axes=3"),
        (lambda: lj.fragment(2, 2), r"`index` must be an int in \[0, 2\)"),
        (
            lambda: lj.lsgd(0.1, 0.1, 8, 9, fragments=2),
            "got fragments=2 and a period of 9",
        ),
    ],
)
def test_refuses(build, message):
    with pytest.raises(ValueError, match=message):
        build()


HABITS = {
    "flax": lambda init, x: flax.jax_utils.replicate(init(x[0]), jax.devices()[:2]),
    "vmap": lambda init, x: jax.vmap(init)(x),
    "stack": lambda init, x: jax.tree.map(lambda *row: jnp.stack(row), *map(init, x)),
    "put": lambda init, x: pair().put(jax.vmap(init)(x)),
}
FORMS = {
    "chain": lambda: optax.chain(optax.sgd(0.1), lj.local_sgd(2)),
    "every step": lambda: lj.easgd(0.1, 1),
    "aggregation": lambda: lj.allreduce(),
    "outer": lambda: lj.outer(lj.local_sgd(2)),
}


STACKED = [*((habit, "chain") for habit in HABITS), *(("vmap", form) for form in FORMS)]


# By default one habit, with one form that is a chain and one that is none.
@pytest.mark.parametrize(
    "habit, form", mostly_slow(STACKED, fast=[("vmap", "every step"), ("vmap", "outer")])
)
def test_a_state_that_is_stacked_over_workers_is_refused_with_the_way_out(habit, form):
    tx, workers, x = FORMS[form](), pair(), jnp.arange(6.0).reshape(2, 3)
    state = HABITS[habit](tx.init, x)

    def step(x, state):
        return tx.step(x, state) if form == "outer" else tx.update(x, state, x)

    with pytest.raises(
        ValueError, match=r"count.* has the shape \(2,\).*workers.replicate"
    ):
        workers.map(step)(x, state)
    workers.map(step)(x, workers.replicate(tx.init(x[0])))


def test_an_axis_that_is_not_bound_is_named_with_those_that_are():
    tx, x = lj.local_sgd(1), jnp.ones([2, 3])
    step = lambda x: tx.update(x, tx.init(x), x)[0]
    with pytest.raises(
        NameError, match="'node' here, where 'batch' is bound: .*axes='batch'"
    ):
        jax.pmap(step, axis_name="batch")(x)
    with pytest.raises(NameError, match="where 'a' and 'b' are bound"):
        jax.vmap(jax.vmap(step, axis_name="b"), axis_name="a")(x[None])
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.NamedSharding(mesh, jax.P("data"))
    with pytest.raises(
        NameError, match="a `jax.jit` binds none, with or without shardings"
    ):
        jax.jit(step, in_shardings=rows)(x)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    [lj.diloco(2, axes=()), lj.parle(0.1, axes=())],
)
def test_a_state_made_outside_of_jit_may_be_donated_with_the_parameters(method):
    """No buffer of the state is one of the parameters, or stands in it twice."""
    o, x = lj.outer(method), {"w": jnp.ones(3)}
    state = o.init(x)
    for _ in range(2):
        x, state = jax.jit(o.step, donate_argnums=(0, 1))(x, state)
    assert x["w"].tolist() == [1, 1, 1]
    x, state = {"w": jnp.ones(3)}, method.init({"w": jnp.ones(3)})
    update = jax.jit(lambda x, s: method.update(x, s, x), donate_argnums=(0, 1))
    assert int(update(x, state)[1].count.value) == 1


@pytest.mark.slow
def test_numbers_of_python_may_be_leaves():
    tx, x = optax.chain(optax.sgd(0.5), lj.local_sgd(1, axes=())), {"w": 1.0, "n": 3}
    updates, _ = tx.update({"w": 1.0, "n": 0}, tx.init(x), x)
    assert lj.apply_updates(x, updates) == {"w": 0.5, "n": 3}
    o = lj.outer(lj.local_sgd(1, axes=()))
    assert o.step(x, o.init(x))[0] == x


def test_arrays_must_stand_in_place_of_references():
    ref = jax.new_ref(jnp.zeros(2))
    for call in (pair().map(lambda x: x[...]), pair().put, pair().replicate):
        with pytest.raises(ValueError, match="got a jax.Ref at .*: pass its value"):
            call({"a": ref})


def test_a_state_of_other_fields_is_not_relabeled():
    """As many leaves are not enough to give a rule's state the form of another."""
    before = {"a": lj.Shared(jnp.ones(2)), "b": jnp.ones(3)}
    after = {"a": jnp.ones(2), "b": jnp.zeros(3)}
    assert isinstance(kernel._in_the_form_of(before, after)["a"], lj.Shared)
    other = {"a": jnp.ones(2), "c": jnp.zeros(3)}
    assert kernel._in_the_form_of(before, other) is other


def test_a_narrow_wire_keeps_the_error_of_one_tree():
    def agree(group, x, y, state, takes_part, t):
        mean, count = group.masked_mean(y, takes_part)
        twice, _ = group.masked_mean(jax.tree.map(jnp.square, y), takes_part)
        return mean, count > 0, state

    rule = lj.rules.Rule("local", lambda params: (), agree, keeps=("reference", "error"))
    workers = lj.Workers(1, 2)
    x = workers.put(jnp.ones([2, 3]))

    def step(wire):
        tx = lj.exchange(lj.Pull(rule, 1.0, wire=wire))
        state = workers.map(tx.init)(x)
        return workers.map(lambda x, s: tx.update(x, s, x))(x, state)

    step("float32")
    with pytest.raises(ValueError, match="with a narrow `wire` a rule may call one of"):
        step("int8")


@pytest.mark.parametrize("form", ["chain", "outer"])
def test_an_exchange_without_pulls_changes_nothing(form):
    tx = lj.lsgd(0.0, 0.0)
    x = {"w": jnp.arange(3.0)}
    if form == "chain":
        u, _ = tx.update(x, tx.init(x), x, value=1.0)
        assert u["w"].tolist() == [0, 1, 2]
    else:
        y, _ = lj.outer(tx).step(x, lj.outer(tx).init(x), loss=1.0)
        assert y["w"].tolist() == [0, 1, 2]
