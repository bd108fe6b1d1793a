"""Lookups in workers of several axes, for which XLA aborts the process."""

import pathlib
import signal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from outside import python

import lsgd_jax as lj
from lsgd_jax._src.workers.uniform import equations


ABORTS = """
import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

jax.config.update("jax_num_cpu_devices", 8)
mesh = jax.make_mesh((2, 2, 2), ("node", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
rows = NamedSharding(mesh, P("node", "fsdp"))
table, tokens = jax.device_put((jnp.ones((2, 1024, 256)), jnp.ones((2, 8, 128), int)), rows)
lookup = jax.shard_map(
    lambda table, tokens: table[0][tokens[0]].sum()[None],
    mesh=mesh,
    in_specs=P("node"),
    out_specs=P("node"),
    axis_names={"node"},
)
print(jax.jit(lookup)(table, tokens))
"""
VOCABULARY, WIDTH, W = 1024, 256, 2
INSIDE = {"fsdp": 2, "tensor": 2}
# Of the table and of the tokens. XLA aborts on each of them.
SPECS = {
    "rows": (P("tensor"), P("fsdp")),
    "rows and tokens": (P("fsdp"), P("fsdp")),
    "columns and tokens": (P(None, "fsdp"), P("fsdp")),
    "rows and columns": (P("tensor", "fsdp"), P("fsdp")),
    "all axes": (P(("fsdp", "tensor")), P("fsdp")),
}


def loss_of(params, tokens):
    """A small language model, with the usual embedding and the usual loss."""
    layer = lambda x, w: (jnp.tanh(x @ w), None)
    x, _ = jax.lax.scan(jax.checkpoint(layer), params["table"][tokens], params["layers"])
    logits = x @ params["out"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


def step_of(tx):
    def step(params, state, tokens):
        loss, grads = jax.value_and_grad(loss_of)(params, tokens)
        updates, state = tx.update(grads, state, params, loss=loss)
        return lj.apply_updates(params, updates), state, loss

    return step


def initial():
    draw = np.random.default_rng(0)
    shapes = {"table": (VOCABULARY, WIDTH), "layers": (2, WIDTH, WIDTH)}
    shapes["out"] = (WIDTH, VOCABULARY)
    params = {name: draw.normal(0, 0.1, x).astype(np.float32) for name, x in shapes.items()}
    return params, draw.integers(0, VOCABULARY, (W, 8, 128))


def trained(workers, specs=None, tokens_spec=None):
    tx = optax.chain(optax.sgd(0.1, momentum=0.9), lj.diloco(2))
    params, tokens = initial()
    params, tokens = workers.replicate(params, specs), workers.put(tokens, tokens_spec)
    state, step = workers.map(tx.init)(params), workers.map(step_of(tx))
    for _ in range(2):
        params, state, loss = step(params, state, tokens)
    return workers.fetch((params, loss))


def specs_of(table):
    return {"table": table, "layers": P(None, "fsdp", "tensor"), "out": P("fsdp", "tensor")}


def train_with_all_specs():
    """Prints the largest difference to workers of one device, in a process of its own."""
    lj.emulate_devices(8)
    expected = trained(lj.Workers(W, 1))
    for name, (table, tokens) in SPECS.items():
        found = trained(lj.Workers(W, 1, inside=INSIDE), specs_of(table), tokens)
        far = jax.tree.map(lambda x, y: abs(x - y).max(), found, expected)
        print(name, max(jax.tree.leaves(far)), flush=True)


@pytest.mark.slow
def test_workers_of_two_axes_train_a_language_model():
    code = "from test_lookups import *; train_with_all_specs()"
    done = python("-c", code, timeout=300, cwd=pathlib.Path(__file__).parent)
    assert done.returncode == 0, done.stderr[-2000:]
    found = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    assert list(found) == list(SPECS)
    assert max(map(float, found.values())) < 1e-5


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_table_is_whole_before_a_lookup(kind):
    """Without it XLA aborts. Nothing changes with one axis inside."""

    def gradient(table, tokens):
        how = {"out_sharding": P("fsdp")} if kind == AxisType.Explicit else {}
        return jax.grad(lambda x: jnp.square(x.at[tokens].get(**how)).sum())(table)

    def whole_tables(fsdp, tensor):
        """For gather and scatter: whether something made their operand whole."""
        mesh = jax.make_mesh((W, fsdp, tensor), ("node", *INSIDE), axis_types=(kind,) * 3)
        workers = lj.Workers(mesh=mesh, axes="node")
        table = workers.replicate(np.ones((VOCABULARY, WIDTH), np.float32), P("tensor"))
        tokens = workers.put(np.ones((W, 8, 128), int), P("fsdp"))
        traced = workers.map(gradient).trace(table, tokens)
        names = [eqn.primitive.name for eqn in equations(traced.jaxpr.jaxpr)]
        before = {name: names[names.index(name) - 1] for name in ("gather", "scatter-add")}
        return [name in ("sharding_constraint", "reshard") for name in before.values()]

    assert whole_tables(2, 2) == [True, True]
    assert whole_tables(4, 1) == [False, False]


@pytest.mark.slow
def test_xla_aborts_on_a_lookup():
    """Once jax has mended it, lsgd_jax/_src/workers/lookups.py can go."""
    done = python("-c", ABORTS, timeout=100)
    assert done.returncode == -signal.SIGABRT
    assert "Check failed: partition_group_list" in done.stderr
