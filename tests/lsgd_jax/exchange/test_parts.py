"""Tests of part=: a method exchanges these leaves only; all others are bit-identical."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import FACTORIES, close, exchanged, mostly_slow, needed, train

import lsgd_jax as lj
from lsgd_jax._src.exchange import parts


PARAMS = {
    "body": {"w": np.linspace(-1, 1, 8).reshape(4, 2), "v": np.arange(4.0)},
    "head": np.arange(12.0).reshape(4, 3),
}
PARAMS = jax.tree.map(np.float32, PARAMS)
GRID = lj.Workers(2, 2)
HEAD = {
    "function": lambda path: path == "head",
    "paths": ["head"],
    "mask": {"body": False, "head": True},
    "full mask": {"body": {"w": False, "v": False}, "head": True},
}


def test_a_mask_may_be_a_callable_tree():
    """As an Equinox module is; it is not called with paths."""

    @jax.tree_util.register_pytree_with_keys_class
    class Module(dict):
        def tree_flatten_with_keys(self):
            keys = [jax.tree_util.DictKey(name) for name in self]
            return list(zip(keys, self.values())), tuple(self)

        @classmethod
        def tree_unflatten(cls, names, leaves):
            return cls(zip(names, leaves))

        def __call__(self, x):
            raise AssertionError("called")

    tree = Module(w=jnp.ones(3), head=jnp.ones(2))
    chosen = parts.select(Module(w=False, head=True), tree)
    assert isinstance(chosen["w"], optax.MaskedNode) and chosen["head"].shape == (2,)


@pytest.mark.parametrize("method", FACTORIES, ids=lambda method: method.__name__)
def test_every_method_gives_its_part_to_its_pulls(method):
    pulls = method(part=["head"], **needed(method)).pulls
    assert pulls and all(pull.part == ["head"] for pull in pulls)


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [functools.partial(lj.lsgd, 0.5, 0.5, 1, 1), functools.partial(lj.diloco, 1)]
    + [functools.partial(lj.easgd, period=1), lj.sgp],
    ids=["lsgd", "diloco", "easgd", "sgp"],
)
def test_frozen_leaves_cost_no_bytes_and_no_state(make):
    got, state = exchanged(make(part=HEAD["paths"]), GRID, PARAMS, steps=2)
    jax.tree.map(np.testing.assert_array_equal, got["body"], PARAMS["body"])
    alone, of_head = exchanged(make(), GRID, {"head": PARAMS["head"]}, steps=2)
    np.testing.assert_array_equal(got["head"], alone["head"])
    assert (got["head"] != PARAMS["head"]).any()
    for mine, theirs in zip(lj.diagnostics(state), lj.diagnostics(of_head), strict=True):
        assert mine.bytes_sent == theirs.bytes_sent > 0
    sizes = lambda state: sum(x.size for x in jax.tree.leaves(state.pulls))
    assert sizes(state) == sizes(of_head)


@pytest.mark.parametrize("form", ["paths", "mask", "full mask"])
def test_all_forms_of_a_part_select_the_same_leaves(form):
    one, other = (parts.select(HEAD[form], PARAMS) for form in (form, "function"))
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_fragments_of_a_part_take_turns():
    tx = lj.diloco(2, optax.sgd(1.0), fragments=2, part=["body"])
    once, _ = exchanged(tx, GRID, PARAMS)
    twice, _ = exchanged(tx, GRID, PARAMS, steps=2)
    moved = lambda got: jax.tree.map(lambda a, b: bool((a != b).any()), got, PARAMS)
    assert sum(jax.tree.leaves(moved(once))) == 1
    assert moved(twice) == {"body": {"w": True, "v": True}, "head": False}


@pytest.mark.slow
def test_empty_nodes_of_optax_stay_empty():
    params = {"body": optax.MaskedNode(), "head": PARAMS["head"]}
    got, _ = exchanged(lj.local_sgd(1), GRID, params)
    alone, _ = exchanged(lj.local_sgd(1), GRID, {"head": PARAMS["head"]})
    assert got["body"] == optax.MaskedNode()
    np.testing.assert_array_equal(got["head"], alone["head"])


@pytest.mark.parametrize(
    "part, message",
    [
        (["tail"], "`part` must hold at least one leaf, .*'body/v', 'body/w', 'head'"),
        (lambda path: False, "`part` must hold at least one leaf"),
        ({"head": True}, "must have a bool for 'body/v'"),
    ],
)
def test_invalid_parts_are_refused(part, message):
    with pytest.raises(ValueError, match=message):
        exchanged(lj.local_sgd(1, part=part), GRID, PARAMS)


# By default pairs and push-sum.
GOSSIP = ["dpsgd", "adpsgd", "pairwise", "clock", "gosgd", "sgp"]


@pytest.mark.slow
@pytest.mark.parametrize("name", GOSSIP)
def test_gossip_is_as_exact_as_the_parameters(name):
    """One step against the mixing matrix, in float64."""
    make = {
        "clock": lambda: lj.pairwise("clock"),
        "gosgd": lambda: lj.contrib.gosgd(send_probability=1.0),
    }.get(name) or getattr(lj, name)
    with jax.enable_x64(True):
        x = np.random.default_rng(0).normal(size=(4, 5))
        got, _ = exchanged(make(), GRID, x)
    graph = {
        "dpsgd": lj.topology.ring,
        "adpsgd": lj.topology.bipartite_exponential,
    }.get(name, lj.topology.exponential)(4)
    # After one step, all these methods have the weights of the mixing matrix.
    np.testing.assert_allclose(got, graph.mixing[0] @ x, rtol=0, atol=1e-12)
    assert got.dtype == np.float64


# Stacked layers


def transformer(stacked, layers=12):
    """Returns layers of 5 leaves (stacked or not), an embedding and a norm."""
    draw = np.random.default_rng(0).normal
    shapes = {"q": (8, 24), "o": (8, 8), "up": (8, 32), "down": (32, 8), "norm": (8,)}
    stack = {k: draw(size=(layers, *s)).astype(np.float32) for k, s in shapes.items()}
    rest = {"embed": draw(size=(40, 8)).astype(np.float32), "norm": np.ones(8, np.float32)}
    each = [{k: x[i] for k, x in stack.items()} for i in range(layers)]
    return {**rest, "layers": stack if stacked else each}


def trained(method, stacked):
    """Two workers from the same start to different goals, which take turns in leading."""
    params = transformer(stacked, layers=4)
    goals = jax.tree.map(lambda x: np.stack([x + 1, x + 4]), params)
    return train(
        optax.chain(optax.sgd(0.1), method),
        lj.Workers(1, 2),
        jax.tree.map(lambda x: np.stack([x, x]), params),
        [goals] * 8,
        losses=[[1, 2], [2, 1]] * 4,
        gradient=lambda x, goal: jax.tree.map(jnp.subtract, x, goal),
    )


IN_FRAGMENTS = {
    "diloco": functools.partial(lj.diloco, 4, optax.sgd(0.7, 0.9), fragments=2),
    "lsgd": functools.partial(
        lj.lsgd, 0.3, 0.2, 4, 8, 2, fragments=2, delay=1, wire="bfloat16"
    ),
}


@pytest.mark.slow  # `test_fragments_that_share_a_program_…` has stacked layers, too
@pytest.mark.parametrize("name", IN_FRAGMENTS)
def test_stacked_layers_have_the_fragments_of_separate_layers(name):
    layers = functools.partial(IN_FRAGMENTS[name], part=["layers"])
    scanned, state = trained(layers(scan_axis=0), stacked=True)
    apart, _ = trained(layers(), stacked=False)
    for i, layer in enumerate(apart[-1]["layers"]):
        mine = jax.tree.map(lambda x, i=i: x[:, i], scanned[-1]["layers"])
        jax.tree.map(close, mine, layer)
    assert not lj.diagnostics(state)[0].misplaced.any()


LATE = {"delay": 3, "scan_axis": 0}
TURNS = {
    "at_once": {"scan_axis": 0, "fragments": 2, "check": "every_step"},
    "int8": {**LATE, "wire": "int8"},
    "by_path": {**LATE, "scan_axis": {"layers": 0}, "verify": True},
    "guard": {**LATE, "guard": lj.Guard(warmup=2, layerwise=True), "fragments": 2},
    "unequal": {**LATE, "fragments": 3},
}


@pytest.mark.parametrize("name", mostly_slow(TURNS, fast=["at_once"]))
def test_fragments_that_share_a_program_compute_what_each_of_them_computes(name):
    """In the memory of a host every fragment has a state and a program of its own.

    A worker is not finite at one step, and restored; another one between two exchanges.
    """
    options = {"fragments": 4, "part": ["layers"], **TURNS[name]}
    period = 2 * options["fragments"]
    make = functools.partial(lj.diloco, period, optax.sgd(0.7, 0.9), 0.3, **options)
    workers, draw = lj.Workers(1, 3), np.random.default_rng(0).normal
    rows = lambda x: draw(size=(3, *x.shape)).astype(np.float32)
    tree = {name: np.zeros([4, *shape]) for name, shape in {"w": (3, 2), "b": (5,)}.items()}
    tree = {"embed": np.zeros(7), "layers": tree}
    start, *grads = [jax.tree.map(rows, tree) for _ in range(2 * period + 4)]
    grads[9]["layers"]["w"][1, 2] = np.nan
    grads[6]["layers"]["b"][0, 0] = np.nan

    def trained(method):
        tx = optax.chain(optax.sgd(0.1), method)

        def step(x, state, g, phase):
            u, state = tx.update(g, state, x, phase=phase)
            return lj.apply_updates(x, u), state

        step = workers.map(step, static="phase")
        x, seen = workers.put(start), []
        state = workers.map(tx.init)(x)
        for t, g in enumerate(grads, 1):
            x, state = step(x, state, workers.put(g), phase=method.phase(t))
            seen.append(workers.fetch(x))
        levels = lj.diagnostics(workers.fetch(state))
        return (seen, lj.center(x, state), levels), step._cache_size(), state[1].pulls

    found, programs, states = trained(make())
    expected, *_ = trained(make(memory="host"))
    # Two programs, which XLA may round in two ways.
    close(found, expected)
    assert sum(level.restored for level in found[2])[1] > 0
    assert programs <= 4 and len(states) == (3 if name == "unequal" else 1)


@pytest.mark.parametrize("count", [4, 6])
@pytest.mark.parametrize("scan_axis", [0, {"layers": 0}], ids=["all", "by_path"])
def test_fragments_of_stacked_layers_have_the_same_size(count, scan_axis):
    tree = jax.tree.map(jnp.asarray, transformer(stacked=True))
    (whole,) = lj.diloco(count * 2, fragments=count, scan_axis=scan_axis).pulls
    pulls = whole.each
    taken = [parts.select(pull.part, tree) for pull in pulls]
    sizes = [sum(x.size for x in jax.tree.leaves(part)) for part in taken]
    whole = sum(x.size for x in jax.tree.leaves(tree))
    assert sum(sizes) == whole and max(sizes) <= 1.2 / count * whole
    back = jax.tree.map(jnp.zeros_like, tree)
    for pull, part in zip(pulls, taken):
        back = parts.put_back(pull.part, part, back)
    jax.tree.map(np.testing.assert_array_equal, back, tree)
    # What follows the layers is the last of embedding, 12 layers and norm.
    last = parts.select(lj.fragment(13, 14, scan_axis={"layers": 0}), tree)
    assert [x.shape for x in jax.tree.leaves(last)] == [(8,)]


def test_invalid_scan_axes_are_refused():
    with pytest.raises(ValueError, match="`scan_axis` must be an axis of at least 0"):
        lj.fragment(0, 2, scan_axis=-1)
    with pytest.raises(
        ValueError, match="`scan_axis` must be an axis of at least one leaf"
    ):
        lj.diloco(4, fragments=2, scan_axis={"blocks": 0}).init(transformer(stacked=True))
    with pytest.raises(
        ValueError, match=r"number of leaves \(2\), got 3; `scan_axis` cuts"
    ):
        lj.diloco(3, fragments=3).init({"a": jnp.ones(2), "b": jnp.ones(2)})
