"""The cost of steps: with many leaves, and on steps without a due pull."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import METHODS, UNLIKE, exchanges

import lsgd_jax as lj
from lsgd_jax._src.layouts import on_one_device
from lsgd_jax._src.wire.packing import Packing


# Many leaves


@pytest.mark.slow
def test_the_compiled_step_grows_linearly_with_the_number_of_leaves():
    """When it grew with n², 400 leaves took minutes to compile."""

    def instructions(leaves):
        workers = lj.Workers(1, 2, devices=jax.devices()[:1])
        tree = workers.replicate({str(i): jnp.ones(3 + i % 2) for i in range(leaves)})
        tx = optax.chain(optax.adam(0.1), lj.lsgd(0.1, 0.1, 2, 4))
        step = workers.map(lambda x, s, v: tx.update(x, s, x, value=v))
        state = jax.eval_shape(workers.map(tx.init), tree)
        text = step.lower(tree, state, workers.put(jnp.ones(2))).compile().as_text()
        return len(re.findall(r"^\s+(?:ROOT )?%", text, re.M))

    few, many = instructions(20), instructions(60)
    assert many < 3.3 * few


@pytest.mark.slow
def test_small_leaves_travel_together_and_large_ones_alone():
    small = {str(i): jnp.ones([2, 2], [jnp.float32, jnp.bfloat16][i % 2]) for i in range(6)}
    tree = small | {"large": jnp.ones([2**10, 2**11])}
    with on_one_device():
        packing = Packing(tree)
    buffers = packing.pack(tree)
    assert sorted(b.size for b in buffers) == [12, 12, 2**21]
    chex.assert_trees_all_equal(packing.unpack(buffers), tree)
    again = jax.jit(lambda buffers, t: packing.unpack(buffers, t=t))(buffers, jnp.int32(1))
    chex.assert_trees_all_equal(again, tree)


# A host loop that knows when no pull is due

PULLS = {
    "lsgd_delayed": lambda: lj.lsgd(0.0, 0.2, 3, 3, delay=1),
    "sgp_in_nodes": lambda: lj.exchange(lj.sgp(axes="local"), lj.local_sgd(4, axes="node")),
    "nothing": lambda: lj.lsgd(0.0, 0.0),
}


def methods_that_pull():
    """A method of each kind whose phases are known, besides those of `PULLS`."""
    made = {name: METHODS[name].make(4) for name in UNLIKE if not METHODS[name].first}
    return [
        pytest.param(name, marks=pytest.mark.slow)
        for name, tx in made.items()
        if isinstance(tx, lj.Exchange)
    ]


def stepping(pulls, workers):
    """Returns (options of update -> step, parameters, state, gradients, losses)."""
    tx, rng = optax.chain(optax.sgd(0.1), pulls), np.random.default_rng(0)

    def step(x, state, g, loss, **options):
        u, state = tx.update(g, state, x, value=loss, grad=g, **options)
        return lj.apply_updates(x, u), state

    tree = lambda: {
        name: rng.normal(size=(workers.num_workers, 5)).astype(np.float32) for name in "ab"
    }
    x, g = workers.put(tree()), workers.put(tree())
    loss = workers.put(jnp.arange(float(workers.num_workers)))
    of = lambda **options: workers.map(functools.partial(step, **options))
    return of, x, workers.map(tx.init)(x), g, loss


@pytest.mark.slow
@pytest.mark.parametrize("name", [*PULLS, *methods_that_pull()])
def test_a_step_compiled_for_its_phase_is_the_usual_step(name):
    pulls = PULLS[name]() if name in PULLS else METHODS[name].make(4)
    workers = lj.Workers(2, 2)
    # One round of a graph rounds otherwise than a branch, so a narrow message may differ.
    sizes = None if "+" in name else workers.sizes
    of, x, state, *rest = stepping(pulls, workers)
    usual = of()
    compiled = lambda **options: of(**options).lower(x, state, *rest).compile()
    quiet = compiled(due=False)
    step = functools.cache(lambda phase: compiled(phase=phase))
    expected = (x, state)
    for t in range(1, 9):
        phase = pulls.phase(t, sizes)
        assert t == 1 or phase in pulls.phases(sizes)
        expected = usual(*expected, *rest)
        x, state = (step(phase) if pulls.is_due(t) else quiet)(x, state, *rest)
    # After a quiet step no sample of the parameters is kept.
    unsampled = lambda s: (s[0], s[1]._replace(expected=()) if pulls.pulls else s[1])
    found, expected = (x, unsampled(state)), (expected[0], unsampled(expected[1]))
    chex.assert_trees_all_close(found, expected, rtol=1e-6, atol=1e-7)
    text = quiet.as_text()
    assert exchanges(text) == (0, []) and " conditional(" not in text
    for phase in pulls.phases(sizes):
        sent, branches = exchanges(step(phase).as_text())
        assert bool(sent or branches) == (not phase.is_quiet)
        assert not branches or name not in PULLS


def test_a_due_pull_that_was_omitted_is_reported():
    of, x, state, *rest = stepping(lj.local_sgd(2), lj.Workers(1, 2))
    step = of(due=False)
    for _ in range(4):
        x, state = step(x, state, *rest)
    (level,) = lj.diagnostics(state)
    assert level.exchanges == 0 and level.misplaced.tolist() == [2, 2]


def test_due_must_be_known_while_tracing():
    of, *given = stepping(lj.local_sgd(2), lj.Workers(1, 2))
    with pytest.raises(ValueError, match="`due` must be a bool while tracing, or None"):
        of(due=jnp.asarray(True))(*given)
    for phase, message in (
        (True, "`phase` must be what `phase"),
        (lj.lsgd().phase(128), "which has 1 pulls, got phase=send 0"),
        (lj.Phase((0,), (0,), rounds=(7,)), "has no rounds, got .*round 7: pass the sizes"),
    ):
        with pytest.raises(ValueError, match=message):
            of(phase=phase)(*given)
    traced = lj.Phase((jnp.int32(0),))
    with pytest.raises(ValueError, match="`phase` must be known while tracing, got an"):
        of(phase=traced)(*given)
    with pytest.raises(ValueError, match="pass `due` or `phase`"):
        of(due=True, phase=lj.lsgd().phase(1))(*given)
