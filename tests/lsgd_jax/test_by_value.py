"""Methods, rules and pulls compare, hash and pickle by the arguments that made them."""

import pickle

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import FACTORIES, needed

import lsgd_jax as lj


SGD = optax.sgd(0.7)
METHODS = [
    *(method(**needed(method)) for method in FACTORIES),
    lj.lsgd(0.0, 0.0),
    lj.diloco(part=["head"]),
    lj.exchange(lj.lsgd(0.1, 0.0), lj.sgp(axes="node"), check="every_step"),
]
PULLS = [
    lj.Pull(rule, 0.5, every=2, part=["head"])
    for rule in (
        lj.rules.leader("local", window=3),
        lj.rules.combine_then_adapt(lj.rules.average()),
        lj.rules.moving_center(0.1),
        lj.rules.neighbors(lj.topology.ring),
        lj.rules.butterfly(2),
        lj.rules.push_sum(lj.topology.exponential(4), 1, "node"),
    )
]


@pytest.mark.parametrize("made", [*METHODS, *map(lj.outer, METHODS[:1]), *PULLS])
def test_pickled_objects_compare_equal(made):
    again = pickle.loads(pickle.dumps(made))
    assert again is not made and again == made and not again != made
    assert hash(again) == hash(made)
    assert sum(other == made for other in (*METHODS, *PULLS)) <= 1


def test_equal_arguments_make_equal_objects():
    assert lj.local_sgd(16) == lj.local_sgd(period=16, axes=("node", "local"))
    assert (
        lj.rules.leader("local")
        == lj.rules.leader("local", 10)
        != lj.rules.leader("local", 11)
    )
    outer = optax.sgd(0.7)
    assert (
        lj.rules.anchored(outer)
        == lj.rules.anchored(outer)
        != lj.rules.anchored(optax.sgd(0.7))
    )
    rule = lj.rules.Rule("local", lambda params: (), lambda *given: given)
    assert lj.Pull(rule, 1.0) == lj.Pull(rule, 1.0)
    assert rule != lj.rules.Rule("local", rule.init, rule.agree)  # not made by a factory


def test_a_function_that_cannot_be_pickled_is_named():
    schedule = optax.linear_schedule(0.0, 1.0, 10)
    with pytest.raises((AttributeError, pickle.PicklingError), match="_schedule.<locals>"):
        pickle.dumps(lj.easgd(schedule))


def test_an_equal_pull_as_a_static_argument_does_not_compile_again():
    workers, traced = lj.Workers(1, 2), []

    def step(x, pull):
        traced.append(pull)
        return x * pull.every

    step, x = workers.map(step, static="pull"), workers.put(jnp.ones(2))
    step(x, pull=PULLS[0])
    before = len(traced)
    step(x, pull=pickle.loads(pickle.dumps(PULLS[0])))
    assert len(traced) == before


def test_arrays_compare_by_their_elements():
    anchored = lambda *weights: lj.rules.anchored(SGD, weights=np.array(weights))
    assert anchored(1.0, 2.0) == anchored(1.0, 2.0) != anchored(1.0, 3.0)
    assert anchored(1.0, 2.0) != lj.rules.anchored(SGD, weights=[1.0, 2.0])
    pulls = [lj.lsgd(strength) for strength in (jnp.array(0.1), jnp.array(0.1))]
    assert pulls[0] == pulls[1] != lj.lsgd(jnp.array(0.2))
