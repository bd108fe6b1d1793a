"""A pull may keep its trees in host memory between exchanges."""

import pathlib
import re

import harness
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import METHODS, after, around
from jax.sharding import PartitionSpec as P

import lsgd_jax as lj


GRIDS = {
    "a worker per device": {"nodes": 2, "locals": 2},
    "two workers per device": {"nodes": 2, "locals": 2, "devices": 2},
    "sharded workers": {"nodes": 2, "locals": 1, "inside": {"fsdp": 4}},
}
KEPT = {
    "diloco": ("anchor", "trace"),
    "easgd+int8": ("center", "error"),
    "lsgd+int8": ("reference",),
    "diloco_streaming+int8": ("anchor", "trace", "pending", "error"),
}
STEPS = 6


def train(tx, grid, reload_at=None):
    """Returns parameters, state and center after some steps, the third with a nan."""
    devices = jax.devices()[: grid["devices"]] if "devices" in grid else None
    workers = lj.Workers(**{**grid, "devices": devices})
    draw = np.random.default_rng(0).normal
    tree = lambda: {
        "a": draw(size=(workers.num_workers, 16, 8)).astype(np.float32),
        "b": draw(size=(workers.num_workers, 4)).astype(np.float32),
    }
    specs = {"a": P("fsdp"), "b": P()} if workers.inside else None
    params = workers.put(tree(), specs)
    state = workers.map(tx.init)(params)

    def step(x, state, u):
        u, state = tx.update(u, state, x, loss=jnp.sum(x["b"]))
        return lj.apply_updates(x, u), state

    step = workers.map(step, donate=(0, 1))
    for t in range(STEPS):
        u = tree()
        if t == 2:
            u["b"][1] = np.nan
        params, state = step(params, state, workers.put(u, specs))
        if t == reload_at:
            like = lj.layouts.following(params) if workers.inside else None
            state = workers.put(workers.fetch(state), like)
    return workers.fetch(params), state, lj.center(params, state)


PAIRED = [("diloco", "a worker per device")]
COMBINED = [
    *PAIRED,
    ("diloco_streaming+int8", "two workers per device"),
    ("diloco_streaming+int8", "sharded workers"),
    ("easgd+int8", "a worker per device"),
    ("lsgd+int8", "sharded workers"),
]


@pytest.mark.slow
@pytest.mark.parametrize("name, grid", COMBINED)
def test_trees_in_host_memory_give_the_same_numbers(name, grid):
    """Also after loading a state, which puts all of it on the devices."""
    method = METHODS[name].make(4)
    here, _, center = train(method, GRIDS[grid])
    on_host = lj.exchange(method, memory="host")
    there, state, same = train(on_host, GRIDS[grid], reload_at=3)
    jax.tree.map(np.testing.assert_array_equal, (here, center), (there, same))
    leaves = jax.tree_util.tree_leaves_with_path(state)
    hosted = {
        jax.tree_util.keystr(path)
        for path, leaf in leaves
        if leaf.sharding.memory_kind == "pinned_host"
    }
    for field in KEPT[name]:
        kept = [p for path, _ in leaves if f".{field}" in (p := jax.tree_util.keystr(path))]
        trees = [path for path in kept if path.endswith("']")]
        assert trees and hosted.issuperset(trees), field
    assert not any(field in path for path in hosted for field in ("losses", "traffic"))


TABLE = pathlib.Path(__file__).parents[3] / "docs/methods/index.md"
ROWS = re.findall(r"^\| `(lj\..*)` \| (\d+) \| (\d+) \| (\d+) \|$", TABLE.read_text(), re.M)


@pytest.mark.parametrize("code, device, with_host, more", ROWS)
def test_the_bytes_per_parameter_are_those_in_the_docs(code, device, with_host, more):
    params = jnp.zeros(10_000)
    method = eval(code, {"lj": lj})

    def on_device(tx):
        leaves = jax.tree.leaves(tx.init(params))
        own = [x for x in leaves if x.sharding.memory_kind != "pinned_host"]
        return round(sum(x.nbytes for x in own) / params.size)

    found = on_device(method), on_device(lj.exchange(method, memory="host"))
    assert (*found, on_device(lj.outer(method)) - found[0]) == (
        int(device),
        int(with_host),
        int(more),
    )


@pytest.mark.slow
def test_host_memory_in_a_scan_over_steps():
    workers = lj.Workers(1, 2)
    x = workers.put(np.array([[1.0, 2.0], [3.0, 5.0]], np.float32))
    us = workers.put(np.random.default_rng(0).normal(size=(2, 6, 2)).astype(np.float32))

    def final(memory):
        tx = lj.diloco(4, delay=1, memory=memory)

        def steps(x, state, us):
            def one(carry, u):
                u, state = tx.update(u, carry[1], carry[0], value=0.0)
                return (lj.apply_updates(carry[0], u), state), None

            return jax.lax.scan(one, (x, state), us)[0]

        return workers.map(steps)(x, workers.map(tx.init)(x), us)

    (expected, _), (found, state) = final("device"), final("host")
    np.testing.assert_array_equal(found, expected)
    assert state.pulls[0].pending.z.sharding.memory_kind == "pinned_host"


def test_outer_keeps_trees_in_host_memory():
    o, x = around(lj.outer(lj.diloco(2, memory="host"))), np.ones((2, 3), np.float32)
    seen, (_, state) = harness.train(o, lj.Workers(1, 2), x, [x] * 2, apply=after)
    anchor = state.exchange.pulls[0].rule.anchor.value
    assert anchor.sharding.memory_kind == "pinned_host"
    np.testing.assert_array_equal(seen[-1][0], anchor)


def test_a_backend_without_host_memory_is_refused(monkeypatch):
    class Device:
        platform = "toy"
        addressable_memories = staticmethod(lambda: [])

    tx = lj.easgd(memory="host")
    monkeypatch.setattr(jax, "devices", lambda: [Device])
    with pytest.raises(ValueError, match="`memory` must be 'device' on toy"):
        tx.init(jnp.ones(2))
