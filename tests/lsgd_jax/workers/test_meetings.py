"""A method that exchanges between nodes alone is told that a node's workers never meet."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import lsgd_jax as lj


ACROSS = {
    "diloco": lambda: lj.diloco(4, axes="node"),
    "delayed": lambda: lj.local_sgd(4, axes=("node",), delay=1),
    "sgp": lambda: lj.sgp(axes="node"),
}
SHAPE = (3,)


def grid(nodes=2, locals=2, devices=4):
    return lj.Workers(nodes, locals, devices=jax.devices()[:devices])


def chained(*before, after=lambda grads: grads, method=None):
    """A step of a chain; `after` may change the gradients."""
    tx = optax.chain(*before, optax.sgd(0.1), method or ACROSS["diloco"]())

    def step(x, goal, due=None):
        loss, grads = jnp.square(x - goal).sum(), after(2 * (x - goal))
        updates, state = tx.update(grads, tx.init(x), x, loss=loss, due=due)
        return lj.apply_updates(x, updates), state, loss

    return step


def around(*before):
    """A step of a program with a method around it."""
    base = optax.chain(*before, optax.sgd(0.1))

    def step(state, goal):
        updates, after = base.update(2 * (state[0] - goal), state[1], state[0])
        x = optax.apply_updates(state[0], updates)
        return (x, after), jnp.square(x - goal).sum()

    train = lj.around(step, ACROSS["diloco"](), params=0)
    return lambda x, goal: train(train.init((x, base.init(x))), goal)


def quiet(x, goal):
    return chained()(x, goal, due=False)


def in_a_chain(x, goal):
    """Two exchanges, of which one is silent at this step."""
    both = lj.local_sgd(3, axes="local"), lj.local_sgd(4, axes="node")
    first, second = (tx.phase(4) for tx in both)
    inner, state = both[0].update(goal, both[0].init(x), x, phase=first)
    outer, after = both[1].update(inner, both[1].init(x), x, phase=second)
    return lj.apply_updates(x, outer), (state, after)


def logged(x, goal):
    x, state, loss = chained()(x, goal)
    return x, state, lax.pmean(loss, ("node", "local"))


def without_a_state(x, goal):
    """Many steps in one program, which returns the parameters alone."""
    take = lambda x, _: (chained()(x, goal)[0], None)
    return lax.scan(take, x, length=2)[0]


def at_once(x, goal):
    """Metrics of all workers, without an exchange."""
    return lax.pmean(jnp.square(x - goal).sum(), ("node", "local"))


ALLREDUCE = lj.allreduce(axes="local")
BOTH = lj.exchange(lj.lsgd(0.1, 0.0, 2), lj.diloco(4, axes="node"))
inside = lambda grads: lax.pmean(grads, "local")

# The program of one worker, and the grid.
APART = {
    **{name: (chained(method=make()), grid) for name, make in ACROSS.items()},
    "around": (around(), grid),
    "a mean of the losses": (logged, grid),
    "steps in a scan": (without_a_state, grid),
    "all-reduce": (chained(lj.allreduce(axes="node")), grid),
    "one node": (chained(), lambda: grid(1, 2, 2)),
    "workers in slots": (chained(), lambda: grid(2, 4, 4)),
    "workers of one device": (chained(), lambda: grid(2, 2, 1)),
    "a mesh": (
        chained(method=lj.diloco(4, axes="dcn")),
        lambda: lj.Workers(
            mesh=jax.make_mesh((2, 2), ("dcn", "ici"), devices=jax.devices()[:4]),
            axes=("dcn", "ici"),
        ),
    ),
}
TOGETHER = {
    "all-reduce inside": (chained(ALLREDUCE), grid),
    "a mean inside": (chained(after=inside), grid),
    "two levels": (chained(method=BOTH), grid),
    "two exchanges": (in_a_chain, grid),
    "around an all-reduce": (around(ALLREDUCE), grid),
    "all workers": (chained(method=lj.diloco(4)), grid),
    "instances": (chained(method=lj.lsgd(0.1, 0.0)), grid),
    "no group": (chained(method=lj.diloco(4, axes=())), grid),
    "one worker per node": (chained(), lambda: grid(4, 1)),
    "nothing is due": (quiet, grid),
    "no exchange": (at_once, grid),
}


def trace(program, workers):
    """Traces a program over workers, and returns what is told."""
    x = workers.put(np.ones((workers.num_workers, *SHAPE), np.float32))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        jax.eval_shape(workers.map(program), x, x)
    return [str(each.message) for each in told]


@pytest.mark.slow
@pytest.mark.parametrize("name", APART)
def test_workers_of_a_node_that_never_meet_are_told_once(name):
    program, make = APART[name]
    workers = make()
    (told,) = trace(program, workers)
    local = "ici" if name == "a mesh" else "local"
    assert f"nothing communicates along {local!r}, so " in told
    assert f"optax.chain(lj.allreduce(axes={local!r}), ..., lj.diloco(axes=" in told
    assert name != "diloco" or trace(program, workers) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", TOGETHER)
def test_nothing_is_told_of_other_programs(name):
    program, make = TOGETHER[name]
    assert trace(program, make()) == []


def test_gradients_may_be_averaged_in_a_program_of_their_own():
    workers = grid()
    assert trace(at_once, workers) == []
    assert trace(lambda x, goal: inside(x - goal), workers) == []
    assert trace(chained(), workers) == []


def test_a_model_of_one_number_meets_in_collectives_of_scalars(monkeypatch):
    monkeypatch.setitem(globals(), "SHAPE", ())
    assert trace(chained(after=inside), grid()) == []
    assert len(trace(chained(), grid())) == 1
