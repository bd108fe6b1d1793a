"""Tests of Workers: placing trees, running per-worker functions, and errors."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import lsgd_jax as lj


# An axis of workers lies across devices entirely, in part, or not at all.
LAYOUTS = [(2, 4, 8), (4, 2, 2), (2, 4, 1)]
GRIDS = [*LAYOUTS, (2, 4, 4), (2, 4, 2), (1, 6, 3), (6, 1, 3), (7, 1, 7)]


def on(grid):
    nodes, locals, devices = grid
    return lj.Workers(nodes, locals, devices=jax.devices()[:devices])


# By default an axis across devices in part, with vmapped workers on each.
@pytest.fixture(
    params=[
        pytest.param(layout, marks=[] if layout == (4, 2, 2) else pytest.mark.slow)
        for layout in LAYOUTS
    ],
    ids=str,
    scope="module",
)
def workers(request):
    return on(request.param)


@pytest.fixture(params=GRIDS, ids=str, scope="module")
def any_workers(request):
    return on(request.param)


def test_fetch_returns_what_was_put(any_workers):
    workers = any_workers
    tree = {"w": np.random.default_rng(0).normal(size=(workers.num_workers, 3)), "b": None}
    tree["w"] = tree["w"].astype(np.float32)
    back = workers.fetch(workers.put(tree))
    np.testing.assert_array_equal(back["w"], tree["w"])
    assert workers.put(tree)["w"].sharding == workers.sharding


def test_every_worker_knows_its_position(any_workers):
    """index, size and gather agree with node = i // locals, local = i mod locals."""
    workers = any_workers

    def places(_):
        axes = ("node", "local")
        both = lj.rules.Group(axes).index
        return (
            lj.rules.Group("node").index,
            lj.rules.Group("local").index,
            both,
            lj.rules.Group(axes).gather(both),
            lj.rules.Group("local").gather(both),
            lj.rules.Group("node").gather(both),
        )

    nodes, locals, W = workers.nodes, workers.locals, workers.num_workers
    node, local, index, all_ids, row, column = workers.fetch(
        workers.map(places)(workers.put(jnp.zeros(W)))
    )
    ids = np.arange(W)
    np.testing.assert_array_equal(index, ids)
    np.testing.assert_array_equal(node, ids // locals)
    np.testing.assert_array_equal(local, ids % locals)
    np.testing.assert_array_equal(all_ids, np.tile(ids, (W, 1)))
    np.testing.assert_array_equal(row, ids.reshape(nodes, locals).repeat(locals, axis=0))
    np.testing.assert_array_equal(column, np.tile(ids.reshape(nodes, locals).T, (nodes, 1)))


def test_shared_leaves_have_no_worker_axis_in_or_out(workers):
    def f(x, shared):
        assert isinstance(shared, lj.Shared) and shared.value["a"].shape == (3,)
        total, _ = lj.rules.Group(("node", "local")).masked_sum(x)
        return x + shared.value["a"][0], lj.Shared(total)

    W = workers.num_workers
    x, total = workers.map(f)(
        workers.put(jnp.ones(W)), workers.share({"a": jnp.arange(3.0) + 4})
    )
    assert x.tolist() == [5.0] * W
    assert total.value.shape == () and float(total.value) == W
    assert total.value.sharding.is_fully_replicated
    assert total.value.sharding.is_equivalent_to(workers.shared_sharding, 0)


def test_shared_values_selected_by_a_workers_own_count_stay_shared(workers):
    """Wrappers select a state by per-worker counts, which stacks it."""
    counted = workers.map(
        lambda count, t: (count + 1, lj.Shared(jnp.where(count > 0, t.value + 1, t.value)))
    )
    count, t = counted(*workers.put((jnp.ones(8, int), lj.Shared(jnp.arange(3.0)))))
    assert count.shape == (8,) and t.value.tolist() == [1, 2, 3]


def test_all_arguments_may_be_shared(workers):
    f = workers.map(lambda s: s.value + lj.rules.Group(("node", "local")).index)
    assert f(workers.share(jnp.int32(5))).tolist() == [
        5 + i for i in range(workers.num_workers)
    ]


def test_feeding_results_back_compiles_once_and_donates(workers):
    state = workers.put(
        {"x": jnp.ones((workers.num_workers, 5)), "t": lj.Shared(jnp.int32(0))}
    )
    step = workers.map(
        lambda s: {"x": s["x"] * 2, "t": lj.Shared(s["t"].value + 1)}, donate=0
    )
    old = state
    for _ in range(4):
        state = step(state)
    assert step._cache_size() == 1
    assert old["x"].is_deleted() and old["t"].value.is_deleted()
    assert float(state["x"][0, 0]) == 16 and int(state["t"].value) == 4


def test_put_copies_its_argument(workers):
    given = jax.device_put(jnp.ones(workers.num_workers), workers.sharding)
    placed = workers.put(given)
    workers.map(lambda x: x + 1, donate=0)(placed)
    assert placed.is_deleted() and given.tolist() == [1.0] * workers.num_workers
    host = np.ones(workers.num_workers, np.float32)
    placed = workers.put(host)
    host[:] = 7
    assert placed.tolist() == [1.0] * workers.num_workers


def test_numbers_that_a_function_returns_become_arrays(workers):
    """`flax`'s TrainState starts with the Python integer 0 as its step."""
    W = workers.num_workers
    numbers = workers.map(lambda x: (x, 1.0, 3, True, np.float32(2), np.arange(2)))
    x, *rest = numbers(workers.put(jnp.arange(W)))
    assert x.tolist() == list(range(W))
    for got, expected in zip(rest, [1.0, 3, True, 2.0, [0, 1]]):
        assert got.sharding == workers.sharding and got.tolist() == [expected] * W
    shared = workers.map(lambda x: lj.Shared(2))(x)
    assert shared.value.shape == () and int(shared.value) == 2


@pytest.mark.slow
def test_keys_are_fetched_as_keys_that_can_be_put_back(workers):
    keys = jax.random.split(jax.random.key(7, impl="rbg"), workers.num_workers)
    fetched = workers.fetch((workers.put(keys), workers.share(keys[0])))
    again = workers.fetch(workers.put(fetched))
    for own, shared in (fetched, again):
        assert (own == keys).all() and bool(shared.value == keys[0])


def test_replicate_and_random_keys(workers):
    W = workers.num_workers
    copies = workers.replicate({"w": jnp.arange(3.0), "n": np.int32(2)})
    assert copies["w"].shape == (W, 3) and copies["n"].tolist() == [2] * W
    keys = workers.put(jax.random.split(jax.random.key(0), W))
    drawn = workers.map(lambda key: jax.random.normal(key, ()))(keys)
    assert len(set(drawn.tolist())) == W
    same = workers.replicate(jax.random.key(1), keys="copy")
    assert same.shape == (W,) and len(set(map(str, jax.random.key_data(same)))) == 1
    traces = []
    pass_on = workers.map(lambda key, shared: (traces.append(key) or key, shared))
    both = keys, workers.share(jax.random.key(2))
    for _ in range(3):
        both = pass_on(*both)
    assert len(traces) == 1


def test_replicated_keys_are_split_or_a_warning_names_them(workers):
    W, key = workers.num_workers, jax.random.key(3)
    two = jax.random.split(jax.random.key(4, impl="rbg"))
    state = {"rng": (key, two), "shared": lj.Shared(key), "w": jnp.ones(2)}
    own = workers.replicate(state, keys="split")
    assert (own["rng"][0] == workers.put(jax.random.split(key, W))).all()
    assert own["rng"][1].shape == (W, 2) and own["w"].shape == (W, 2)
    for i in range(2):
        assert (own["rng"][1][:, i] == jax.random.split(two[i], W)).all()
    assert bool(own["shared"].value == key)
    with pytest.warns(UserWarning, match=r"same random key at \['rng'\]\[0\], ") as found:
        copies = lj.Workers(1, 2).replicate(state)
    assert found[0].filename == __file__
    assert (copies["rng"][0] == key).all()
    with pytest.raises(ValueError, match="`keys` must be one of .* got keys='fold'"):
        workers.replicate(state, keys="fold")
    # A lone worker shares its key with no other, and a shared key is meant to be one.
    lj.Workers(1, 1, devices=jax.devices()[:1]).replicate(key)
    workers.replicate({"shared": lj.Shared(key)})


def test_a_function_may_keep_what_its_first_trace_has_made(workers):
    """As lazily built layers, caches, and numpyro's guides do."""

    class Lazy:
        weights = None

        def __call__(self, x):
            if self.weights is None:
                with jax.ensure_compile_time_eval():
                    self.weights = jnp.arange(3.0)
            return x * self.weights[None]

    layer = workers.map(Lazy())
    for shape in ([1, 3], [2, 3]):
        y = layer(workers.replicate(jnp.ones(shape)))
        np.testing.assert_array_equal(y[-1], np.broadcast_to(np.arange(3.0), shape))


@jax.tree_util.register_pytree_node_class
class LossScale:
    """Refuses leaves that are no arrays when it is built, as jmp's loss scales do."""

    def __init__(self, scale, count):
        for x in (scale, count):
            assert isinstance(x, jax.Array | np.ndarray), f"got a {type(x).__name__}"
        self.scale, self.count = scale, count

    def tree_flatten(self):
        return (self.scale, self.count), None

    @classmethod
    def tree_unflatten(cls, _, leaves):
        return cls(*leaves)


@pytest.mark.slow
@pytest.mark.parametrize("inside", [None, {"fsdp": 2}])
def test_a_node_of_the_user_is_built_of_arrays_only(inside):
    workers = lj.Workers(2, 2, inside=inside)

    def update(state, batch):
        w, scale = state
        scale = LossScale(scale.scale * 2, scale.count + 1)
        return (w - batch, scale), batch.sum()

    train = lj.around(update, lj.lsgd(0.5, 0.5, 1, 2), params=0)
    start = workers.replicate((jnp.ones(4), LossScale(jnp.ones([]), jnp.int32(0))))
    state = workers.map(train.init)(workers.put(start, lj.layouts.following(start)))
    batch = workers.put_owned(np.ones([4, 4], np.float32))
    state, _ = workers.map(train, donate=0)(state, batch)
    held = workers.fetch(state.state[1])
    assert held.scale.tolist() == [2] * 4 and held.count.tolist() == [1] * 4
    assert lj.consensus(state.state)[1].scale == 2


def test_put_owned_takes_the_rows_of_this_process():
    workers = lj.Workers(2, 4)
    assert workers.owned == range(8)
    assert workers.put_owned(np.arange(8)).tolist() == list(range(8))
    with pytest.raises(ValueError, match="leading axis of 8 .the workers of this process."):
        workers.put_owned(np.arange(7))


def test_gradients_are_not_summed_over_workers(workers):
    """Not even for shared parameters."""
    W = workers.num_workers
    loss = lambda w, x: (w * x).sum()
    grads = workers.map(lambda w, x: jax.grad(loss)(w.value, x))
    x = np.arange(W * 2.0).reshape(W, 2)
    got = grads(workers.share(jnp.ones(2)), workers.put(x))
    np.testing.assert_allclose(got, x)


def test_functions_for_one_worker_need_no_casts():
    """Scans and conds may carry constants, because `check_vma` is off."""

    def f(x):
        total, _ = lax.scan(lambda c, _: (c + x, None), jnp.zeros([]), length=3)
        return lax.cond(x > 1, lambda: total, lambda: jnp.zeros([]))

    workers = lj.Workers(2, 4)
    assert workers.map(f)(workers.put(jnp.arange(8.0))).tolist() == [
        0, 0, 6, 9, 12, 15, 18, 21
    ]  # fmt: skip


def test_raw_axis_names_work_unless_an_axis_is_split():
    f = lambda x: lax.psum(x, "local")
    for devices in (8, 2, 1):
        workers = lj.Workers(2, 4, devices=jax.devices()[:devices])
        assert workers.map(f)(workers.put(jnp.ones(8))).tolist() == [4.0] * 8
    split = lj.Workers(2, 4, devices=jax.devices()[:4])
    with pytest.raises(NameError, match="local"):
        split.map(f)(split.put(jnp.ones(8)))


@pytest.mark.parametrize("bad", [np.ones((7, 2)), np.ones(()), np.ones((2, 4))])
def test_a_wrong_leading_axis_is_refused(bad):
    workers = lj.Workers(2, 4)
    message = r"leading axis of 8 \(W = 2 nodes x 4 locals\), got shape .* at \['w'\]"
    with pytest.raises(ValueError, match=message):
        workers.put({"w": bad})
    with pytest.raises(ValueError, match="leading axis of 8"):
        workers.map(lambda t: t)({"w": bad})


def test_a_flat_batch_is_told_how_it_is_divided():
    workers = lj.Workers(2, 2, devices=jax.devices()[:1])
    with pytest.raises(ValueError, match=r"divided by `x.reshape\(4, 8, 3\)`$"):
        workers.put(np.ones((32, 3)))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"nodes": 0}, "`nodes` must be a positive int, got nodes=0"),
        ({"nodes": 2, "locals": -1}, "`locals` must be a positive int, got locals=-1"),
        ({"nodes": 2.5}, "`nodes` must be a positive int, got nodes=2.5"),
        ({"nodes": True}, "`nodes` must be a positive int, got nodes=True"),
        ({"inside": {"fsdp": 0}}, r"`inside\['fsdp'\]` must be a positive int"),
        ({"nodes": 2, "locals": 1, "inside": {"fsdp": 16}}, "needs 16 devices, got 8"),
        ({"inside": {"local": 2}}, "must be an identifier, and none of 'node'"),
        ({"inside": {"a b": 2}}, "a name in `inside` must be an identifier"),
        ({"inside": "fsdp=2"}, "`inside` must be a dict"),
        (
            {"nodes": 2, "locals": 4, "devices": jax.devices()[:3]},
            "do not divide over the 3 devices given; 1, 2, 4, 8",
        ),
        (
            {"nodes": 2, "locals": 1, "inside": {"fsdp": 3}, "devices": jax.devices()},
            "3, 6 devices would fit",
        ),
    ],
)
def test_invalid_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        lj.Workers(**arguments)


