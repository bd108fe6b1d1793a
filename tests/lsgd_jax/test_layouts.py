"""Sharded workers compute the same numbers as workers on one device each."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from harness import in_turn, mostly_slow
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import lsgd_jax as lj


SGD = optax.sgd(0.1, momentum=0.9)
GUARD = lj.Guard(warmup=2, threshold=0.5, clip=0.5, layerwise=True)
METHODS = {
    "lsgd": lambda: optax.chain(SGD, lj.lsgd(0.3, 0.2, 2, 3)),
    "easgd": lambda: optax.chain(SGD, lj.easgd(period=2)),
    "diloco": lambda: optax.chain(SGD, lj.diloco(period=3)),
    "sgp": lambda: optax.chain(SGD, lj.sgp()),
    "wagma": lambda: optax.chain(SGD, lj.wagma()),
    "grawa": lambda: optax.chain(SGD, lj.contrib.grawa(0.5, 2, layerwise=True)),
    "edit": lambda: optax.chain(SGD, lj.diloco(2, guard=GUARD, restart=2)),
    "radial": lambda: optax.chain(SGD, lj.diloco(2, merge="radial")),
    "krum": lambda: optax.chain(lj.robust.krum(0, keep=2), SGD),
    "cge": lambda: optax.chain(lj.robust.cge(1, decay=0.5), SGD),
    "median": lambda: optax.chain(lj.robust.coordinate_median(), SGD),
}
SPECS = {"in": {"kernel": P(None, "fsdp"), "bias": P("fsdp")}, "out": P("fsdp")}
SIZES = {"in": {"kernel": (8, 16), "bias": (16,)}, "out": {"kernel": (16, 4)}}

# Nodes, locals, devices inside a worker. In the last grid a device holds two workers.
GRIDS = [(2, 2, 2), (1, 2, 4), (2, 1, 4), (2, 2, 4)]


def network(workers, specs=SPECS, sizes=SIZES):
    """Returns parameters, equal on all workers, and a batch for each worker."""

    def draw(*shape):
        return np.random.default_rng(sum(shape)).normal(size=shape)

    def shaped(shape):
        return draw(*shape).astype(np.float32)

    params = jax.tree.map(shaped, sizes, is_leaf=lambda x: isinstance(x, tuple))
    inputs = sizes["in"]["kernel"][0]
    outputs = sizes["out"]["kernel"][1]
    W = workers.num_workers
    batch = shaped((W, 6, inputs)), shaped((W, 6, outputs))
    return workers.replicate(params, specs), workers.put(batch)


def step_of(tx, product=lambda a, b, spec: a @ b):
    """A step of one worker; product: of two matrices, and the layout of the result."""

    def step(params, state, batch):
        def loss(params):
            x, y = batch
            hidden = product(x, params["in"]["kernel"], P(None, "fsdp"))
            hidden = jnp.tanh(hidden + params["in"]["bias"][None])
            return jnp.square(product(hidden, params["out"]["kernel"], P()) - y).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, state = tx.update(grads, state, params, value=value)
        return lj.apply_updates(params, updates), state, value

    return step


def trained(workers, tx, specs=SPECS, step=None):
    """Returns parameters and state after 6 steps, which keep their layouts."""
    params, batch = network(workers, specs)
    state = workers.map(tx.init)(params)
    before = jax.tree.map(lambda x: x.sharding, (params, state))
    step = workers.map(step or step_of(tx), donate=(0, 1))
    for _ in range(6):
        params, state, _ = step(params, state, batch)

    def check(x, sharding):
        assert x.sharding.mesh == workers.mesh
        assert x.sharding.is_equivalent_to(sharding, x.ndim), f"{sharding} -> {x.sharding}"

    jax.tree.map(check, (params, state), before)
    assert not any(pull.misplaced.any() for pull in lj.diagnostics(state))
    return params, state


@functools.cache
def trained_in_shards(method, nodes, locals, inside):
    """`trained` on a grid of workers, which several tests compare with."""
    return trained(lj.Workers(nodes, locals, inside={"fsdp": inside}), METHODS[method]())


def close(tree, other, rtol=1e-6):

    def compare(x, y):
        return np.testing.assert_allclose(x, y, rtol=rtol, atol=1e-6)

    jax.tree.map(compare, *jax.device_get((tree, other)))


QUICK = [("lsgd", GRIDS[0])]
COMBINED = QUICK + [("lsgd", grid) for grid in GRIDS[1:]] + in_turn(METHODS, GRIDS)[1:]


@pytest.mark.parametrize("method, grid", mostly_slow(COMBINED, fast=QUICK))
def test_numbers_are_those_of_unsharded_workers(method, grid):
    nodes, locals, inside = grid
    whole = lj.Workers(nodes, locals)
    params, state = trained_in_shards(method, nodes, locals, inside)
    expected, whole_state = trained(whole, METHODS[method](), None)
    close(params, expected)
    for mine, other in zip(lj.diagnostics(state), lj.diagnostics(whole_state)):
        # All leaves are sharded: a device sends its share, and at most a count, a flag and
        # a number for each leaf. Krum's 3 W x W sums are of whole workers.
        per_leaf = 4 * 3 if method in ("grawa", "edit", "radial") else 0
        gaps = 12 * (nodes * locals) ** 2 if method == "krum" else 0
        assert int(mine.payload) <= int(other.payload) // inside + 8 + per_leaf + gaps
    kernels = [x for x in jax.tree.leaves(state) if x.shape[-2:] == (8, 16)]
    for moment in kernels:
        assert moment.sharding.spec[-1] == "fsdp"


NARROW = {
    "diloco": lambda wire: lj.diloco(period=3, wire=wire),
    "sgp": lambda wire: lj.sgp(wire=wire),
}


@pytest.mark.slow  # `test_wire.py` has shards whose errors add up, and their draws
@pytest.mark.parametrize("method", NARROW)
def test_shards_travel_in_narrow_formats(method):
    """A shard consists of whole blocks of its leaf, so the numbers are the same."""
    specs = {"in": {"kernel": P("fsdp"), "bias": P("fsdp")}, "out": P("fsdp")}
    sharded = lj.Workers(2, 2, inside={"fsdp": 2})
    whole = lj.Workers(2, 2)
    tx = optax.chain(SGD, NARROW[method](lj.Wire("int8", block=8)))
    params, state = trained(sharded, tx, specs)
    expected, whole_state = trained(whole, tx, None)
    close(params, expected)
    for mine, other in zip(lj.diagnostics(state), lj.diagnostics(whole_state)):
        assert int(mine.payload) <= int(other.payload) // 2 + 8


MOVING = ("lsgd", "median", "diloco", "sgp")


@pytest.mark.parametrize("method", mostly_slow(MOVING, fast=MOVING[1:2]))
def test_an_exchange_moves_shards(method):
    """Collectives of the compiled step move shards, and none within a worker."""
    workers = lj.Workers(2, 2, inside={"fsdp": 2})
    sizes = {"in": {"kernel": (64, 128), "bias": (128,)}, "out": {"kernel": (128, 32)}}
    params, batch = network(workers, SPECS, sizes)
    tx = METHODS[method]()

    def exchange_only(p, s, g):
        return tx.update(g, s, p, value=jnp.float32(1))

    state = workers.map(tx.init)(params)
    text = workers.map(exchange_only).lower(params, state, params).compile().as_text()
    smallest = 64 * 128
    found = re.findall(
        r"= (\w+)\[([\d,]*)\]\S* ((?:all|collective|reduce)-[a-z-]+)\(", text
    )
    assert any("all-" in kind or "permute" in kind for *_, kind in found)
    for _, shape, kind in found:
        elements = np.prod([int(n) for n in shape.split(",") if n], initial=1)
        gathered = 4 if kind == "all-gather" else 1  # one shard of each worker
        assert elements <= gathered * (smallest + 128 + 128 * 32) / 2 + 1, (kind, shape)
    inside = r"replica_groups=(\{\{0,1\}|mesh\[[^]]*\] \{'fsdp'\})"
    for line in text.splitlines():
        if re.search(inside, line) and re.search(r" (all|collective)-\S+\(", line):
            assert re.search(r"= \(?(f32|s8|pred|s32)\[[18]?\]", line), line


def test_a_worker_that_is_not_finite_in_one_shard_is_restored():
    workers = lj.Workers(1, 2, inside={"fsdp": 4})
    tx = lj.lsgd(0.1, 0.0, local_period=1)
    params = np.ones([2, 8, 4], np.float32)
    params[0, 7, 3] = np.nan
    x = workers.put(params, P("fsdp"))
    loss = workers.put(np.array([1.0, 2.0], np.float32))
    step = workers.map(
        lambda x, s, v: lj.apply_updates(x, tx.update(jnp.zeros_like(x), s, x, value=v)[0])
    )
    after = workers.fetch(step(x, workers.map(tx.init)(x), loss))
    np.testing.assert_array_equal(after, np.ones_like(params))


@pytest.mark.slow
def test_a_shard_that_is_changed_behind_an_exchange_is_noticed():
    workers = lj.Workers(1, 2, inside={"fsdp": 2, "model": 2}, debug=True)
    tx = optax.chain(lj.lsgd(0.1, 0.0, local_period=1), optax.scale(0.5))
    x = workers.put(np.ones([2, 8, 4], np.float32), P("model", "fsdp"))
    step = workers.map(lambda x, s: _step_of_ones(tx, x, s))
    x, state = step(x, workers.map(tx.init)(x))
    with pytest.raises(ValueError, match="an exchange must stand last"):
        step(x, state)


def _step_of_ones(tx, x, state):
    u, state = tx.update(jnp.ones_like(x), state, x, value=jnp.float32(1))
    return x + u, state


def test_specs_may_be_a_prefix_a_tree_or_a_function():
    workers = lj.Workers(2, 1, inside={"fsdp": 2, "model": 2})
    tree = {"a": {"b": np.zeros([2, 4, 8]), "c": np.zeros([2, 12])}, "key": np.zeros(2)}

    def spec(placed):
        return placed["a"]["b"].sharding.spec

    assert spec(workers.put(tree)) == P("node")
    one = workers.put(tree, {"a": P(("fsdp", "model")), "key": None})
    assert spec(one) == P("node", ("fsdp", "model"))
    two = workers.put(tree, lambda path, x: P("model") if path == "a/b" else P())
    assert spec(two) == P("node", "model") and two["a"]["c"].sharding.spec == P("node")
    three = workers.put(tree, lj.layouts.largest_dimension("model", 2, smallest=8))
    assert spec(three) == P("node", None, "model")
    assert spec(workers.put(tree, lj.layouts.following(two))) == P("node", "model")
    shared = workers.share({"w": np.zeros([4, 2])}, P("fsdp"))
    assert shared.value["w"].sharding.spec == P("fsdp")
    rows = workers.put_owned(tree, {"a": {"b": P("fsdp"), "c": P()}, "key": P()})
    assert spec(rows) == P("node", "fsdp")
    np.testing.assert_array_equal(workers.fetch(one)["a"]["b"], tree["a"]["b"])


@pytest.mark.parametrize(
    ("specs", "problem"),
    [
        (P("node"), r"leaf \['w'\].*axes inside the worker.*: node of"),
        (P(None, None, "fsdp"), "rank at least 3"),
        (P("fsdp"), "partitioned 4 times, but the dimension size is 6"),
        ({"v": P("fsdp")}, "prefix of the tree, which has 'w' at the top, got 'v'$"),
        ({"w": [P()]}, "which has a ndarray at 'w', got a list$"),
        (lambda path, leaf: "fsdp", "must be a PartitionSpec .*got 'fsdp'"),
    ],
)
def test_specs_that_do_not_fit_are_refused(specs, problem):
    workers = lj.Workers(2, 1, inside={"fsdp": 4})
    with pytest.raises(ValueError, match=problem):
        workers.put({"w": np.zeros([2, 6, 8])}, specs)


def test_specs_with_another_function_in_a_field_are_told_so_in_one_line():
    """As of a `TrainState` that was made once more, with an `apply_fn` of its own."""

    def make():
        return TrainState.create(
            apply_fn=lambda x: x, params={"w": jnp.ones(4)}, tx=optax.sgd(0.1)
        )

    specs = {"model": jax.tree.map(lambda _: P(), make())}
    with pytest.raises(ValueError, match="but the TrainState at 'model' has other ") as got:
        lj.Workers(2, inside={"fsdp": 4}).replicate({"model": make()}, specs)
    assert len(str(got.value)) < 300


@pytest.mark.slow  # `test_outer.py` has a shard_map of explicit axes
def test_a_shard_map_of_the_user_may_have_automatic_axes():
    """Without `Workers` the layouts are not known: it is slower, with the same numbers.

    So has a mapped function inside of another jit.
    """
    tx = METHODS["lsgd"]()
    sharded = lj.Workers(2, 2, inside={"fsdp": 2})
    params, batch = network(sharded)
    state = sharded.map(tx.init)(params)
    step = sharded.map(step_of(tx))
    expected, *_ = step(params, state, batch)
    close(jax.jit(lambda *given: step(*given)[0])(params, state, batch), expected)
    names = ("node", "local", "fsdp")
    mesh = jax.make_mesh((2, 2, 2), names, axis_types=(AxisType.Auto,) * 3)

    def one(tree):
        return jax.tree.map(lambda x: x[0], tree)

    def init_and_step(params, batch):
        params, batch = one((params, batch))
        params, *_ = step_of(tx)(params, tx.init(params), batch)
        return jax.tree.map(lambda x: x[None], params)

    own = jax.jit(
        jax.shard_map(
            init_and_step,
            mesh=mesh,
            in_specs=P(("node", "local")),
            out_specs=P(("node", "local")),
            axis_names={"node", "local"},
            check_vma=False,
        )
    )
    close(own(*jax.device_get((params, batch))), expected)


@pytest.mark.slow
def test_training_continues_with_other_workers_and_another_size_inside():
    """Through the host: resize, then put the state with the layout of the parameters."""
    before = lj.Workers(2, 2, inside={"fsdp": 2})
    after = lj.Workers(2, 1, inside={"fsdp": 4})
    tx = METHODS["lsgd"]()
    params, state = before.fetch(trained_in_shards("lsgd", 2, 2, 2))
    expected = jax.tree.map(lambda x: x[[0, 2]], params)
    params, state = lj.resize((params, state), sources=[0, 2])
    params = after.put(params, SPECS)
    state = after.put(state, lj.layouts.following(params))
    jax.tree.map(np.testing.assert_array_equal, after.fetch(params), expected)
    _, batch = network(after)
    params, state, _ = after.map(step_of(tx), donate=(0, 1))(params, state, batch)
    assert not any(pull.misplaced.any() for pull in lj.diagnostics(state))


# A mesh of the user

ONE = ("replica",)
BOTH = ("replica", "data")


def user_mesh(kind=AxisType.Auto):
    """A mesh whose axes have another order and other names than those of `Workers`."""
    return jax.make_mesh((2, 2, 2), ("fsdp", "replica", "data"), axis_types=(kind,) * 3)


@pytest.mark.parametrize(
    "axes, set_mesh",
    mostly_slow([(BOTH, True), (ONE, False)], fast=[(BOTH, True)]),
)
def test_workers_on_a_mesh_of_the_user_compute_the_same(axes, set_mesh):
    """Sharding constraints on the other axes work, as specs and as a NamedSharding."""
    mesh = user_mesh()
    tx = METHODS["lsgd"]()
    theirs = lj.Workers(mesh=mesh, axes=axes)
    kernel = jax.sharding.NamedSharding(mesh, P(None, "fsdp"))
    plain = step_of(tx)

    def step(params, state, batch):
        params["in"]["kernel"] = jax.lax.with_sharding_constraint(
            params["in"]["kernel"], P(None, "fsdp") if set_mesh else kernel
        )
        return plain(params, state, batch)

    with jax.set_mesh(mesh) if set_mesh else contextlib.nullcontext():
        params, _ = trained(theirs, tx, step=step)
    ours, _ = trained_in_shards("lsgd", theirs.nodes, theirs.locals, 2)
    close(params, ours, rtol=1e-5)
    assert theirs.mesh == mesh


@pytest.mark.slow  # `test_workers_on_a_mesh_of_the_user_compute_the_same` has other names
def test_methods_accept_the_names_of_the_mesh():
    workers = lj.Workers(mesh=user_mesh(), axes="replica")
    params, batch = network(workers)
    found = []
    for axes in ("replica", ("node", "local")):
        tx = optax.chain(SGD, lj.diloco(2, axes=axes))
        step = workers.map(step_of(tx))
        state = workers.map(tx.init)(params)
        after, state, _ = step(*step(params, state, batch)[:2], batch)
        found.append(workers.fetch((after, lj.center(after, state))))
        anchor = state[-1].pulls[0].rule.anchor
        assert anchor.axes is None  # kept once, not once for each worker
    jax.tree.map(np.testing.assert_array_equal, *found)


SPREAD = {"w": P(None, "fsdp"), "n": P()}
EXPLICIT = {name: METHODS[name] for name in ("lsgd", "sgp", "median")} | {
    "fragments": lambda: optax.chain(SGD, lj.diloco(4, fragments=2, delay=1)),
    "int8": lambda: optax.chain(SGD, lj.diloco(3, wire="int8")),
}


def product_on(kind):
    """The `product` of `step_of` on axes of a type."""

    def product(a, b, spec):
        how = {"out_sharding": spec} if kind == AxisType.Explicit else {}
        return jnp.einsum("ij,jk->ik", a, b, **how)

    return product


def trained_on(kind, axes, tx, set_mesh=True):
    """Returns (params, state, their consensus) after 6 steps on a mesh of one type."""
    mesh = user_mesh(kind)
    workers = lj.Workers(mesh=mesh, axes=axes)
    with jax.set_mesh(mesh) if set_mesh else contextlib.nullcontext():
        params, state = trained(workers, tx, step=step_of(tx, product_on(kind)))
        return workers.fetch((params, state, lj.consensus(params)))


@pytest.mark.slow  # `test_functions_of_a_worker_see_explicit_types` has explicit axes
@pytest.mark.parametrize(
    "method, axes",
    [*in_turn(EXPLICIT, (BOTH, ONE)), ("median", ONE)],
)
def test_explicit_axes_give_the_numbers_of_automatic_ones(method, axes):
    """With and without the mesh as context. Counters of bytes are compared as well."""
    tx = EXPLICIT[method]()
    is_first = axes == ONE
    expected = trained_on(AxisType.Auto, axes, tx)
    found = trained_on(AxisType.Explicit, axes, tx, set_mesh=is_first)
    close(found, expected, rtol=1e-5)


# On explicit axes a bias is added to a product only if their types agree.
ONES = {
    "in": {"kernel": P("tensor", "fsdp"), "bias": P("fsdp")},
    "out": P("fsdp", "tensor"),
}
KINDS = {"inside": None, "automatic": AxisType.Auto, "explicit": AxisType.Explicit}
# A method for each kind of axes; every method runs in shards above.
WITH_ONES = [
    ("krum", "inside"),
    ("fragments", "automatic"),
    ("int8", "explicit"),
]


@pytest.mark.slow  # `test_outer.py` has a shard_map of explicit axes
@pytest.mark.parametrize("method, kind", WITH_ONES)
def test_axes_of_size_1_change_nothing(method, kind):
    """Specs may name them, and are those of the program, with the axis of the workers."""
    tx = (METHODS | EXPLICIT)[method]()
    without = lj.Workers(2, 1, inside={"fsdp": 4})
    if kind == "inside":
        workers = lj.Workers(2, 1, inside={"fsdp": 4, "tensor": 1})
        specs = ONES
    else:
        types = (KINDS[kind],) * 3
        mesh = jax.make_mesh((2, 4, 1), ("data", "fsdp", "tensor"), axis_types=types)
        workers = lj.Workers(mesh=mesh, axes="data")
        program = ONES | {"out": P(("data", "fsdp"), "tensor")}
        specs = jax.tree.map(lambda spec: jax.NamedSharding(mesh, spec), program)

    step = step_of(tx, product_on(KINDS[kind]))
    params, state = trained(workers, tx, specs, step=step)
    expected, expected_state = trained(without, tx)
    close(params, expected, rtol=1e-5)
    close(lj.diagnostics(state), lj.diagnostics(expected_state))
    assert params["out"]["kernel"].addressable_shards[0].data.shape == (1, 4, 4)


@pytest.mark.parametrize("whole", [False, True])
def test_specs_of_a_state_reach_its_leaves_past_nodes_that_are_none(whole):
    """A `Shared` has an axes of None, and a program makes its specs of the whole state."""
    workers = lj.Workers(2, inside={"fsdp": 4})
    tree = {"a": lj.Shared(jnp.ones(3)), "b": None, "w": jnp.ones([8, 2]), "z": None}

    def spec_of(x):
        return P("fsdp") if x.ndim == 2 else None

    specs = jax.tree.map(spec_of, tree) if whole else {**tree, "a": P(), "w": P("fsdp")}
    placed = workers.replicate(tree, specs)
    assert placed["w"].sharding.spec == P("node", "fsdp")
    assert placed["a"].value.sharding.spec == P()


def test_functions_of_a_worker_see_explicit_types():
    workers = lj.Workers(mesh=user_mesh(AxisType.Explicit), axes="replica")
    x = workers.put({"w": np.arange(32.0).reshape(2, 2, 8), "n": np.arange(2)}, SPREAD)
    seen = []

    def judge(x, batch):
        seen.append(jax.typeof(x["w"]).sharding.spec)
        return jnp.einsum("ij,j->i", x["w"], batch, out_sharding=P()).sum()

    @workers.map
    def step(x, state, batch, rate):
        tx = lj.lsgd(rate, 0.2, 1, 1)  # as `inject_hyperparams` calls it
        loss = judge(x, batch)
        u = jax.tree.map(jnp.zeros_like, x)
        u, state = tx.update(u, state, x, value=loss)
        return lj.apply_updates(x, u), state, lj.rules.Group("node").mean(x["w"])

    state = workers.map(lj.lsgd(0.1, 0.2, 1, 1).init)(x)
    batch = np.ones([2, 8])
    rate = workers.put(np.full(2, 0.1))
    x, state, mean = step(x, state, batch, rate)
    assert set(seen) == {SPREAD["w"]} and lj.consensus(x)["n"] == 0
    assert mean.sharding.spec == P("replica", None, "fsdp")
    assert lj.layouts.following(x)("mu/w", np.ones([2, 8])) == SPREAD["w"]


def test_an_invalid_mesh_is_refused():
    mesh = user_mesh()
    with pytest.raises(ValueError, match="`mesh` and `axes` must stand in place of"):
        lj.Workers(2, mesh=mesh, axes="replica")
    with pytest.raises(ValueError, match="one or two axes of the mesh .* got axes='node'"):
        lj.Workers(mesh=mesh, axes="node")
    with pytest.raises(ValueError, match="`mesh` must be a jax.sharding.Mesh, got mesh=3"):
        lj.Workers(mesh=3, axes="replica")
    mixed = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto, AxisType.Explicit))
    with pytest.raises(ValueError, match="all AxisType.Auto, but 'a' is Auto, 'b' is Expl"):
        lj.Workers(mesh=mixed, axes="a")
    workers = lj.Workers(2, 2)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="is not that of the workers"):
        workers.map(lambda x: x)(jnp.ones(4))


def test_arrays_of_an_explicit_mesh_are_accepted():
    explicit = user_mesh(AxisType.Explicit)
    mesh = user_mesh()
    x = np.arange(16.0, dtype=np.float32).reshape(2, 8)
    lies = jax.sharding.NamedSharding(explicit, P("replica", "fsdp"))
    workers = lj.Workers(mesh=mesh, axes="replica")
    mean = workers.map(lambda x: lj.rules.Group("node").mean(x))
    np.testing.assert_array_equal(mean(jax.device_put(x, lies)), np.stack([x.mean(0)] * 2))
