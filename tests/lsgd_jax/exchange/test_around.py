"""around: the step of a program, with its state in many forms, and a method around it."""

import dataclasses
import typing
from typing import NamedTuple

import flax.jax_utils
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from harness import close, mostly_slow

import lsgd_jax as lj


BASE = optax.sgd(0.1, momentum=0.9)
LSGD = lj.lsgd(0.3, 0.2, 2, 4, loss_window=1)
START = {"w": np.array([1.0, -2.0, 0.5], np.float32)}


class Program(NamedTuple):
    params: typing.Any
    opt_state: typing.Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Record:
    model: typing.Any
    opt_state: typing.Any


def updated(params, opt_state, goal):
    """A step of SGD towards the goal, by hand: (params, opt_state, loss)."""
    loss = jnp.square(params["w"] - goal).sum()
    grads = {"w": 2 * (params["w"] - goal)}
    updates, opt_state = BASE.update(grads, opt_state, params)
    return lj.apply_updates(params, updates), opt_state, loss


def train_state(state, goal):
    loss, grads = jax.value_and_grad(lambda w: jnp.square(w - goal).sum())(
        state.params["w"]
    )
    return state.apply_gradients(grads={"w": grads}), {"loss": loss}


def record(state, goal):
    params, opt_state, loss = updated(state.model["params"], state.opt_state, goal)
    return Record({"params": params}, opt_state), {"metrics": {"mse": loss}}


def named(state, goal):
    *after, loss = updated(*state, goal)
    return {"goal": goal, "loss": loss, "state": Program(*after)}


def pair(state, goal):
    *after, loss = updated(*state, goal)
    return loss, tuple(after)


def alone(state, goal):
    return Program(*updated(*state, goal)[:2])


def bare(params, goal):
    """Without momentum, so that the parameters are all of its state."""
    grads = 2 * (params["w"] - goal)
    loss = jnp.square(params["w"] - goal).sum()
    return {"w": params["w"] - 0.1 * grads}, loss, goal.sum()


opt_state = BASE.init(START)
# The step, its first state, the options of `around`, and the parameters in the state.
PROGRAMS = {
    "TrainState": (
        train_state,
        TrainState.create(apply_fn=None, params=START, tx=BASE),
        {},
        lambda state: state.params,
    ),
    "dataclass": (
        record,
        Record({"params": START}, opt_state),
        {"params": ("model", "params"), "loss": ("metrics", "mse")},
        lambda state: state.model["params"],
    ),
    "dict of results": (named, Program(START, opt_state), {}, lambda state: state[0]),
    "tuple": (pair, (START, opt_state), {"params": 0}, lambda state: state[0]),
    "getter and setter": (
        pair,
        (START, opt_state),
        {
            "params": (lambda s: s[0], lambda s, params: (params, s[1])),
            "loss": lambda results: results[0],
            "result": 1,
        },
        lambda state: state[0],
    ),
    "state alone": (
        alone,
        Program(START, opt_state),
        {"loss": None},
        lambda state: state.params,
    ),
    "a scalar of another name": (
        pair,
        (START, opt_state),
        {"params": 0, "loss": "mse", "result": 1},
        lambda state: state[0],
    ),
    "parameters alone": (bare, START, {"params": (), "loss": 1}, lambda state: state),
}


CASES = [*((name, False) for name in PROGRAMS), ("TrainState", True)]
QUICK = [("TrainState", True)]


