"""Wire formats: the codec, invariants, bytes that travel, and the effect on training."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from harness import close, exchanged, exchanges, mostly_slow, train
from jax.sharding import PartitionSpec as P

import lsgd_jax as lj
from lsgd_jax._src import trees
from lsgd_jax._src.layouts import on_one_device
from lsgd_jax._src.wire import narrow_sums, packing
from lsgd_jax._src.wire.codec import Codec
from lsgd_jax._src.wire.wire import LEVELS


FORMATS = ("bfloat16", "int8", "int4")
RULES = {"source": lj.rules.leader(("node", "local")), "mean": lj.rules.average()}


def there_and_back(x, wire, seed=None):
    key = None if seed is None else jax.random.key(seed)
    return np.asarray(decoded(x, key, wire))


@functools.partial(jax.jit, static_argnums=2)
def decoded(x, key, wire):
    """x as it arrives, by one program; to compile one for each operation takes longer."""
    codec = codec_of(x, wire)
    return codec.decode(codec.encode(x, key))


def codec_of(x, wire):
    with on_one_device():
        return Codec(x, wire)


def quantum(x, wire):
    """The distance between neighboring values of the format at each element of a flat x."""
    if wire.format == "bfloat16":
        return np.abs(x) * 2.0**-7
    top = [np.abs(x[k : k + wire.block]).max() for k in range(0, len(x), wire.block)]
    return np.repeat(top, wire.block)[: len(x)] / LEVELS[wire.format]


# The codec


# By default without int8, whose codes are those of int4 with more levels.
fast_formats = mostly_slow(FORMATS, fast=("bfloat16", "int4"))


@pytest.mark.parametrize("format", fast_formats)
def test_the_error_of_a_draw_is_at_most_a_quantum_and_draws_repeat(format):
    """`test_properties.py` has the error of the nearest value."""
    x = np.random.default_rng(0).normal(size=(7, 83)).astype(np.float32)
    x *= np.geomspace(1e-3, 1e3, x.size).reshape(x.shape)
    wire = lj.Wire(format, "stochastic", block=64)
    q, again, other = (there_and_back(x, wire, seed) for seed in (0, 0, 1))
    rounded = jax.jit(lambda x, key: codec_of(x, wire).round_buffers([x], key))
    _, [early] = rounded(x, jax.random.key(0))
    np.testing.assert_array_equal(q, early)
    bound = quantum(x.ravel(), wire).reshape(x.shape)
    assert (np.abs(q - x) <= bound * (1 + 1e-5)).all()
    assert np.abs(q - x).max() > 0
    np.testing.assert_array_equal(q, again)
    assert (q != other).any()


def test_integers_by_hand():
    x = jnp.array([0.6, -1.0, 0.1, 0.0, 4.0])
    (coded,) = jax.jit(codec_of(x, lj.Wire("int8", block=4)).encode)(x)
    assert coded.codes.tolist() == [76, -127, 13, 0, 127]
    np.testing.assert_allclose(coded.scales, [1 / 127, 4 / 127], rtol=1e-7)
    codec = codec_of(x, lj.Wire("int4", block=4))
    (coded,) = jax.jit(codec.encode)(x)
    # Codes 4, -7, 1, 0, 7: the last two stand in the upper halves of the first two bytes.
    assert coded.codes.tolist() == [4 | 0 << 4, (-7 & 15) | 7 << 4, 1]
    back = jax.jit(codec.decode)([coded]) / np.repeat(coded.scales, 4)[:5]
    np.testing.assert_allclose(back, [4, -7, 1, 0, 7], rtol=1e-6)


# By default `test_the_error_of_a_draw_…` has draws.
@pytest.mark.slow
@pytest.mark.parametrize("format", FORMATS)
def test_stochastic_rounding_has_no_bias(format):
    """The mean of n draws is within 5 standard deviations of the value."""
    draws = 4000
    x = jnp.asarray(np.random.default_rng(1).normal(size=40), jnp.float32)
    wire = lj.Wire(format, "stochastic")
    codec = codec_of(x, wire)
    once = lambda key: codec.decode(codec.encode(x, key))
    mean = jax.vmap(once)(jax.random.split(jax.random.key(0), draws)).mean(axis=0)
    deviation = quantum(np.asarray(x), wire) / 2 / np.sqrt(draws)
    assert (np.abs(mean - x) <= 5 * deviation + 1e-6).all()


@pytest.mark.parametrize("format", fast_formats)
def test_zeros_stay_and_non_finite_values_count_as_zero(format):
    wire = lj.Wire(format, block=4)
    zeros = jnp.zeros(6)
    assert there_and_back(zeros, wire).tolist() == [0] * 6
    assert there_and_back(zeros, wire, seed=0).tolist() == [0] * 6
    broken = jnp.array([jnp.nan, 1.0, -jnp.inf, 1.0, 1e-45, 3.4e38])
    back = there_and_back(broken, wire)
    assert back[:5].tolist() == [0, 1, 0, 1, 0] and np.isfinite(back).all()
    assert there_and_back(jnp.zeros((0, 3)), wire).shape == (0, 3)


def test_leaves_share_no_scale_and_gaps_do_not_travel():
    """Small leaves share a buffer, with the results of each leaf alone."""
    draw = np.random.default_rng(0).normal
    tree = {"a": draw(size=(3, 100)), "b": draw(size=5) * 1e3, "c": draw(size=512) / 1e3}
    tree = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree)
    axes = ("node", "local")
    rule = lj.rules.Rule(axes, lambda params: (), _to_the_first, keeps=("reference",))
    wire = lj.Wire("int4")
    z, state = _once(rule, wire, tree)
    for name, x in tree.items():
        middle = x / 2  # the reference, and the difference that travels
        close(z[name][1], middle + there_and_back(middle, wire), atol=0)
    assert lj.diagnostics(state)[0].payload == 409 + 4 * 5


def _to_the_first(group, x, y, state, fit, t):
    return group.broadcast(y, jnp.int32(0)), jnp.asarray(True), state


def _once(rule, wire, tree):
    """Where two workers, the first at `tree`, the second at 0, are after one exchange."""
    tx = lj.exchange(lj.Pull(rule, 1.0, wire=wire))
    return exchanged(
        tx, lj.Workers(1, 2), jax.tree.map(lambda x: np.stack([x, 0 * x]), tree)
    )


# Errors


def test_unknown_wire_formats_are_refused():
    for unknown in ("int9", ["int8"], 8):
        with pytest.raises(ValueError, match="`wire` must be one of"):
            lj.local_sgd(2, wire=unknown)
    with pytest.raises(ValueError, match="`rounding` must be one of"):
        lj.Wire("int8", rounding="up")
    with pytest.raises(ValueError, match="`block` must be a positive int, got block=0"):
        lj.Wire("int8", block=0)
    silent = lj.rules.Rule("local", lambda params: (), _to_the_first)
    lj.Pull(silent, 1.0, wire="float32")
    with pytest.raises(ValueError, match="`wire` must be 'float32' for a rule whose"):
        lj.Pull(silent, 1.0, wire="int8")
    with pytest.raises(ValueError, match=r"`across` must name axes .*'node', 'local'"):
        lj.diloco(wire=lj.Wire("int8", across="nodes"))
    with pytest.raises(ValueError, match="`across` is only for a rule that takes a mean"):
        lj.lsgd(0.0, 0.1, wire=lj.Wire("int8", across="node"))


@pytest.mark.parametrize("missing", ["reference", "error"])
def test_a_rule_that_keeps_too_little_raises(missing):
    keeps = {"reference": (), "error": ("reference",)}[missing]
    rule = dataclasses.replace(lj.rules.average(), keeps=keeps)
    with pytest.raises(ValueError, match=f"must have '{missing}'"):
        _once(rule, "int8", jnp.ones(3))


# Invariants


@pytest.mark.parametrize("format", mostly_slow(["int8", "int4"], fast=["int4"]))
def test_lsgd_and_diloco_by_hand(format):
    """Three workers, three exchanges, one block: q = Q(v - r + e), in NumPy."""
    levels = LEVELS[format]
    rng = np.random.default_rng(0)
    start = rng.normal(size=(3, 5)).astype(np.float32)
    steps = rng.normal(size=(3, 3, 5)).astype(np.float32)
    losses = rng.uniform(size=(3, 3)).astype(np.float32)

    def Q(x):
        scale = np.abs(x).max(axis=-1, keepdims=True) / levels
        return np.round(x / scale) * scale

    lsgd = lj.lsgd(0.0, 0.25, global_period=1, loss_window=1, wire=format)
    diloco = lj.diloco(1, optax.sgd(0.5), wire=format)
    workers = lj.Workers(1, 3)
    seen, state = train(lsgd, workers, start, steps, losses)
    x = start
    r = start.mean(axis=0)
    for t in range(3):
        y = x + steps[t]
        r = r + Q(y[losses[t].argmin()] - r)
        x = y + 0.25 * (r - y)
        close(seen[t], x)
    close(state.pulls[0].wire.reference.value, r)

    seen, state = train(diloco, workers, start, steps, losses)
    x, a, e = start, start.mean(axis=0), 0
    for t in range(3):
        owed = x + steps[t] - a + e
        e = owed - Q(owed)
        a = a + 0.5 * Q(owed).mean(axis=0)
        x = np.stack([a] * 3)
        close(seen[t], x)
    close(state.pulls[0].wire.error, e)


BEGINS = ("together", "apart", "one at nan", "all huge", "one huge")
FIRST = [(r, w, b) for r in ("source", "mean") for w in FORMATS for b in BEGINS]


@pytest.mark.parametrize(
    "method, format, begin",
    mostly_slow(FIRST, fast=[x for x in FIRST if x[:2] == ("mean", "int4")]),
)
def test_the_first_exchange_rounds_differences_and_not_values(method, format, begin):
    """All huge: an element of every worker; one huge: an element of the first worker."""
    rng = np.random.default_rng(0)
    start = np.stack([rng.normal(size=300).astype(np.float32)] * 4)
    steps = rng.uniform(-0.01, 0.01, size=(4, 300)).astype(np.float32)
    largest = 0.02  # difference to the start
    if begin == "apart":
        start += steps[::-1]
        largest = 0.04
    elif begin == "one at nan":
        start[0, 7] = np.nan
    elif begin == "all huge":
        start[:, 7] = 1e30
    elif begin == "one huge":
        steps[0, 7] = 1e30
    others = {}
    for wire in ("float32", format):
        tx = lj.exchange(lj.Pull(RULES[method], 1.0, wire=wire))
        (x,), _ = train(tx, lj.Workers(2, 2), start, [steps], [np.arange(4.0)])
        others[wire] = np.delete(x, 7, axis=1)
    # A huge difference leaves nothing of the others in its block, which stay at the start.
    levels = 1 if begin == "one huge" else LEVELS.get(format, 2**8)
    close(others[format], others["float32"], atol=largest / levels)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tx", [lj.local_sgd(2, wire="int8"), lj.diloco(2)], ids=["reference", "anchor"]
)
def test_equal_starts_are_found_without_sending_them(tx):
    workers = lj.Workers(2, 2)
    init = workers.map(tx.init)
    x = workers.replicate({"w": jnp.arange(900.0), "b": jnp.ones([])})
    fingerprint = 8
    assert exchanges(init.lower(x).compile().as_text()) == (fingerprint, [])
    outside = lj.outer(tx).init({"w": jnp.arange(900.0), "b": jnp.ones([])})
    found = init(x).pulls[0]
    expected = outside.exchange.pulls[0]
    chex.assert_trees_all_equal(
        (trees.in_common(found.rule), found.wire and found.wire.reference),
        (trees.in_common(expected.rule), expected.wire and expected.wire.reference),
    )


SHARED = [
    ("int8", 1, 3, 3, None),
    ("int4", 2, 4, 4, None),
    ("int4", 2, 4, 4, "node"),  # two nodes gather
    ("int8", 3, 2, 6, "node"),
    ("int8", 2, 4, 2, None),
    ("int4", 4, 2, 2, "node"),
]
# By default the two forms of a leaf take turns.
TURNS = [(*SHARED[0], None), (*SHARED[3], 5)]


@pytest.mark.parametrize(
    "format, nodes, locals, devices, across, columns",
    mostly_slow([(*x, columns) for x in SHARED for columns in (None, 5)], fast=TURNS),
)
def test_means_by_shares_by_hand(
    format, nodes, locals, devices, across, columns, monkeypatch
):
    """Both errors are fed back, and a worker that is not finite still owns its share.

    A flat leaf, and one that keeps its shape, whose blocks lie along its columns.
    """
    monkeypatch.setattr(narrow_sums, "SMALL", 0)
    block, W, rng = 8, nodes * locals, np.random.default_rng(0)
    shape = (37 * block + 5,)
    if columns is not None:
        monkeypatch.setattr(packing, "PACKED_BELOW", 0)
        shape = (2 * W * block, columns)
    Q = functools.partial(reference.rounded, levels=LEVELS[format], block=block)
    shares = functools.partial(reference.sum_of_shares, Q=Q, block=block)
    add_up = shares if nodes != 2 else functools.partial(reference.sum_of_messages, Q=Q)
    if across is None:
        expected = shares
    else:
        expected = lambda owed: reference.sum_on_two_levels(owed, nodes, add_up, block)
    start = rng.normal(size=(W, *shape)).astype(np.float32)
    steps = rng.normal(size=(4, W, *shape)).astype(np.float32)
    losses = rng.uniform(size=(4, W)).astype(np.float32)
    losses[1, 1] = np.nan

    wire = lj.Wire(format, block=block, across=across)
    workers = lj.Workers(nodes, locals, devices=jax.devices()[:devices])
    tx = lj.diloco(1, optax.sgd(0.5), wire=wire)
    seen, state = train(tx, workers, start, steps, losses)
    a, e, x = start.mean(axis=0), 0, start
    for t in range(4):
        is_finite = np.isfinite(losses[t]).reshape(-1, *[1] * len(shape))
        owed = np.where(is_finite, x + steps[t] - a + e, 0)
        total, e = in_turn(expected, owed, block)
        a = a + 0.5 * total / np.isfinite(losses[t]).sum()
        x = np.stack([a] * W)
        close(seen[t], x)
    close(state.pulls[0].wire.error, e, atol=W * 1e-6)


def in_turn(add_up, owed, block):
    """add_up of flat rows, in which the elements of a block follow each other."""
    if owed.ndim == 2:
        return add_up(owed)
    W, n, columns = owed.shape
    rows = owed.reshape(W, n // block, block, columns).swapaxes(2, 3).reshape(W, -1)
    back = lambda x: x.reshape(-1, n // block, columns, block).swapaxes(2, 3)
    total, e = add_up(rows)
    return back(total).reshape(n, columns), back(e).reshape(owed.shape)


UNEVEN = [[(i, (i + 1) % 8) for i in range(8)] + [(0, 4), (0, 2)]]
STAR = [(0, i) for i in range(1, 8)] + [(1, 2), (3, 4)]
GOSSIP = {
    "dpsgd": lambda wire: lj.dpsgd(wire=wire),
    "metropolis": lambda wire: lj.dpsgd(lj.topology.metropolis(STAR), wire=wire),
    "adpsgd": lambda wire: lj.adpsgd(wire=wire),
    "sgp": lambda wire: lj.sgp(lj.topology.from_edges(UNEVEN), wire=wire),
    "gosgd": lambda wire: lj.contrib.gosgd(wire=wire),
    "pairwise": lambda wire: lj.pairwise(wire=wire),
    "wagma": lambda wire: lj.wagma(4, 100, wire=wire),
    "two": lambda wire: lj.sgp(lj.topology.from_edges([[(0, 1)], [(1, 0)]]), wire=wire),
}


@pytest.mark.parametrize("name", mostly_slow(GOSSIP, fast=["two"]))
def test_gossip_conserves_the_sum_in_spite_of_rounding(name):
    """Σ w x and Σ w over all workers, without gradients."""
    tx = GOSSIP[name](lj.Wire("int4", "stochastic", seed=3))
    W = 2 if name == "two" else 8
    start = np.random.default_rng(0).normal(size=(W, 300)).astype(np.float32)
    x, state = exchanged(tx, lj.Workers(1, W), start, steps=4)
    w = np.asarray(getattr(state.pulls[0].rule, "weight", np.ones(W)))
    np.testing.assert_allclose(w @ x, start.sum(axis=0), rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(w.sum(), W, rtol=1e-6)
    assert lj.consensus_distance(x) < 0.7 * np.sqrt(W - 1)  # they do come together


@pytest.mark.slow
@pytest.mark.parametrize(
    "inside, small",
    [({}, 10**6), ({}, 0), ({"fsdp": 2}, 0)],
)
def test_messages_and_errors_add_up_to_the_exact_messages(inside, small, monkeypatch):
    """Over many exchanges of EASGD: Σ Q(v + e) + e = Σ v, by a gather and by shares."""
    monkeypatch.setattr(narrow_sums, "SMALL", small)
    tx = lj.easgd(0.5, 1, wire=lj.Wire("int4", block=4))
    workers = lj.Workers(2, 2, inside=inside)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 50)).astype(np.float32)
    x = workers.put(x, P("fsdp") if inside else None)
    state = workers.map(tx.init)(x)
    first = state.pulls[0].rule.center.value
    step = workers.map(lambda x, s: tx.update(jnp.zeros_like(x), s, x, value=0.0))
    owed = 0
    for _ in range(6):
        center = state.pulls[0].rule.center.value
        owed += (np.asarray(x) - np.asarray(center)).sum(axis=0) * 0.5 / 4
        u, state = step(x, state)
        x = lj.apply_updates(x, u)
    pull = state.pulls[0]
    moved = pull.rule.center.value - first
    rest = np.asarray(pull.wire.error).sum(axis=0) * 0.5 / 4
    assert np.abs(rest).max() > 1e-3
    np.testing.assert_allclose(moved + rest, owed, rtol=1e-4, atol=1e-5)


# Where references and errors are kept


@pytest.mark.parametrize("devices", [4, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "method, across",
    mostly_slow(
        [("source", None), ("mean", None), ("mean", "node")],
        fast=[("mean", "node")],
    ),
)
def test_targets_are_bit_identical_on_all_workers(method, across, devices):
    """Workers at x = 0 take the target whole, so that the update is the target."""
    wire = lj.Wire("int8", "stochastic", across=across)
    tx = lj.exchange(lj.Pull(RULES[method], 1.0, wire=wire))
    workers = lj.Workers(2, 2, devices=jax.devices()[:devices])
    y = workers.put(np.random.default_rng(0).normal(size=(4, 70)).astype(np.float32))
    state = workers.map(tx.init)(y)
    step = workers.map(lambda u, s: tx.update(u, s, 0 * u, value=u[0]))
    for _ in range(2):
        u, state = step(y, state)
        u = np.asarray(u)
        assert np.any(u[0])
        np.testing.assert_array_equal(u, np.broadcast_to(u[0], u.shape))
        copies = state.pulls[0].wire.reference.value.addressable_shards
        assert len(copies) == devices
        for copy in copies:
            np.testing.assert_array_equal(copy.data, u[0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "nodes, locals, inside, across",
    [
        (4, 1, {"fsdp": 2}, None),  # by shares
        (2, 1, {"fsdp": 2, "tp": 2}, None),  # gathered
        (2, 2, {"fsdp": 2}, "node"),
    ],
)
def test_devices_of_a_worker_draw_alike_for_copies(
    nodes, locals, inside, across, monkeypatch
):
    """And not alike for shards: here both halves of w hold the same values."""
    monkeypatch.setattr(narrow_sums, "SMALL", 0)
    wire = lj.Wire("int8", "stochastic", across=across)
    tx, workers = lj.local_sgd(1, wire=wire), lj.Workers(nodes, locals, inside=inside)
    rng, W = np.random.default_rng(0), nodes * locals
    half, b = (rng.normal(size=(W, n)).astype(np.float32) for n in (2000, 4000))
    x = {"w": np.concatenate([half, half], axis=1), "b": b}
    x = workers.put(x, {"w": P("fsdp"), "b": P()})
    step = workers.map(lambda x, s: tx.update(x, s, x))
    state = step(x, workers.map(tx.init)(x))[1]
    kept = state.pulls[0].wire
    for leaf in jax.tree.leaves(kept):
        shards = {}
        for shard in leaf.addressable_shards:
            first = shards.setdefault(str(shard.index), shard.data)
            np.testing.assert_array_equal(shard.data, first)
    first, second = np.split(np.asarray(kept.error["w"]), 2, axis=1)
    assert np.any(kept.error["b"]) and (first != second).any()


@pytest.mark.slow
def test_float32_adds_nothing():
    plain, named = (lj.lsgd(0.1, 0.2, **k) for k in ({}, {"wire": "float32"}))
    workers = lj.Workers(2, 2)
    x = workers.put({"w": np.ones((4, 3), np.float32)})
    texts = []
    for tx in (plain, named):
        state = workers.map(tx.init)(x)
        assert all(pull.wire == () for pull in state.pulls)
        step = workers.map(lambda x, s, tx=tx: tx.update(x, s, x, value=x["w"].sum()))
        texts.append(step.lower(x, state).as_text())
    assert texts[0] == texts[1]


@pytest.mark.slow
@pytest.mark.parametrize("locals", [1, 3])
def test_inside_one_node_nothing_is_rounded(locals):
    rng = np.random.default_rng(0)
    start, steps = rng.normal(size=(2, locals, 9)).astype(np.float32)
    seen, payloads = [], []
    for wire in ("float32", lj.Wire("int4", across="node")):
        tx = lj.diloco(1, optax.sgd(0.5), wire=wire)
        x, state = train(tx, lj.Workers(1, locals), start, [steps])
        seen.append(x)
        payloads.append(lj.diagnostics(state)[0].payload)
    close(*seen)
    assert payloads[0] == payloads[1]


def test_a_worker_restored_after_a_delay_has_no_error():
    tx, workers = lj.diloco(4, delay=1, wire="int4"), lj.Workers(1, 2)
    x, *steps = np.random.default_rng(0).normal(size=(5, 2, 9)).astype(np.float32)
    losses, errors = [[1, 1]] * 3 + [[1, np.nan]], []
    for count in (3, 4):
        _, state = train(tx, workers, x, steps[:count], losses)
        errors.append(np.abs(state.pulls[0].wire.error).max(axis=1))
    assert not errors[0].any()  # the message leaves at the start of step 4
    assert errors[1][0] > 0 and errors[1][1] == 0


def test_resized_workers_share_a_reference_and_have_no_error():
    tx = lj.exchange(
        lj.Pull(lj.rules.average(), 1.0, wire="int4"),
        lj.Pull(lj.rules.leader("local"), 0.5, wire="int8"),
    )
    x = np.random.default_rng(0).normal(size=(4, 9)).astype(np.float32)
    _, state = exchanged(tx, lj.Workers(2, 2), x)
    everywhere, local = (pull.wire for pull in jax.device_get(state).pulls)
    assert np.abs(everywhere.error).min(axis=1).max() > 0 and np.any(local.reference)
    other = lj.resize(state, [0, 3, 3, 1, 2, 2])
    np.testing.assert_array_equal(
        other.pulls[0].wire.reference.value, everywhere.reference.value
    )
    assert not other.pulls[0].wire.error.any() and other.pulls[0].wire.error.shape == (6, 9)
    mean = local.reference[[0, 3, 3, 1, 2, 2]].mean(axis=0)
    close(other.pulls[1].wire.reference, np.stack([mean] * 6))


# Bytes that travel


# By default `test_methods_conformance.py` compares the bytes of small leaves.
@pytest.mark.slow
@pytest.mark.parametrize("name", ("lsgd", "diloco", "sgp"))
def test_large_leaves_take_a_quarter_and_an_eighth_of_the_bytes(name):
    """Read from the operands of the collectives in the compiled program."""
    make = {
        "lsgd": lambda wire: lj.lsgd(0.0, 0.2, global_period=2, wire=wire),
        "diloco": lambda wire: lj.diloco(2, wire=wire),
        "sgp": lambda wire: lj.exchange(
            lj.Pull(lj.rules.push_sum(lj.topology.ring(4), 0, "local"), 1.0, 2, wire=wire)
        ),
    }[name]
    sent = {}
    for wire in ("float32", "bfloat16", "int8", "int4"):
        tx, workers = make(wire), lj.Workers(1, 4)
        shapes = {"w": (4, 1024, 200), "b": (4, 600), "n": (4,)}
        x = jax.tree.map(jnp.ones, shapes, is_leaf=lambda s: isinstance(s, tuple))
        x = workers.put(x)
        state = workers.map(tx.init)(x)
        step = workers.map(lambda x, s, tx=tx: tx.update(x, s, x, value=x["n"]))
        compiled = step.lower(x, state).compile()
        always, (sent[wire],) = exchanges(compiled.as_text())
        _, state = compiled(x, state)
        _, state = compiled(x, state)
        (level,) = lj.diagnostics(state)
        assert always == 0 and level.payload == level.bytes_sent == sent[wire]
    # A mean travels twice: all of it to the owners of shares, and a share to all workers.
    twice = 1 + 1 / 4 if name == "diloco" else 1
    part = {wire: count / sent["float32"] / twice for wire, count in sent.items()}
    assert part["bfloat16"] < 0.51 and part["int8"] < 0.27 and part["int4"] < 0.14
