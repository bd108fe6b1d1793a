"""Tests of `verify`: exchanges find and repair what differs between workers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import METHODS, UNLIKE, Run, exchanged, in_turn, mostly_slow, train
from jax.sharding import PartitionSpec as P

import lsgd_jax as lj
from lsgd_jax._src.exchange.agreement import fingerprint
from lsgd_jax._src.layouts import Layouts, known
from lsgd_jax._src.wire.fingerprints import hashes_of


DTYPES = "float32 bfloat16 float16 int8 uint8 bool int32 float8_e4m3fn".split()


def flipped(x, at, bit):
    """An array on the host with one bit of one element flipped."""
    x = np.array(x)
    x.reshape(-1).view(f"u{x.itemsize}")[at] ^= np.array(1 << bit, f"u{x.itemsize}")
    return x


@pytest.mark.parametrize("draws", [20, pytest.param(1250, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_flipped_bit_of_any_leaf_changes_the_fingerprint(dtype, draws):
    """8 dtypes of 1,250 draws are 10,000."""
    rng = np.random.default_rng(0)
    hashed = jax.jit(fingerprint)
    make = lambda *shape: np.asarray(jnp.asarray(rng.normal(size=shape)).astype(dtype))
    tree = {"a": make(5, 3, 7), "b": make(11), "c": make()}
    before = np.asarray(hashed(tree))
    for _ in range(draws):
        name = rng.choice(list(tree))
        at = rng.integers(tree[name].size)
        bit = 0 if dtype == "bool" else rng.integers(8 * tree[name].itemsize)
        other = tree | {name: flipped(tree[name], at, bit)}
        assert (np.asarray(hashed(other)) != before).any()


def test_places_and_leaves_count_and_random_keys_are_read():
    of = lambda *tree: fingerprint(tree).tolist()
    x, y = jnp.array([1.0, 2.0]), jnp.array([2.0, 1.0])
    assert len({tuple(of(*t)) for t in ((x, y), (y, x), (x, x), (y, y))}) == 4
    assert of(jnp.array([0.0])) != of(jnp.array([-0.0]))
    assert of(jax.random.key(0)) != of(jax.random.key(1))
    assert of() == [0, 0]
    assert hashes_of([x], [()], ()).copies_agree  # so that no copy is compared


@pytest.mark.slow
def test_a_fingerprint_does_not_depend_on_shards_and_reads_every_copy():
    tree = {"a": jnp.arange(32.0).reshape(4, 8), "b": jnp.arange(3.0)}
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def of(tree, spec):
        with jax.set_mesh(mesh), known(Layouts((tree,), [spec, P()])):
            return jax.jit(fingerprint)(tree).tolist()

    whole = fingerprint(tree).tolist()
    for spec in (P("x"), P(None, "y"), P(("y", "x")), P("y", "x"), P()):
        assert of(tree, spec) == whole
    place = jax.NamedSharding(mesh, P())
    for device in range(4):
        other = spoiled(jax.device_put(tree["b"], place), device)
        assert of(tree | {"b": other}, P()) != whole


def spoiled(x, device, at=0, bit=0):
    """A replicated array whose copy on one device has a flipped bit."""
    copies = [np.asarray(s.data) for s in x.addressable_shards]
    copies[device] = flipped(copies[device], at, bit)
    devices = [s.device for s in x.addressable_shards]
    placed = [jax.device_put(c, d) for c, d in zip(copies, devices)]
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, placed)


def start(W):
    draw = np.random.default_rng(0).normal
    return {"a": draw(size=(W, 3, 2)).astype("f4"), "b": draw(size=(W, 5)).astype("f4")}


FORMS = {
    "diloco": (lambda: lj.diloco(2, verify=True), 2),
    "int8": (lambda: lj.local_sgd(2, wire="int8", verify=True), 2),
    "delayed": (lambda: lj.diloco(2, delay=1, verify=True), 2),
    "easgd": (lambda: lj.easgd(0.5, 2, verify=True), 2),
}


@pytest.mark.parametrize(
    "name, devices",
    mostly_slow([(n, d) for n in FORMS for d in (8, 2)], fast=[("diloco", 2)]),
)
def test_a_worker_that_differs_is_named_and_takes_the_majoritys_value(name, devices):
    make, period = FORMS[name]
    tx, workers = make(), lj.Workers(4, 2, devices=jax.devices()[:devices])
    x, state = exchanged(tx, workers, start(8), 2)
    (before,) = lj.diagnostics(state)
    assert not before.differed.any() and (before.leaf == -1).all()
    rng, per_device = np.random.default_rng(1), 8 // devices
    promised = jax.tree.leaves((state.pulls[0].rule, state.pulls[0].wire))
    is_copied = lambda leaf: any(leaf is x for x in promised) and leaf.is_fully_replicated
    leaves, treedef = jax.tree.flatten(state)
    copied = [n for n, leaf in enumerate(leaves) if is_copied(leaf)]
    counts = np.zeros(8, int)
    for n in copied:
        device = int(rng.integers(1, devices))
        at, bit = rng.integers(leaves[n].size), rng.integers(32)
        leaves[n] = spoiled(leaves[n], device, at, bit)
        x, state = exchanged(tx, workers, x, 2 * period, state=treedef.unflatten(leaves))
        (after,) = lj.diagnostics(state)
        counts[device * per_device : (device + 1) * per_device] += 1
        assert after.differed.tolist() == counts.tolist()
        assert len(after.leaves) == len(copied) + 1
        assert after.leaf[device * per_device] == copied.index(n)
        leaves = jax.tree.leaves(state)
        for leaf in filter(lambda x: x.is_fully_replicated, leaves):
            copies = {np.asarray(s.data).tobytes() for s in leaf.addressable_shards}
            assert len(copies) == 1


@functools.cache
def over_two_devices_each(W, devices):
    """A step of DiLoCo, parameters and a state of W workers of two devices each."""
    workers = lj.Workers(W, 1, inside={"tensor": 2}, devices=jax.devices()[:devices])
    one = {"b": np.ones(3, "f4"), "w": np.arange(8, dtype="f4")}
    x = workers.replicate(one, specs={"b": P(), "w": P("tensor")})
    tx = lj.diloco(1, verify=True)

    def still(x, state):
        u, state = tx.update(jax.tree.map(jnp.zeros_like, x), state, x)
        return lj.apply_updates(x, u), state

    step = workers.map(still)
    return step, *step(x, workers.map(tx.init)(x))


# Bits that flip in copies of the anchor's "b" or of the last target, on devices of which
# each worker has two, and the workers that differ.
FLIPS = {
    "a copy of the first worker": ("b", {1: 20}, [0]),
    "its other copy": ("b", {0: 20}, [0]),
    "a copy of the second worker": ("b", {2: 20}, [1]),
    "another copy in each of two": ("b", {1: 20, 2: 7}, [0, 1]),
    "the same copy in each of two": ("b", {1: 20, 3: 20}, [0, 1]),
    "all copies of the second worker": ("b", {2: 20, 3: 20}, [1]),
    "a copy of the last target": ("target", {1: 20}, [0]),
}
PLACES = [(flip, 2, 4) for flip in FLIPS] + [("a copy of the first worker", 1, 2)]
# The last one has two workers on each pair of devices.
MORE_PLACES = [(flip, 4, 8) for flip in FLIPS] + [("a copy of the first worker", 4, 4)]


@pytest.mark.slow
@pytest.mark.parametrize("flip, W, devices", PLACES + MORE_PLACES)
def test_a_copy_inside_a_worker_that_differs_takes_what_most_devices_hold(flip, W, devices):
    name, bits, differ = FLIPS[flip]
    step, x, state = over_two_devices_each(W, devices)
    held = state.pulls[0]
    leaf = {"b": held.rule.anchor.value["b"], "target": held.agreement.target}[name]
    leaves, treedef = jax.tree.flatten(state)
    (n,) = [n for n, own in enumerate(leaves) if own is leaf]
    right = np.asarray(leaf)
    for device, bit in bits.items():
        leaves[n] = spoiled(leaves[n], device, 1, bit)
    per_device = 2 * W // devices
    workers = [i * per_device + k for i in differ for k in range(per_device)]
    for _ in range(2):
        x, state = step(x, treedef.unflatten(leaves))
        (seen,) = lj.diagnostics(state)
        assert np.flatnonzero(seen.differed).tolist() == workers
        assert seen.leaves[seen.leaf[workers[0]]].rpartition("/")[2] == name
        leaves = jax.tree.leaves(state)
        for shard in leaves[n].addressable_shards:
            np.testing.assert_array_equal(shard.data, right[shard.index])


VERIFIED = [name for name in UNLIKE if not METHODS[name].first]


@pytest.mark.slow
@pytest.mark.parametrize("name, devices", in_turn(VERIFIED, (1, 2, 4, 8)))
def test_there_are_no_false_alarms_and_numbers_stay_the_same(name, devices):
    make = METHODS[name].make
    plain, checked = (
        Run(lj.exchange(make(8), verify=v), 4, 2, devices) for v in (False, True)
    )
    seen, state = checked.train()
    for pull in lj.diagnostics(state):
        assert not pull.differed.any()
    for a, b in zip(jax.tree.leaves(seen[-1]), jax.tree.leaves(plain.trained[0][-1])):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_one_worker_sends_nothing_and_others_send_8_bytes_more():
    for W, more in ((1, 0), (4, 8)):
        sent = []
        for verify in (False, True):
            tx = lj.lsgd(0.0, 0.5, 2, 1, order="combine_then_adapt", verify=verify)
            x = start(W)
            _, state = train(tx, lj.Workers(1, W), x, [x] * 2, [np.arange(W)] * 2)
            (pull,) = lj.diagnostics(state)
            sent.append(pull.payload)
        # Each worker adds its own step, so that targets may differ.
        assert not pull.differed.any()
        assert sent[1] - sent[0] == more


def test_other_workers_forget_the_last_target():
    workers = lj.Workers(1, 4)
    x, state = exchanged(lj.local_sgd(1, verify=True), workers, start(4))
    assert workers.fetch(state).pulls[0].agreement.target.any()
    x, state = lj.resize(workers.fetch((x, state)), [0, 1, 1])
    assert not state.pulls[0].agreement.target.any()
    _, state = exchanged(lj.local_sgd(1, verify=True), lj.Workers(1, 3), x, 2, state=state)
    assert not lj.diagnostics(state)[0].differed.any()