@pytest.mark.parametrize("name, by_phase", mostly_slow(CASES, fast=QUICK))
def test_the_numbers_are_those_of_the_chain(name, by_phase):
    step, start, options, params_of = PROGRAMS[name]
    method = LSGD if options.get("loss", "") is not None else lj.local_sgd(2)
    base = optax.sgd(0.1) if name == "parameters alone" else BASE
    workers, tx = lj.Workers(2, 2), optax.chain(base, method)
    train = lj.around(step, method, **options)
    mapped = workers.map(train, donate=0, static="phase")
    state = workers.map(train.init)(workers.replicate(start))
    goals = np.random.default_rng(0).normal(size=(5, 4, 3)).astype(np.float32)

    def chained(params, opt_state, goal):
        loss = jnp.square(params["w"] - goal).sum()
        grads = {"w": 2 * (params["w"] - goal)}
        updates, opt_state = tx.update(grads, opt_state, params, loss=loss)
        return lj.apply_updates(params, updates), opt_state

    x = workers.replicate(START)
    x_state, chained = workers.map(tx.init)(x), workers.map(chained)
    for t, goal in enumerate(map(workers.put, goals), start=1):
        phase = train.outer.phase(t) if by_phase else None
        results = mapped(state, goal, phase=phase)
        is_ours = lambda node: isinstance(node, lj.AroundState)
        (state,) = filter(is_ours, jax.tree.leaves(results, is_leaf=is_ours))
        x, x_state = chained(x, x_state, goal)
    close(params_of(state.state)["w"], x["w"])
    assert mapped._cache_size() == (len(train.outer.phases()) if by_phase else 1)
    for mine, other in zip(lj.diagnostics(state), lj.diagnostics(x_state), strict=True):
        assert mine.bytes_sent == other.bytes_sent > 0 and not mine.misplaced.any()


def test_a_step_keeps_its_name_its_arguments_and_its_static_ones():
    def update(state, batch, train=True, **more):
        """Doc."""
        return state, (batch.sum() if train else jnp.float32(0))

    step = lj.around(update, lj.local_sgd(1), params=())
    assert (step.__name__, step.__doc__) == ("update", "Doc.")
    workers = lj.Workers(1, 2)
    state = workers.map(step.init)(workers.replicate({"w": np.ones(2)}))
    mapped = workers.map(step, static=("train", "phase"))
    assert mapped(state, workers.put(np.ones(2)), train=False)[1].tolist() == [0, 0]
    assert mapped(state, workers.put(np.ones(2)), True)[1].tolist() == [1, 1]


def test_under_pmap_and_vmap():
    method = lj.local_sgd(2, axes="batch")
    step = lj.around(pair, method, params=0)
    goals = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
    states = jax.tree.map(lambda x: jnp.stack([x] * 4), (START, opt_state))
    found = []
    for transform in (jax.pmap, jax.vmap):
        state = transform(step.init, axis_name="batch")(states)
        for _ in range(2):
            loss, state = transform(step, axis_name="batch")(state, goals)
        found.append(state.state[0]["w"])
        lj.checks.check_workers_agree(state.state[0])
        assert loss.shape == (4,)
    close(*found)


@pytest.mark.slow  # `test_under_pmap_and_vmap` has a run of two steps
@pytest.mark.parametrize("method", [lj.lsgd, lj.diloco])
def test_a_run_under_pmap_continues_from_all_rows_and_not_from_one(method):
    """Between exchanges; saved as arrays of the host."""
    periods = dict(local_period=2, global_period=4) if method is lj.lsgd else {"period": 2}
    train = lj.around(pair, method(**periods, axes="batch"), params=0)
    step = jax.pmap(train, axis_name="batch")
    states = jax.tree.map(lambda x: jnp.stack([x] * 4), (START, opt_state))
    state = jax.pmap(train.init, axis_name="batch")(states)
    goals = np.random.default_rng(0).normal(size=(6, 4, 3)).astype(np.float32)
    for goal in goals[:3]:
        _, state = step(state, goal)
    saved, one = jax.device_get(state), flax.jax_utils.unreplicate(state)
    with pytest.raises(ValueError, match="workers differ at "):
        lj.checks.check_workers_agree(state.state[0])
    ends = []
    for start in (state, saved, flax.jax_utils.replicate(one, jax.devices()[:4])):
        for goal in goals[3:]:
            _, start = step(start, goal)
        ends.append(start.state[0]["w"])
    np.testing.assert_array_equal(ends[0], ends[1])
    assert np.abs(ends[0] - ends[2]).max() > 0.01


