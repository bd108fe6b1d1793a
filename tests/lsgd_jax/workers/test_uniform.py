"""Branches that may hang, and `Shared` outputs that differ, are errors while tracing."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import lsgd_jax as lj
from lsgd_jax._src.workers import uniform


ALL = ("node", "local")
HANGS = "would wait for each other forever"


@pytest.fixture(scope="module")
def workers():
    return lj.Workers(2, 2, devices=jax.devices()[:4])


@pytest.fixture
def trace(workers):
    """Traces a function of x [3] and n (per worker) and t (shared), without compiling."""

    def run(fn, group=None):
        x = workers.put((jnp.ones((4, 3)), jnp.arange(4), lj.Shared(jnp.int32(1))))
        return jax.eval_shape(workers.map(fn), *x, *(() if group is None else (group,)))

    return run


def total(x, axes=ALL):
    return lax.psum(x, axes)


def ask(predicate, x, exchange=total):
    return lax.cond(predicate, exchange, lambda x: x, x)


def loop(predicate, x):
    def body(carry):
        return carry[0] + 1, total(carry[1])

    return lax.while_loop(lambda carry: carry[0] < predicate, body, (0.0, x))[1]


HANGING = {
    "own floats": lambda x, n, t: ask(jnp.isfinite(x).all(), x),
    "index": lambda x, n, t: ask(lax.axis_index("node") == 0, x),
    "vector of ints": lambda x, n, t: ask((x > 0).astype(int)[0] > 0, x),
    "sum over the other axis": lambda x, n, t: ask(total(x, "local").sum() > 0, x),
    "permuted": lambda x, n, t: ask(
        lax.ppermute(total(x), "node", [(0, 1)]).sum() > 0, x
    ),
    "scattered": lambda x, n, t: ask(
        lax.psum_scatter(jnp.ones([2, 3]), "local").sum() > 0, x
    ),
    "while": lambda x, n, t: loop(x.sum(), x),
    "while condition": lambda x, n, t: lax.while_loop(
        lambda x: total(x).sum() + x[0] < 9, lambda x: x + 1, x
    ),
    "switch": lambda x, n, t: lax.switch(
        x[0].astype(int), [lambda x: x, total, lambda x: 2 * x], x
    ),
    "nested": lambda x, n, t: ask(
        x[0] > 0, x, lambda x: lax.scan(lambda c, _: (total(c), None), x, length=2)[0]
    ),
    "in a jit": lambda x, n, t: jax.jit(ask)(x[0] > 0, x),
    "in a checkpoint": lambda x, n, t: jax.checkpoint(ask)(x[0] > 0, x),
    "in a vmap": lambda x, n, t: jax.vmap(lambda y: ask(x[0] > 0, y))(jnp.ones([5, 3])),
    "carried over three rounds": lambda x, n, t: lax.fori_loop(
        0, 9, lambda i, c: (c[1], x[0], ask(c[0] > 0, c[2])), (1.0, 1.0, x)
    ),
    "by what is scanned over": lambda x, n, t: lax.scan(
        lambda c, y: (ask(y > 0, c), y), total(x), x
    ),
    "by what a scan stacks": lambda x, n, t: ask(
        lax.scan(lambda c, y: (c, y + 1), t.value, x)[1].sum() > 0, x
    ),
    "by a constant of a scan": lambda x, n, t: lax.scan(
        lambda c, y: (ask(x[0] > 0, c), y), total(x), total(x)
    ),
    "by a branch": lambda x, n, t: ask(
        lax.cond(x[0] > 0, lambda: 1.0, lambda: 2.0) > 1, x
    ),
    "by a loop": lambda x, n, t: ask(
        lax.while_loop(lambda i: i < x[0], lambda i: i + 1, 0.0) > 1, x
    ),
    "of one group": lambda x, n, t: ask(
        total(x, "node")[0] > 0, x, lambda x: total(x, "local")
    ),
    "a permutation in another group": lambda x, n, t: ask(
        total(x, "local")[0] > 0, x, lambda x: lax.ppermute(x, "local", [(0, 1)])
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", HANGING)
def test_a_branch_on_per_worker_values_with_collectives_is_refused(trace, name):
    with pytest.raises(ValueError, match=HANGS):
        trace(HANGING[name])


SAFE = {
    "shared": lambda x, n, t: ask(t.value > 0, x),
    "an own count": lambda x, n, t: ask(n % 2 == 0, x),
    "a mean": lambda x, n, t: ask(lax.pmean(x, ALL).sum() > 0, x),
    "smallest and largest": lambda x, n, t: ask(
        lax.pmin(x, ALL).sum() > lax.pmax(x, ALL).sum(), x
    ),
    "gathered": lambda x, n, t: ask(lj.rules.Group(ALL).elect(x.sum())[0] == 1, x),
    "one axis after the other": lambda x, n, t: ask(
        total(total(x, "node"), "local")[0] > 0, x
    ),
    "a constant": lambda x, n, t: ask(jnp.arange(3.0).sum() > 0, x),
    "nothing to wait for": lambda x, n, t: ask(x[0] > 0, x, jnp.sin),
    "equal in the group": lambda x, n, t: ask(
        total(x, "local")[0] > 0, x, lambda x: total(x, "local")
    ),
    "in the other branch's operands": lambda x, n, t: lax.cond(
        x[0] > 0, lambda x, y: x, lambda x, y: y, x, total(x)
    ),
    "a loop of fixed length": lambda x, n, t: lax.fori_loop(0, 3, lambda i, x: total(x), x),
    "a loop until all agree": lambda x, n, t: lax.while_loop(
        lambda x: total(x).sum() < 9, lambda x: x + 1, x
    ),
    "a count carried beside one's own": lambda x, n, t: lax.scan(
        lambda c, y: ((c[0] + 1, ask(c[0] > 1, c[1] + y)), y), (t.value, x), x
    ),
    "a solver": lambda x, n, t: jnp.linalg.solve(jnp.eye(3) + jnp.outer(x, x), total(x)),
    "sorted": lambda x, n, t: ask(jnp.median(lax.all_gather(x, ALL), axis=0)[0] > 0, x),
    "random bits": lambda x, n, t: ask(
        jax.random.bernoulli(jax.random.fold_in(jax.random.key(0), t.value)), x
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SAFE)
def test_a_function_that_cannot_hang_passes(trace, name):
    trace(SAFE[name])


def test_a_per_worker_key_is_not_a_count(workers):
    keys = workers.put(jax.random.split(jax.random.key(0), 4))
    draws = workers.map(lambda key: ask(jax.random.bernoulli(key), jnp.ones(3)))
    with pytest.raises(ValueError, match=HANGS):
        draws(keys)


def test_axes_of_size_one_connect_no_workers():
    workers = lj.Workers(1, 2, devices=jax.devices()[:2])
    ask_node = lambda x: ask(x > 1, x, lambda x: 2 * total(x, "node"))
    assert workers.map(ask_node)(workers.put(jnp.array([1.0, 2.0]))).tolist() == [1, 4]


def test_the_error_names_the_axes_and_a_remedy(trace):
    with pytest.raises(ValueError, match="'node' and 'local'.*around the base optimizer"):
        trace(lambda x, n, t: ask(x[0] > 0, x))
    with pytest.raises(ValueError, match="collectives along 'local': "):
        trace(lambda x, n, t: ask(x[0] > 0, x, lambda x: total(x, "local")))


DIFFERING = {
    "own": lambda x: lj.Shared(x),
    "branch": lambda x: lj.Shared(lax.cond(x[0] > 0, lambda: 1.0, lambda: 2.0)),
    "half a sum": lambda x: lj.Shared(total(x, "local")),
    "group": lambda x: lj.Shared(total(x, "node"), {"local": None}),
    "inner": lambda x: lj.Shared(
        {"a": total(x), "b": lj.Shared(total(x, "local"), {"local": None})}
    ),
}


@pytest.mark.parametrize("name", DIFFERING)
def test_a_shared_output_that_differs_is_refused_with_its_path(trace, name):
    path = r"\['state'\].value" + (r"\['b'\].value" if name == "inner" else "")
    with pytest.raises(ValueError, match=path + " may differ between workers"):
        trace(lambda x, n, t: {"state": DIFFERING[name](x), "x": x})


def test_a_value_that_is_equal_in_a_group_stays_equal(workers, trace):
    """A `Shared` over one axis differs along the other axis only, also as an argument."""
    group = lj.Shared(workers.put(jnp.ones(4, int)), {"local": None})

    def keep(x, n, t, group):
        inside = ask(group.value > 0, x, lambda x: total(x, "local"))
        return lj.Shared(group.value + 1, {"local": None}), inside

    trace(keep, group)
    with pytest.raises(ValueError, match=HANGS):
        trace(lambda x, n, t, group: ask(group.value > 0, x), group)


def test_the_walk_is_linear_in_the_program(workers):
    """40 levels of functions that call the next one twice: 2^40 visits without a cache."""

    def deep(x, depth=40):
        call = jax.jit(lambda x: jnp.sin(x))
        for _ in range(depth):
            call = jax.jit(lambda x, inner=call: inner(x) + inner(x))
        return call(x)

    x, axes = jnp.ones(3), {"node": 2}
    traced = jax.make_jaxpr(deep)(x)
    leaf_axes = uniform.leaf_axes((x,), axes)
    uniform.check(traced.jaxpr, leaf_axes, leaf_axes, axes)
