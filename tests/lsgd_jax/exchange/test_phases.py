"""Phases: compiled for pods, the message of a delayed pull lies beside the gradient."""

import importlib.util

import jax
import jax.numpy as jnp
import optax
import pytest
from harness import mostly_slow
from jax.sharding import PartitionSpec as P

import lsgd_jax as lj
from lsgd_jax import aot


LAYERS, WIDTH = 4, 256
METHODS = {
    "lsgd": lambda delay: lj.lsgd(0.1, 0.1, 16, 64, delay=delay),
    "diloco": lambda delay: lj.diloco(64, delay=delay),
    "fragments": lambda delay: lj.diloco(
        64, fragments=2, delay=delay, late="add", scan_axis=0
    ),
    "int8": lambda delay: lj.diloco(64, delay=delay, wire="int8"),
    # Each step sends a layer, while the one before is on its way.
    "in_flight": lambda delay: lj.diloco(4, fragments=4, delay=2 * delay, scan_axis=0),
}


def test_the_phases_of_a_delay_beyond_one_step():
    method = lj.diloco(8, fragments=2, delay=2)
    assert [str(method.phase(t)) for t in range(1, 9)] == [
        "quiet",
        "record 0",
        "send 0",
        "land 0",
        "quiet",
        "record 1",
        "send 1",
        "land 1",
    ]
    assert len(method.phases()) == 3 * 2 + 1
    # Fragments of stacks of layers have one program for each act.
    for count in (2, 4, 37):
        stacked = lj.diloco(4 * count, fragments=count, delay=2, scan_axis=0)
        acts = [str(stacked.phase(t)) for t in range(1, 5)]
        assert acts == ["quiet", "record 0", "send 0", "land 0"]
        assert {*stacked.phases()} == {*map(stacked.phase, range(1, 5))}
    # Before the first step there was none whose parameters could be sent.
    early = lj.exchange(lj.Pull(lj.rules.average(), 1.0, every=4, offset=1, delay=1))
    assert [str(early.phase(t)) for t in (1, 5)] == ["land 0", "send 0, land 0"]
    # Two pulls are due at one step only after the period of the first one has changed.
    first = lj.Pull(lj.rules.average(), 1.0, every=lj.Periods({0: 2, 8: 3}))
    both = lj.exchange(first, lj.Pull(lj.rules.average(), 1.0, every=4, offset=1))
    assert {*both.phases()} == {*map(both.phase, range(2, 60))}


def test_a_phase_names_the_round_of_a_graph():
    sizes = {"node": 4, "local": 2, "fsdp": 4}
    count = lambda method, sizes=sizes: len(method.phases(sizes))
    method = lj.sgp(lj.topology.exponential)
    assert [method.phase(t, sizes).rounds for t in range(1, 5)] == [(0,), (1,), (2,), (0,)]
    assert [method.phase(t).rounds for t in (1, 2)] == [(), ()]
    assert count(method) == 3 and count(method, {"node": 512}) == 9
    assert count(lj.wagma(2, 3)) == 3 and count(lj.wagma(2, 10)) == 3 + 3
    # A round that comes again is the same program.
    pairs = lj.topology.from_edges([[(0, 1), (1, 0)], [(0, 2), (2, 0)]] * 5, 8)
    assert count(lj.dpsgd(pairs)) == 2
    # One program serves all random matchings. A fragment's message is small.
    assert count(lj.contrib.noloco(4)) == 1 + 1
    assert count(lj.sgp(axes="node", part=lj.fragment(0, 2))) == 1
    # With a delay the message is that of the step before.
    late = lj.exchange(lj.sgp(axes="node").pulls[0], delay=0)
    late = lj.exchange(lj.Pull(late.pulls[0].rule, 1.0, every=2, delay=1))
    assert [str(late.phase(t, sizes)) for t in (2, 3, 4, 6)] == [
        "send 0, land 0, round 0",
        "record 0",
        "send 0, land 0, round 1",
        "send 0, land 0, round 0",
    ]
    with pytest.raises(ValueError, match="`sizes` must have the axis 'node' of the method"):
        method.phase(1, {"replica": 4})


def reported(kind, make, form):
    """The report of a step in which as much as possible is due."""
    if kind == "tpu":
        if not importlib.util.find_spec("libtpu"):
            pytest.skip('needs pip install -e ".[tpu]"')
        pod, inside = aot.tpu("v5e:2x2", slices=2), {"fsdp": 4}
        workers = lj.Workers(mesh=pod.mesh(replica=2, **inside), axes=("replica",))
    else:
        if not importlib.util.find_spec("jax_plugins.xla_cuda13"):
            pytest.skip('needs pip install -e ".[gpu-compile]"')
        pod = aot.gpu("h100", hosts=2, each=4)
        workers = lj.Workers(mesh=pod.mesh(node=2, local=4), axes=("node", "local"))
    base, o = optax.adamw(1e-3), lj.outer(make)
    tx = optax.chain(base, make)

    def init():
        params = {"layers": jnp.zeros((LAYERS, WIDTH, WIDTH))}
        if form == "chain":
            return params, tx.init(params)
        return params, (base.init(params), o.init(params))

    def step(params, state, x, phase):
        def loss_of(params):
            layer = lambda x, w: (jnp.tanh(x @ w), None)
            return jnp.square(jax.lax.scan(layer, x, params["layers"])[0]).mean()

        loss, grads = jax.value_and_grad(loss_of)(params)
        if form == "chain":
            u, state = tx.update(grads, state, params, value=loss, phase=phase)
            return lj.apply_updates(params, u), state
        u, of_base = base.update(grads, state[0], params)
        moved = optax.apply_updates(params, u)
        params, of_outer = o.step(moved, state[1], loss=loss, phase=phase)
        return params, (of_base, of_outer)

    batch = jax.ShapeDtypeStruct((64, WIDTH), jnp.float32)
    specs = {"layers": P(None, None, "fsdp")} if workers.inside else None
    phase = max(make.phases(), key=lambda phase: (len(phase.sends), len(phase.lands)))
    return aot.report(workers, init, step, batch, make, phases=[phase], specs=specs)