@pytest.mark.parametrize(
    "step, options, message",
    [
        (pair, {"params": "weights"}, "got 'weights' for a tuple of '0', '1'"),
        (pair, {}, r"`params` must be .* such as params=0, or a pair of .*\(get, set\)"),
        (pair, {"params": ((0, "a"), (1, "a"))}, r"\(get, set\), which may take several"),
        (pair, {"params": 0, "loss": 7}, "`loss` must be the place .* got loss=7 for the "),
        (
            pair,
            {"params": 0, "result": 7},
            "`result` must be .* such as result=0, got .*=7",
        ),
        (
            lambda s, g: (s, {"train": {"mse": 0.0}, "test": 1.0}),
            {"params": 0, "loss": "mse"},
            r"got loss='mse' for the results tuple\(0: tuple, 1: dict\(train, test\)\)",
        ),
        (alone, {"params": 0, "result": ()}, "`loss` must be .* or None if there is none"),
        (lambda s, g: (s[0], 0.0), {"params": 0}, "because none of them .* results tuple"),
        (lambda s, g: (s, s), {"params": 0}, "because several of them .* for the state "),
        (3, {}, "`step` must be a function, got step=3"),
    ],
)
def test_a_place_that_is_not_there_is_named(step, options, message):
    def run():
        train = lj.around(step, lj.local_sgd(1, axes=()), **options)
        return train(train.init((START, opt_state)), jnp.ones(3))

    with pytest.raises(ValueError, match=message):
        run()


LED = lj.Pull(lj.rules.leader(()), 1.0)


def test_a_method_that_needs_a_loss_is_told_where_to_name_it():
    train = lj.around(pair, lj.exchange(LED), params=0, loss=None)
    state = train.init((START, opt_state))
    with pytest.raises(
        ValueError, match=r"lj.around\(step, method, loss=\.\.\.\)`, got None"
    ):
        train(state, jnp.ones(3))


def test_a_state_of_another_form_is_told_where_it_differs():
    step = lambda s, g: (Program({"w": s.params["w"][:2]}, s.opt_state), jnp.float32(0))
    train = lj.around(step, lj.local_sgd(1, axes=()))
    with pytest.raises(ValueError, match=r"differs first at 'params/w': float32\[2\] for "):
        train(train.init(Program(START, opt_state)), jnp.ones(3))


def test_a_state_without_the_methods_own_is_refused():
    step = lj.around(pair, lj.local_sgd(1), params=0)
    with pytest.raises(ValueError, match="the `AroundState` that `init` made .* got tuple"):
        step((START, opt_state), jnp.ones(3))
    with pytest.raises(ValueError, match="`method` must be a method that pulls"):
        lj.around(pair, lj.allreduce())


def adversaries(state, goal):
    """Two parameter trees and a counter, as a generator and a discriminator have them."""
    toward = lambda x, goal: x - 0.25 * (x - goal)
    after = {
        "count": state["count"] + 1,
        "d": {"w": toward(state["d"]["w"], goal[1:])},
        "g": {"w": toward(state["g"]["w"], goal[:1])},
    }
    return after, jnp.square(after["g"]["w"] - goal[:1]).sum()


GAN = {"count": 0, "d": {"w": np.ones(2, np.float32)}, "g": {"w": np.ones(1, np.float32)}}
GOALS = np.random.default_rng(0).normal(size=(4, 4, 3)).astype(np.float32)


def trained(train, by_phase=False):
    """The states of four workers after each of four steps."""
    workers = lj.Workers(2, 2)
    state = workers.map(train.init)(workers.replicate(GAN))
    step = workers.map(train, static="phase")
    states = []
    for t, goal in enumerate(map(workers.put, GOALS), start=1):
        phase = train.phase(t) if by_phase else None
        state, _ = step(state, goal, phase=phase)
        states.append(state)
    return states


def test_several_places_are_exchanged_as_one_tree():
    """By one leader, and with one count of bytes."""
    get = lambda state: {"d": state["d"], "g": state["g"]}
    pair = (get, lambda state, params: {**state, **params})
    method = lj.diloco(2, outer=optax.sgd(0.7))
    expected = trained(lj.around(adversaries, method, params=pair))[-1]
    got = trained(lj.around(adversaries, method, params=["d", "g"]))[-1]
    jax.tree.map(np.testing.assert_array_equal, got.state, expected.state)
    assert lj.diagnostics(got)[0].bytes_sent == lj.diagnostics(expected)[0].bytes_sent
    center = lj.center([got.state["d"], got.state["g"]], got)
    close(center[0]["w"], lj.center(get(expected.state), expected)["d"]["w"])