def test_workers_use_the_largest_grid_that_fits():
    assert lj.Workers(1, 7).mesh.size == 7
    with pytest.warns(UserWarning, match="use 3 of the 8 devices"):
        assert lj.Workers(3, 3).mesh.size == 3  # nodes do not share devices
    assert lj.Workers(3, 4).mesh.devices.shape == (3, 2)
    assert lj.Workers(16, 1).workers_per_device == 2
    assert lj.Workers(2).locals == 4 and lj.Workers().num_workers == 8


def test_the_text_form_of_workers():
    assert repr(lj.Workers(2, 4, devices=jax.devices()[:4])) == (
        "Workers(nodes=2, locals=4) on 4 cpu devices (2 x 2), 2 workers per device"
    )
    assert repr(lj.Workers(2, inside={"fsdp": 2})) == (
        "Workers(nodes=2, locals=2, inside={'fsdp': 2}) on 8 cpu devices (2 x 2 x 2), "
        "1 worker per 2 devices"
    )


class Other(NamedTuple):
    misplaced: jax.Array


def exchange_state(misplaced):
    state = lj.exchange(lj.Pull(lj.rules.average(), 1.0)).init(jnp.zeros([]))
    return state._replace(misplaced=misplaced)


@pytest.mark.parametrize("debug", [False, True])
def test_debug_names_the_workers_that_were_moved_behind_an_exchange(debug):
    workers = lj.Workers(2, 2, devices=jax.devices()[:2], debug=debug)
    # A field of that name in a user's own state has no meaning.
    deep = lambda n: (exchange_state(n), Other(n + 1))
    step = workers.map(lambda x, n: (x, {"deep": (deep(n), x)}))
    x = workers.put(jnp.arange(4.0))
    well = workers.put(jnp.zeros(4, jnp.int32))
    assert step(x, well)[0].tolist() == [0, 1, 2, 3]
    moved = workers.put(jnp.array([0, 3, 0, 1]))
    if not debug:
        step(x, moved)
        return
    with pytest.raises(ValueError, match="must stand last in its chain.* workers 1, 3$"):
        step(x, moved)
    assert jax.jit(step)(x, moved)[0].tolist() == [0, 1, 2, 3]  # no values while tracing


