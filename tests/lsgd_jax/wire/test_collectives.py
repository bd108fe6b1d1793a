"""A group's messages against NumPy, with workers on 8, 4, 2, 1 devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import COLLECTIVE, mostly_slow
from jax.sharding import PartitionSpec as P

import lsgd_jax as lj
from lsgd_jax._src.layouts import on_one_device
from lsgd_jax._src.wire import narrow_sums
from lsgd_jax._src.wire.carried import Joint, _place
from lsgd_jax._src.wire.packing import PACKED_BELOW


BOTH = ("node", "local")


# By default an axis lies across devices in part.
@pytest.fixture(params=mostly_slow([8, 4, 2, 1], fast=[4]), ids=lambda d: f"{d} devices")
def workers(request):
    return lj.Workers(2, 4, devices=jax.devices()[: request.param])


@pytest.fixture
def tree(workers):
    rng = np.random.default_rng(0)
    return {
        "w": rng.normal(size=(8, 3, 2)).astype(np.float32),
        "h": rng.normal(size=(8, 4)).astype(jnp.bfloat16),
        "b": rng.normal(size=(8,)).astype(np.float32),
        "empty": np.zeros((8, 0, 3), np.float16),
        "empty too": np.zeros((8, 0), np.float16),
    }


# The workers of each group, in order.
GRID = np.arange(8).reshape(2, 4)
GROUPS = {"local": list(GRID), "node": list(GRID.T), BOTH: [GRID.ravel()]}


def on_all_axes(workers, f, *given):
    """Returns f(group, *given) for the groups along each of the axes, in one program."""
    mapped = workers.map(
        lambda *given: [f(lj.rules.Group(axes), *given) for axes in GROUPS]
    )
    return dict(zip(GROUPS, mapped(*workers.put(given))))


def test_elect_and_broadcast(workers, tree):
    scores = np.array([3, 1, 1, 2, np.nan, 0.5, -np.inf, np.inf], np.float32)

    def f(group, tree, score):
        leader, found = group.elect(score)
        return group.broadcast(tree, leader), leader, found

    for axes, (taken, leader, found) in on_all_axes(workers, f, tree, scores).items():
        for group in GROUPS[axes]:
            finite = np.where(np.isfinite(scores[group]), scores[group], np.inf)
            best = int(np.argmin(finite))
            assert leader[group].tolist() == [best] * len(group)
            assert found[group].tolist() == [bool(np.isfinite(finite).any())] * len(group)
            for name in tree:
                expected = np.stack([tree[name][group[best]]] * len(group))
                np.testing.assert_array_equal(np.asarray(taken[name])[group], expected)


def test_broadcasts_of_nan_and_bools_and_an_election_without_finite_scores(workers):
    """Only worker 3 has a finite value, or True, and no worker a finite score."""
    x = np.full((8, 2), np.nan, np.float32)
    x[3] = 7

    def f(x, score):
        group, source = lj.rules.Group(BOTH), jnp.int32(3)
        flags = group.broadcast(jnp.isfinite(x[0]), source)
        return group.broadcast(x, source), flags, group.elect(score)

    given = workers.put((x, jnp.full(8, jnp.nan)))
    sent, flags, (leader, found) = workers.map(f)(*given)
    assert sent.tolist() == [[7, 7]] * 8
    assert flags.dtype == bool and flags.all()
    assert leader.tolist() == [0] * 8 and not found.any()


def test_mean(workers, tree):
    where = np.array([1, 0, 1, 1, 0, 1, 1, 1], bool)
    tree["w"][1] = np.nan

    def f(group, t, w):
        mean, _ = group.masked_mean(t, w)
        return jax.tree.map(lambda m, x: m.astype(x.dtype), mean, t)

    for axes, got in on_all_axes(workers, f, tree, where).items():
        for group in GROUPS[axes]:
            members = group[where[group]]
            for name in tree:
                wide = np.asarray(tree[name], np.float32)
                expected = wide[members].mean(axis=0).astype(tree[name].dtype)
                tolerance = 1e-2 if name == "h" else 1e-6
                for worker in group:
                    np.testing.assert_allclose(
                        np.asarray(got[name][worker], np.float32),
                        np.asarray(expected, np.float32),
                        rtol=tolerance,
                        atol=tolerance,
                    )
        assert got["h"].dtype == jnp.bfloat16


def test_mean_of_bfloat16_sums_in_float32(workers):
    x = np.full(8, 1, jnp.bfloat16)
    x[0] = 256  # 256 + 1 + ... would stay 256 in bfloat16
    got = workers.map(lambda x: lj.rules.Group(BOTH).mean(x))(workers.put(x))
    assert float(got[0]) == float(jnp.bfloat16((256 + 7) / 8))


PERMUTATIONS = {
    "hop": lambda size: [(i, (i + 1) % size) for i in range(size)],
    "swap": lambda size: [(i, i ^ 1) for i in range(size)],
    "partial": lambda size: [(0, size - 1)],
}


def sources_of(permutation, size):
    """Returns the source of each destination, -1 where there is none."""
    sources = np.full(size, -1)
    for source, destination in permutation:
        sources[destination] = source
    return sources


@pytest.mark.parametrize("kind", mostly_slow(PERMUTATIONS, fast=["hop", "partial"]))
def test_permute(workers, tree, kind):
    def f(group, t):
        permutation = PERMUTATIONS[kind](group.size)
        traced = jnp.asarray(sources_of(permutation, group.size))
        return [group.permute(t, given) for given in (permutation, traced)]

    for axes, found in on_all_axes(workers, f, tree).items():
        for group in GROUPS[axes]:
            sources = sources_of(PERMUTATIONS[kind](len(group)), len(group))
            for name, x in tree.items():
                taken = (sources >= 0).reshape(-1, *[1] * (x.ndim - 1))
                expected = np.where(taken, x[group][sources], np.zeros_like(x[group]))
                for got in found:
                    np.testing.assert_array_equal(np.asarray(got[name])[group], expected)


@pytest.mark.parametrize("rounds", [3, 9])
def test_push_has_the_same_numbers_with_and_without_branches(workers, rounds):
    """Three rounds are branches. Of nine none is, and messages travel twice."""
    rng = np.random.default_rng(0)
    edges = [
        [(i, j) for i in range(8) for j in range(8) if i != j and rng.random() < 0.2]
        for _ in range(rounds)
    ]
    graph, x = lj.topology.from_edges(edges, 8), rng.normal(size=(8, 3, 7))

    def push(x, r):
        weight = jnp.asarray(graph.given, x.dtype)[r.value, lj.rules.Group(BOTH).index]
        return lj.rules.Group(BOTH).push(x, weight, graph.rounds, r.value)

    f, given = workers.map(push), workers.put(x.astype(np.float32))
    assert ("all_to_all" in f.lower(given, workers.share(jnp.int32(0))).as_text()) == (
        rounds == 9 and len(workers.mesh.devices.flat) > 1
    )
    for r in range(rounds):
        others = graph.mixing[r] * (1 - np.eye(8))
        sums, mass = f(given, workers.share(jnp.int32(r)))
        np.testing.assert_allclose(
            sums, np.einsum("ij,jab->iab", others, x), rtol=1e-5, atol=1e-6
        )
        np.testing.assert_allclose(mass, others.sum(axis=1), rtol=1e-6)


@pytest.mark.parametrize(
    "permutation, message",
    [
        ([(0, 1), (0, 2)], "every source may occur once"),
        ([(0, 1), (2, 1)], "every destination may occur once"),
        ([(0, 8)], r"must lie in 0..7 for a group of 8"),
    ],
)
def test_permute_refuses_invalid_permutations(permutation, message):
    workers = lj.Workers(2, 4)
    f = workers.map(lambda x: lj.rules.Group(BOTH).permute(x, permutation))
    with pytest.raises(ValueError, match=message):
        f(workers.put(jnp.ones(8)))


EXCHANGES = {
    "float32": (lj.diloco(1), ["all-reduce"]),
    "bfloat16": (lj.diloco(1, wire="bfloat16"), ["all-gather", "all-to-all"]),
    "int8": (lj.diloco(1, wire="int8"), ["all-gather", "all-to-all"]),
    "int4": (lj.diloco(1, wire="int4"), ["all-gather", "all-to-all"]),
    "leader": (lj.lsgd(0, 0.1, 1, 1, axes="node"), ["all-gather", "all-reduce"]),
    "leader in int8": (
        lj.lsgd(0, 0.1, 1, 1, axes="node", wire="int8"),
        ["all-gather", "all-reduce"],
    ),
    "sparse": (lj.contrib.sparse_diloco(1), ["all-gather"]),
    "peers in int8": (lj.sgp(wire="int8"), ["collective-permute"]),
}
COUNTED = [(name, 12) for name in EXCHANGES]
COUNTED += [("int8", 1), ("float32", 200), ("int8", 200)]


@pytest.mark.parametrize(
    "name, leaves", mostly_slow(COUNTED, fast=[("float32", 12), ("int8", 12)])
)
def test_an_exchange_has_as_many_messages_for_any_number_of_leaves(
    name, leaves, monkeypatch
):
    """Of twelve leaves three are large, and one is in half precision."""
    monkeypatch.setattr(narrow_sums, "SMALL", 0)
    method, expected = EXCHANGES[name]
    o = lj.outer(method)
    workers = lj.Workers(4, 1)

    def leaf(i):
        is_large = leaves <= 12 and i % 4 == 0
        dtype = jnp.bfloat16 if i == 7 else jnp.float32
        return jnp.ones([8, PACKED_BELOW // 8 + 1] if is_large else [500], dtype)

    start = {f"{i:03}": leaf(i) for i in range(leaves)}
    params = workers.replicate(start)
    state = workers.replicate(o.init(start))
    phase = o.phase(2, workers.sizes)
    step = workers.map(lambda x, s: o.step(x, s, loss=jnp.float32(1), phase=phase))
    text = step.lower(params, state).compile().as_text()
    found = [each.strip(" (") for each in COLLECTIVE.findall(text)]
    assert sorted(found) == expected


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("leading", [0, 1])
def test_leaves_of_all_dtypes_lie_side_by_side_bit_by_bit(platform, leading):
    """A collective may add leading axes, and leaves the last one alone."""
    rng = np.random.default_rng(0)

    def of_random_bits(dtype, *shape):
        size = np.prod(shape) * np.dtype(dtype).itemsize
        return jnp.asarray(np.frombuffer(rng.bytes(size), dtype).reshape(shape))

    tree = {
        "codes": of_random_bits(np.int8, 3, 5),
        "half": of_random_bits(jnp.bfloat16, 3, 2, 3),
        "scales": of_random_bits(np.float32, 3),
        "empty": jnp.zeros([3, 0], np.uint16),
        "flags": jnp.array([[True], [False], [True]]),
        "large": jnp.ones([3, PACKED_BELOW + 1]),
    }
    with on_one_device():
        places = [
            _place(platform, i, x, leading, adds=False, joins_on_tpus=True)
            for i, x in enumerate(jax.tree.leaves(tree))
        ]
    joint = Joint(tree, places, leading)
    arrays = joint.arrays(tree)
    assert len(arrays) == {"cpu": 1, "gpu": 2, "tpu": 6}[platform]
    found = joint.tree([jnp.stack([x, x]) for x in arrays])
    for name, x in tree.items():
        for row in found[name]:
            assert row.dtype == x.dtype and row.tobytes() == x.tobytes()


def test_a_coordinatewise_rule_takes_two_messages():
    workers = lj.Workers(2, 2)
    tree = {str(i): jnp.ones((4, 3 + i)) for i in range(10)}
    middle = workers.map(
        lambda t: lj.rules.Group(BOTH).coordinatewise(lambda x: jnp.median(x, axis=0), t)
    )
    text = middle.lower(workers.put(tree)).compile().as_text()
    assert sorted(each.strip(" (") for each in COLLECTIVE.findall(text)) == [
        "all-gather",
        "all-to-all",
    ]


def test_a_collective_without_bound_axes_is_refused():
    with pytest.raises(NameError, match="because no axis is bound: .*`lj.Workers"):
        lj.rules.Group("node").mean(jnp.ones(2))


def over_rows(axis):
    """A program of one worker that calls an exchange for two rows of its own."""

    def mean(x):
        return lj.rules.Group(BOTH).mean(x)

    return jax.vmap(jax.jit(mean), axis_name=axis)


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_an_axis_that_a_vmap_inside_a_worker_binds_again_is_refused(devices):
    """Of as many rows as there are workers along it, in a `jax.jit`."""
    workers = lj.Workers(2, 2, devices=jax.devices()[:devices])
    x = workers.put(jnp.arange(8.0).reshape(4, 2))
    assert workers.map(over_rows("rows"))(x).tolist() == [[3.0, 4.0]] * 4
    for axis in BOTH:
        with pytest.raises(ValueError, match=f"axis '{axis}' .* bound again .*axis_name='"):
            workers.map(over_rows(axis))(x)


def test_an_axis_of_workers_without_a_grid_is_not_bound_again():
    mesh = jax.make_mesh((2,), ("node",), axis_types=(jax.sharding.AxisType.Auto,))
    sharded = jax.shard_map(over_rows("node"), mesh=mesh, out_specs=P(), in_specs=P())
    for program in (jax.jit(sharded), jax.vmap(over_rows("node"), axis_name="node")):
        with pytest.raises(ValueError, match="the axis 'node' of the workers is bound"):
            program(jnp.ones([2, 2]))