def overlaps(kind, make, form):
    """The shares of the products beside each message of parameters across slices."""
    report = reported(kind, make, form)
    parameters = LAYERS * WIDTH**2 // (report.pod.per_host if kind == "tpu" else 1)
    found = report.programs[0].collectives
    return [x.overlap for x in found if x.crosses and x.bytes >= parameters / 4]


@pytest.mark.aot
@pytest.mark.parametrize("form", ["outer", "chain"])
@pytest.mark.parametrize("name", METHODS)
def test_on_tpus_a_delayed_message_travels_beside_the_whole_gradient(name, form):
    aot.check_hidden(reported("tpu", METHODS[name](1), form), overlap=0.9)


@pytest.mark.aot
@pytest.mark.parametrize("form", ["outer", "chain"])
@pytest.mark.parametrize("name", [*METHODS][:-1])  # not the last: one short message
def test_on_gpus_a_delayed_message_travels_beside_part_of_the_gradient(name, form):
    """XLA starts it as late as the transfer takes on the links that it assumes."""
    beside = overlaps("gpu", METHODS[name](1), form)
    assert max(beside) > 0.3


ENCODED = {
    "float32": lambda: lj.diloco(64, delay=1),
    "bfloat16": lambda: lj.diloco(64, delay=1, wire="bfloat16"),
    "int8": lambda: lj.diloco(64, delay=1, wire="int8"),
    "fragments": lambda: lj.diloco(64, fragments=2, delay=1),
    "int8_fragments": lambda: lj.diloco(64, fragments=2, delay=1, wire="int8"),
}


def in_sharded_layers(method, hosts, each, **options):
    """The due step of layers that gather their weights in a host; 19 M parameters."""
    pod = aot.gpu("h100", hosts=hosts, each=each)
    workers = lj.Workers(mesh=pod.mesh(node=hosts, fsdp=each), axes=("node",))
    adam, around = optax.adamw(1e-3), lj.outer(method)
    shapes = {"up": (8, 512, 2048), "down": (8, 2048, 512)}

    def layer(x, w):
        whole = lambda w: jax.lax.with_sharding_constraint(w.astype(x.dtype), P())
        up = jax.nn.gelu(x @ whole(w["up"]))
        return x + up @ whole(w["down"]), None

    def loss_of(params, x):
        x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
        return jnp.square((x @ params["head"].astype(x.dtype)).astype(jnp.float32)).mean()

    def init():
        layers = {name: jnp.zeros(shape) for name, shape in shapes.items()}
        params = {"layers": layers, "head": jnp.zeros((512, 4096))}
        return params, adam.init(params), around.init(params)

    def step(params, moments, state, x, phase):
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        updates, moments = adam.update(grads, moments, params)
        params = optax.apply_updates(params, updates)
        params, state = around.step(params, state, loss=loss, phase=phase)
        return params, moments, state

    x = jax.ShapeDtypeStruct((2048 * each, 512), jnp.bfloat16)
    specs = lj.layouts.largest_dimension("fsdp", each, smallest=1)
    phase = max(method.phases(), key=lambda phase: (len(phase.sends), len(phase.lands)))
    more = {"phases": [phase], "specs": specs, "batch_specs": P("fsdp"), **options}
    return aot.report(workers, init, step, x, method, **more)


# A mean in few bits has two rounds among more than two hosts, and of three leaves.
OPTIONS = aot.overlap_options(messages=6)


@pytest.mark.aot
@pytest.mark.parametrize("hosts, each", [(2, 4), (8, 8)])
@pytest.mark.parametrize("name", mostly_slow(ENCODED, fast=("int8",)))
def test_on_gpus_an_option_hides_a_delayed_message_wholly(name, hosts, each):
    if not importlib.util.find_spec("jax_plugins.xla_cuda13"):
        pytest.skip('needs pip install -e ".[gpu-compile]"')
    report = in_sharded_layers(ENCODED[name](), hosts, each, compiler_options=OPTIONS)
    aot.check_hidden(report, overlap=0.95)
    crossing = [x for x in report.programs[0].collectives if x.across > 2**16]
    rounds = {x.kind: x.overlap for x in crossing}
    if hosts > 2 and name != "float32" and "all-gather" in rounds:
        assert 0.2 < rounds["all-to-all"] < rounds["all-gather"] < 0.8
    assert "XLA" not in str(report)


@pytest.mark.aot
def test_on_gpus_an_encoded_mean_waits_without_an_option_which_is_proposed():
    if not importlib.util.find_spec("jax_plugins.xla_cuda13"):
        pytest.skip('needs pip install -e ".[gpu-compile]"')
    waits = in_sharded_layers(ENCODED["int8"](), 8, 8)
    with pytest.raises(AssertionError, match="too few products beside the message"):
        aot.check_hidden(waits, overlap=0.3)
    # All leaves of a round are one message.
    ((name, value),) = aot.overlap_options(messages=1).items()
    assert f"{name}={value};" in str(waits)


@pytest.mark.aot
@pytest.mark.parametrize("kind", ["tpu", "gpu"])
def test_without_a_delay_the_message_waits_for_the_gradient(kind):
    report = reported(kind, METHODS["diloco"](0), "outer")
    with pytest.raises(AssertionError, match="depends on this step's gradient"):
        aot.check_hidden(report, overlap=0.1)