@pytest.mark.parametrize("inside", [None, {"fsdp": 2}])
def test_map_takes_keyword_and_static_arguments(inside):
    workers = lj.Workers(2, 2, inside=inside)
    traced = []

    def fn(x, train, *, scale, name="double"):
        traced.append(train)
        return (x * scale if train else x) * {"double": 2, "triple": 3}[name]

    mapped = workers.map(fn, static=("train", "name"))
    x, scale = workers.put((np.arange(4.0), np.full(4, 10.0)))
    for train, options, factor in [
        (True, {}, 20),
        (False, {}, 2),
        (True, {"name": "triple"}, 30),
    ]:
        got = mapped(x, train, scale=scale, **options)
        np.testing.assert_array_equal(got, factor * np.arange(4.0))
    compiled = len(traced)
    np.testing.assert_array_equal(mapped(x, train=True, scale=scale), 20 * np.arange(4.0))
    np.testing.assert_array_equal(mapped(x, True, scale=scale), 20 * np.arange(4.0))
    assert set(traced[compiled:]) <= {True}
    with pytest.raises(ValueError, match="leading axis of 4 .* static=.* a Python value"):
        mapped(x, True, scale=np.float32(1))


def test_map_takes_any_number_of_arguments_beside_static_ones():
    workers = lj.Workers(2, 2)
    mapped = workers.map(lambda *given, factor: factor * sum(given), static="factor")
    x = workers.put(np.arange(4.0))
    np.testing.assert_array_equal(mapped(x, x, x, factor=2), 6 * np.arange(4.0))