@pytest.mark.parametrize(
    "params, message",
    [
        (["d", "d"], "must not lie in one another, got 'd' and 'd'"),
        (["d", ("d", "w")], r"must not lie in one another, got 'd' and \('d', 'w'\)"),
        ([2, ("g", 0)], r"got 2 and \('g', 0\)"),
        ([], r"a list of at least one place, .* got params=\[\]"),
        ([lambda s: s["d"], lambda s, p: s], "or a tuple of two functions"),
        (["d", "x"], "got 'x' for a dict of 'count', 'd', 'g'"),
    ],
)
def test_places_of_which_one_is_wrong_are_refused(params, message):
    with pytest.raises(ValueError, match=message):
        lj.around(adversaries, lj.local_sgd(1, axes=()), params=params).init(GAN)


@pytest.mark.parametrize("by_phase", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_nested_methods_have_their_own_parameters_and_periods(by_phase):
    slow, fast = lj.local_sgd(4), lj.local_sgd(2)
    inner = lj.around(adversaries, fast, params="g")
    train = lj.around(inner, slow, params="d")
    assert train.outer[0].pulls == fast.pulls and train.phase(4)[1] == slow.phase(4)
    states = trained(train, by_phase)
    apart = [[np.ptp(s.state[x]["w"], axis=0).max() for x in "gd"] for s in states]
    agree = np.array(apart) < 1e-6
    assert agree.tolist() == [[0, 0], [1, 0], [0, 0], [1, 1]]
    assert [level.exchanges for level in lj.diagnostics(states[-1])] == [2, 1]
    alone = trained(inner)[-1]
    np.testing.assert_array_equal(states[-1].state["g"]["w"], alone.state["g"]["w"])
    with pytest.raises(ValueError, match="a step in 2 `around`s .* `phase` .* got Phase"):
        train(states[-1], GOALS[0], phase=train.outer[0].phase(2))
    with pytest.raises(ValueError, match="`state` must be a tuple .* got OuterState"):
        train(alone, GOALS[0])


def test_the_second_iterate_of_schedule_free_is_exchanged_or_a_warning_names_it():
    base = optax.contrib.schedule_free_sgd(0.1)

    def update(state, goal):
        params, opt_state = state
        updates, opt_state = base.update(params - goal, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), goal.sum()

    workers, w = lj.Workers(1, 2), jnp.ones(3)
    start, both = workers.replicate((w, base.init(w))), [0, (1, "z")]
    train = lj.around(update, lj.local_sgd(2), params=both)
    state, step = workers.map(train.init)(start), workers.map(train)
    for goal in GOALS[:2, :2]:
        state, _ = step(state, workers.put(goal))
    lj.checks.check_workers_agree(state.state)
    with pytest.warns(UserWarning, match="`z` of optax.contrib.schedule_free"):
        workers.map(lj.around(update, lj.local_sgd(2), params=0).init)(start)


@pytest.mark.slow
def test_a_step_may_have_a_phase_of_its_own():
    """As curricula have; the method's is then called `outer_phase`."""

    def update(params, batch, phase="warm-up"):
        return params - (1 if phase == "main" else 0), batch.sum()

    workers = lj.Workers(1, 2)
    train = lj.around(update, lj.local_sgd(2), params=(), result=0)
    state = workers.map(train.init)(workers.put(np.arange(2.0, dtype=np.float32)))
    step = workers.map(train, static=("phase", "outer_phase"))
    batch = workers.put(np.ones(2))
    state, _ = step(state, batch, phase="main", outer_phase=train.phase(1))
    assert state.state.tolist() == [-1, 0]
    state, _ = step(state, batch, phase="warm-up", outer_phase=train.phase(2))
    assert state.state.tolist() == [-0.5, -0.5]
    state, _ = step(state, batch, "main")
    assert state.state.tolist() == [-1.5, -1.5]
