"""part=: which leaves a method exchanges; all others stay as they are, to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import lsgd_jax as lj


PARAMS = {
    "body": {"w": np.linspace(-1, 1, 8).reshape(4, 2), "v": np.arange(4.0)},
    "head": np.arange(12.0).reshape(4, 3),
}
PARAMS = jax.tree.map(np.float32, PARAMS)
HEAD = {
    "function": lambda path: path == "head",
    "paths": ["head"],
    "mask": {"body": False, "head": True},
    "full mask": {"body": {"w": False, "v": False}, "head": True},
}


def exchanged(tx, params, steps=2):
    workers = lj.Workers(2, 2)
    x = workers.put(params)
    state = workers.map(tx.init)(x)

    def step(x, state):
        u, state = tx.update(jax.tree.map(jnp.zeros_like, x), state, x, value=1.0)
        return lj.apply_updates(x, u), state

    step = workers.map(step)
    for _ in range(steps):
        x, state = step(x, state)
    return workers.fetch(x), state


METHODS = {
    "lsgd": lambda **k: lj.lsgd(0.5, 0.5, 1, 1, **k),
    "easgd": lambda **k: lj.easgd(period=1, **k),
    "downpour": lambda **k: lj.downpour(1, **k),
    "local_sgd": lambda **k: lj.local_sgd(1, **k),
    "diloco": lambda **k: lj.diloco(1, **k),
    "slowmo": lambda **k: lj.slowmo(1, **k),
    "parle": lambda **k: lj.parle(0.1, 1, **k),
    "dpsgd": lj.dpsgd,
    "adpsgd": lj.adpsgd,
    "sgp": lj.sgp,
    "osgp": lj.osgp,
    "pairwise": lj.pairwise,
    "gosgd": lambda **k: lj.gosgd(send_probability=1.0, **k),
    "wagma": lambda **k: lj.wagma(2, 1, **k),
}


@pytest.mark.parametrize("name", METHODS)
def test_frozen_leaves_cost_nothing_with_every_method(name):
    make = METHODS[name]
    got, state = exchanged(make(part=HEAD["paths"]), PARAMS)
    jax.tree.map(np.testing.assert_array_equal, got["body"], PARAMS["body"])
    alone, of_head = exchanged(make(), {"head": PARAMS["head"]})
    np.testing.assert_array_equal(got["head"], alone["head"])
    assert (got["head"] != PARAMS["head"]).any()
    for mine, theirs in zip(lj.diagnostics(state), lj.diagnostics(of_head), strict=True):
        assert mine.bytes_sent == theirs.bytes_sent > 0
    sizes = lambda state: sum(x.size for x in jax.tree.leaves(state.pulls))
    assert sizes(state) == sizes(of_head)


@pytest.mark.parametrize("form", HEAD)
def test_all_forms_of_a_part_name_the_same_leaves(form):
    one, _ = exchanged(lj.local_sgd(1, part=HEAD[form]), PARAMS)
    other, _ = exchanged(lj.local_sgd(1, part=HEAD["function"]), PARAMS)
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_fragments_of_a_part_take_turns():
    tx = lj.diloco(2, optax.sgd(1.0), fragments=2, part=["body"])
    once, _ = exchanged(tx, PARAMS, steps=1)
    twice, _ = exchanged(tx, PARAMS, steps=2)
    moved = lambda got: jax.tree.map(lambda a, b: bool((a != b).any()), got, PARAMS)
    assert sum(jax.tree.leaves(moved(once))) == 1
    assert moved(twice) == {"body": {"w": True, "v": True}, "head": False}


def test_empty_nodes_of_optax_stay_empty():
    params = {"body": optax.MaskedNode(), "head": PARAMS["head"]}
    got, _ = exchanged(lj.local_sgd(1), params)
    alone, _ = exchanged(lj.local_sgd(1), {"head": PARAMS["head"]})
    assert got["body"] == optax.MaskedNode()
    np.testing.assert_array_equal(got["head"], alone["head"])


@pytest.mark.parametrize(
    "part, message",
    [
        ("head", "`part` must be a function"),
        ([], "`part` must be a function"),
        (0.5, "`part` must be a function"),
        (["tail"], "`part` must hold at least one leaf, .*'body/v', 'body/w', 'head'"),
        (lambda path: False, "`part` must hold at least one leaf"),
        ({"head": True}, "must have a bool for 'body/v'"),
    ],
)
def test_wrong_parts_are_refused_in_one_line(part, message):
    with pytest.raises(ValueError, match=message):
        exchanged(lj.local_sgd(1, part=part), PARAMS)


@pytest.mark.parametrize("name", ["dpsgd", "adpsgd", "pairwise", "clock", "gosgd", "sgp"])
def test_gossip_is_as_exact_as_the_parameters(name):
    """Σ x over all workers, or the value by hand, in float64."""
    make = METHODS.get(name, lambda: lj.pairwise("clock"))
    with jax.enable_x64(True):
        x = np.random.default_rng(0).normal(size=(4, 5))
        got, _ = exchanged(make(), x, steps=1)
    graph = {
        "dpsgd": lj.topology.ring,
        "adpsgd": lj.topology.bipartite_exponential,
    }.get(name, lj.topology.exponential)(4)
    # After one step the weights of all these are those of the mixing matrix.
    np.testing.assert_allclose(got, graph.mixing[0] @ x, rtol=0, atol=1e-12)
    assert got.dtype == np.float64