@pytest.mark.slow
def test_steps_in_one_scan_are_bit_identical_to_separate_steps():
    workers = lj.Workers(2, 4)
    tx = optax.chain(optax.sgd(0.1, momentum=0.9), lj.lsgd(0.3, 0.2, 2, 4))

    def step(params, state, target):
        loss, grads = jax.value_and_grad(lambda p: ((p - target) ** 2).sum())(params)
        updates, state = tx.update(grads, state, params, value=loss)
        return lj.apply_updates(params, updates), state

    def steps(params, state, targets):
        body = lambda carry, target: (step(*carry, target), None)
        return jax.lax.scan(body, (params, state), targets)[0]

    rng = np.random.default_rng(0)
    params = workers.put(rng.normal(size=(8, 5)).astype(np.float32))
    targets = workers.put(rng.normal(size=(8, 6, 5)).astype(np.float32))
    state = workers.map(tx.init)(params)
    together = workers.map(steps)(params, state, targets)
    one, apart = workers.map(step), (params, state)
    for t in range(6):
        apart = one(*apart, targets[:, t])
    jax.tree.map(np.testing.assert_array_equal, *map(workers.fetch, (together, apart)))


def test_a_leaf_that_is_no_number_is_named(workers):
    with pytest.raises(ValueError, match=r"got 'relu' at \['activation'\]; of an Equinox"):
        workers.replicate({"activation": "relu", "w": jnp.ones(2)})
