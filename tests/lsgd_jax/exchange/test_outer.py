"""outer: any method around any training step, on any mesh."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import (
    GUARDED,
    KINDS,
    METHODS,
    RULES,
    UNLIKE,
    after,
    around,
    close,
    exchanges,
    in_turn,
    mostly_slow,
    of_each,
    run_of,
    train,
)
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import lsgd_jax as lj


PULLING = [name for name in RULES if not (METHODS[name].first or METHODS[name].around)]
PULLS = [name for name in PULLING if name in KINDS]
BAD = 1


def around_run(name, run):
    """Returns init and step of `harness.Run` with the method around the step."""
    base, o = GUARDED(optax.sgd(0.1)), lj.outer(METHODS[name].make(run.W))

    def init(params):
        return base.init(params), o.init(params)

    def step(params, state, target):
        grads = jax.tree.map(jnp.subtract, params, target)
        updates, of_base = base.update(grads, state[0], params)
        moved = lj.apply_updates(params, updates)
        loss = optax.tree.norm(grads, squared=True).astype(jnp.float32) / 2
        params, of_outer = o.step(moved, state[1], loss=loss)
        return params, (of_base, of_outer)

    return run.workers.map(init), run.workers.map(step, donate=(0, 1))


# By default two levels; `test_replicas_…` have narrow formats.
@of_each([*(name for name in UNLIKE if name in PULLS), "grawa+layers"], fast=["lsgd"])
def test_the_numbers_are_those_of_the_chain(name):
    """Also for a worker that is not finite on one step and is then restored."""
    run = run_of(name, 4, 2, 8)
    init, step = around_run(name, run)
    batches = list(run.batches)
    batches[1] = {**batches[1], "w": batches[1]["w"].at[BAD].set(jnp.nan)}
    expected, chained = run.train(batches)
    # x + (y - x) may be a neighbor of y, and a narrow wire format may round the two apart.
    is_rounded = "+" in name and lj.outer(METHODS[name].make(run.W)).remembers
    near = functools.partial(close, atol=2**-6 if is_rounded else 1e-6)
    params = run.workers.put(run.start)
    state = init(params)
    for batch, there in zip(batches, expected):
        params, state = step(params, state, run.workers.put(batch))
        jax.tree.map(near, run.workers.fetch(params), there)
    for mine, other in zip(lj.diagnostics(state), lj.diagnostics(chained)):
        np.testing.assert_array_equal(mine.restored, other.restored)
        assert mine.bytes_sent == other.bytes_sent and not mine.misplaced.any()
    assert step._cache_size() == 1


# Rules that read the parameters before the step.
READING = (
    "easgd_combine palsgd sparta grawa grawa+layers parle dpsgd adpsgd sgp osgp "
    "osgp_delayed median_worker sgp+int8"
).split()


def test_only_rules_that_read_them_keep_a_copy_of_the_parameters():
    methods = {name: METHODS[name].make(4) for name in PULLING}
    methods["neighbors"] = lj.exchange(lj.Pull(lj.rules.neighbors(lj.topology.ring), 1.0))
    keep = [name for name, method in methods.items() if lj.outer(method).remembers]
    assert keep == READING


@pytest.mark.slow
@pytest.mark.parametrize("method", [lj.diloco(3), lj.dpsgd(), lj.lsgd(0.1, 0.1, 3, 6)])
def test_on_other_steps_parameters_are_bit_identical(method):
    """Including -0.0 and integers. dpsgd would be due on every step."""
    if method.is_due(1):
        method = lj.exchange(lj.Pull(method.pulls[0].rule, 1.0, every=3))
    o, workers = lj.outer(method), lj.Workers(2, 2)
    x = np.array([[-0.0, 0.1], [3, 2]] * 2, np.float32)
    tree = {"n": np.arange(4, dtype=np.int32), "x": x}
    params = workers.put(tree)
    state = workers.map(o.init)(workers.put({**tree, "x": np.ones_like(x)}))
    after, _ = workers.map(lambda p, s: o.step(p, s, loss=1.0))(params, state)
    same = lambda a, b: np.testing.assert_array_equal(
        np.asarray(a).view(np.uint8), np.asarray(b).view(np.uint8)
    )
    jax.tree.map(same, after, tree)


def test_a_check_of_every_step_undoes_a_step_that_is_not_finite():
    o = around(lj.outer(lj.local_sgd(3, check="every_step")))
    start, u = np.array([1.0, 5.0], np.float32), np.array([1.0, np.inf], np.float32)
    seen, state = train(o, lj.Workers(1, 2), start, [u], apply=after)
    np.testing.assert_array_equal(seen, [[2, 5]])
    assert lj.waiting(state).tolist() == [False, True]


def test_one_worker_alone_needs_no_axis():
    """An outer optimizer around one worker, in a plain jit: Nesterov, by hand."""
    o = lj.outer(lj.diloco(2, optax.sgd(0.5, 0.9, nesterov=True), axes=()))
    step = jax.jit(lambda x, s: o.step(x - 1.0, s))
    x = jnp.float32(0)
    state, seen = o.init(x), []
    for _ in range(4):
        x, state = step(x, state)
        seen.append(float(x))
    first = -0.5 * (2 + 0.9 * 2)
    trace = 2 + 0.9 * 2  # both pseudo-gradients are 2
    close(seen, [-1, first, first - 1, first - 0.5 * (2 + 0.9 * trace)])


@pytest.mark.parametrize("make", [lambda: lj.local_sgd(1), lambda: lj.diloco(1, delay=0)])
def test_a_whole_pull_leaves_all_workers_bit_identical(make):
    workers, o = lj.Workers(2, 2), lj.outer(make())
    x = workers.put(np.random.default_rng(0).normal(size=(4, 1000)).astype(np.float32))
    x, _ = workers.map(o.step)(x, workers.map(o.init)(x))
    assert (x == x[:1]).all()


def test_invalid_arguments_are_refused():
    for wrong in (optax.sgd(0.1), lj.allreduce(), lj.rules.average()):
        with pytest.raises(ValueError, match="`method` must be a method that pulls"):
            lj.outer(wrong)
    o = lj.outer(lj.dpsgd())
    state = o.init({"w": jnp.ones(2)})
    with pytest.raises(ValueError, match=r"of the parameters, got \(3,\) for \(2,\)"):
        o.step({"w": jnp.ones(3)}, state)
    with pytest.raises(ValueError, match="`state` must be what the `init`"):
        o.step({"v": jnp.ones(2)}, state)
    with pytest.raises(ValueError, match="`state` must be what the `init`"):
        o.step({"w": jnp.ones(2)}, lj.dpsgd().init({"w": jnp.ones(2)}))
    with pytest.raises(ValueError, match="`due` must be a bool"):
        lj.outer(lj.diloco(axes=())).step(
            jnp.ones(2), lj.outer(lj.diloco(axes=())).init(jnp.ones(2)), due=1
        )


# A mesh and a step of the user


def mesh_of(kind=AxisType.Auto):
    return jax.make_mesh((2, 2, 2), ("replica", "fsdp", "tensor"), axis_types=(kind,) * 3)


def sharded(mesh, seed=0):
    """Returns layers, an embedding and a bias of 2 replicas, over all axes of the mesh."""
    draw = lambda *shape: np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    specs = {"layers": P("replica", None, "fsdp", "tensor"), "in": P("replica", "fsdp")}
    tree = {"layers": draw(2, 4, 32, 16), "in": draw(2, 64, 24), "b": draw(2, 8)}
    place = lambda name, x: NamedSharding(mesh, specs.get(name, P("replica")))
    return {name: jax.device_put(x, place(name, x)) for name, x in tree.items()}


over_replicas = functools.partial(jax.vmap, axis_name="node", spmd_axis_name="replica")


ON_REPLICAS = {
    "diloco": lj.diloco(2),
    "lsgd": lj.lsgd(0.1, 0.2, 2, 4),
    "easgd": lj.easgd(0.3, 2),
    "int8": lj.diloco(2, wire="int8"),
    "bfloat16": lj.easgd(0.3, 2, wire="bfloat16"),
    "fragments": lj.diloco(4, fragments=2, scan_axis={"layers": 0}),
}


# By default a narrow format.
QUICK = [("outer", "int8")]
FACES = [(face, name) for face in ("outer", "chain") for name in ON_REPLICAS]


@pytest.mark.parametrize("face, name", mostly_slow(FACES, fast=QUICK))
def test_replicas_send_shards_and_only_when_due(name, face):
    mesh, method = mesh_of(), ON_REPLICAS[name]
    o = lj.outer(method)

    def step(params, state, loss, due=None):
        if face == "outer":
            return o.step(params, state, loss=loss, due=due)
        still = jax.tree.map(jnp.zeros_like, params)
        u, state = method.update(still, state, params, loss=loss, due=due)
        return lj.apply_updates(params, u), state

    with jax.set_mesh(mesh):
        params = sharded(mesh)
        state = jax.jit(over_replicas(o.init if face == "outer" else method.init))(params)
        compiled = jax.jit(over_replicas(step)).lower(params, state, jnp.ones(2)).compile()
        silent, in_branches = exchanges(compiled.as_text())
        after, _ = compiled(params, state, jnp.ones(2))
        quiet = jax.jit(over_replicas(functools.partial(step, due=False)))
        rows = NamedSharding(mesh, P("replica"))
        state = jax.tree.map(lambda x: jax.device_put(x, rows) if x.ndim == 1 else x, state)
        text = quiet.lower(params, state, jnp.ones(2)).compile().as_text()
        assert not re.search(r" (all|collective|reduce)-[a-z-]+\(", text)
    shard = sum(x.nbytes for x in params.values()) / 8  # of one replica, of one device
    assert silent == 0 and 0 < max(in_branches)
    # Whole biases, scales and flags are extra. Gathered leaves would be 4 times as large.
    assert max(in_branches) < 1.5 * shard, (in_branches, shard)
    for name, x in params.items():
        assert after[name].sharding.is_equivalent_to(x.sharding, x.ndim)


@pytest.mark.parametrize("make", mostly_slow([lj.easgd, lj.lsgd], fast=[lj.easgd]))
def test_a_state_from_outside_continues_in_a_vmap_and_is_read(make):
    """The vmap keeps a row of the counters and centers for each replica."""
    o, x = lj.outer(make(wire="int8")), {"w": jnp.arange(6.0).reshape(2, 3)}
    begun = o.init({"w": x["w"][0]})
    state = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), begun)
    step = jax.jit(jax.vmap(lambda x, s: o.step(x, s, loss=0.0), axis_name="node"))
    for _ in range(2):
        x, state = step(x, state)
    (*_, last) = lj.diagnostics(state)
    assert int(last.steps) == 2 and last.exchanges == 0 and last.restored.shape == (2,)
    expected = begun.exchange.pulls[0].rule.center.value["w"] if make is lj.easgd else None
    center = lj.center(x, state)["w"]
    close(center, x["w"].mean(axis=0) if expected is None else expected)


SPECS = {"layers": P(None, "fsdp", "tensor"), "in": P("fsdp"), "b": P()}
# Like MaxText: how the layout inside a replica is told, the axes, and a mesh as context.
TOLD = {
    "specs": (SPECS, AxisType.Auto, True),
    "shardings": (
        lambda mesh: {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()},
        AxisType.Auto,
        False,
    ),
    "types": (None, AxisType.Explicit, True),
    "untold": (None, AxisType.Auto, True),
    "no_mesh": (None, AxisType.Auto, False),
}
ENCODED = {
    "int4": lj.diloco(2, wire="int4-stochastic"),
    "topk": lj.contrib.sparse_diloco(2),
    "krum": lj.exchange(lj.Pull(lj.rules.robust_mean("trimmed_mean"), 1.0, every=2)),
    "leader": lj.lsgd(0.1, 0.2, 2, 4, wire="bfloat16", delay=1),
}


def trained(method, mesh, over, context, specs=None):
    """Parameters after four steps of two replicas, and the state."""
    o, rows = lj.outer(method, specs=specs), NamedSharding(mesh, P("replica"))

    def step(params, state, move, loss):
        return o.step(jax.tree.map(jnp.add, params, move), state, loss=loss)

    with context:
        params = before = sharded(mesh)
        loss = jax.device_put(np.float32([2, 1]), rows)
        state, of_all = over(o.init)(params), over(step)
        for t in range(4):
            params, state = of_all(params, state, sharded(mesh, seed=t + 1), loss)
    for name, x in before.items():
        assert params[name].sharding.is_equivalent_to(x.sharding, x.ndim)
    return jax.device_get((params, state))


@functools.cache
def trained_on_workers(name):
    workers = lj.Workers(mesh=mesh_of(), axes="replica")
    method = (ON_REPLICAS | ENCODED)[name]
    return trained(method, workers.mesh, workers.map, contextlib.nullcontext())


# The ways take turns, and only those that are told make bits equal.
TURNS = [("int8", told) for told in TOLD] + in_turn(ENCODED, [*TOLD])
TURNS += in_turn("lsgd bfloat16 fragments".split(), [*TOLD][::-1])


@pytest.mark.parametrize(
    "name, told",
    mostly_slow(TURNS, fast=[("int8", "specs")]),
)
def test_replicas_under_a_vmap_compute_what_workers_do(name, told):
    """Beside fsdp and tensor axes. Layouts that are told make the bits equal."""
    specs, kind, has_mesh = TOLD[told]
    mesh = mesh_of(kind)
    specs = specs(mesh) if callable(specs) else specs
    context = jax.set_mesh(mesh) if has_mesh else contextlib.nullcontext()
    method, under_vmap = (ON_REPLICAS | ENCODED)[name], lambda f: jax.jit(over_replicas(f))
    params, state = trained(method, mesh, under_vmap, context, specs)
    expected, of_workers = trained_on_workers(name)
    assert jax.tree.structure(state) == jax.tree.structure(of_workers)
    if told not in ("untold", "no_mesh"):
        jax.tree.map(np.testing.assert_array_equal, params, expected)
    elif name not in ("int8", "int4", "topk"):  # of other blocks where shards are unknown
        jax.tree.map(close, params, expected)


@pytest.mark.parametrize(
    "specs, has_mesh, message",
    [
        ({"layers": P(), "in": P()}, True, "`specs` must be a prefix of the tree"),
        (SPECS | {"in": P("replica")}, True, r"the spec of the leaf \['in'\]"),
        (SPECS | {"b": P(None, "fsdp")}, True, r"the spec of the leaf \['b'\]"),
        (SPECS, False, r"`specs` need the mesh: .* `jax.set_mesh\(mesh\)`"),
    ],
)
def test_specs_that_do_not_fit_are_refused(specs, has_mesh, message):
    mesh, o = mesh_of(), lj.outer(lj.diloco(2), specs=specs)
    context = jax.set_mesh(mesh) if has_mesh else contextlib.nullcontext()
    with context, pytest.raises(ValueError, match=message):
        jax.eval_shape(over_replicas(o.init), sharded(mesh))


@pytest.mark.slow
@pytest.mark.parametrize("due", [None, False])
def test_a_shard_map_of_explicit_axes_is_like_workers(due):
    """The library reads the layouts inside a worker from types."""
    mesh, o = mesh_of(AxisType.Explicit), lj.outer(lj.diloco(1, axes="replica"))
    workers, params = lj.Workers(mesh=mesh, axes="replica"), sharded(mesh)
    one = lambda tree: jax.tree.map(lambda x: x[0], tree)
    step = lambda p: o.step(p, o.init(p), due=due)[0]
    mapped = jax.shard_map(
        lambda p: jax.tree.map(lambda x: x[None], step(one(p))),
        mesh=mesh,
        in_specs=P("replica"),
        out_specs=P("replica"),
        axis_names={"replica"},
        check_vma=False,
    )
    expected = workers.map(step)(params)
    jax.tree.map(np.testing.assert_array_equal, jax.jit(mapped)(params), expected)
