"""Resuming with other workers: their origins, and the state that each method keeps."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from harness import mostly_slow
from outside import times

import lsgd_jax as lj
from train.cluster.session import Session
from train.config import WorkersConfig, methods
from train.config.methods import METHODS
from train.run import resharding
from train.run.checkpoints import Checkpoints
from train.task.experiment import make_optimizer
from train.task.state import TrainState


INF = float("inf")
LOCK_STEP = [name for name in METHODS if not METHODS[name].is_asynchronous]


pytestmark = pytest.mark.usefixtures("quick")

SMALL = dataclasses.replace(tiny.SMALL, steps=6, log_every=2)


def on_host(tree):
    """{path: (whether the leaf is shared, its values)} of a tree."""
    shared = lambda node: isinstance(node, lj.Shared)
    plain = lambda x: jax.random.key_data(x) if is_key(x) else x
    return {
        jax.tree_util.keystr(path + rest): (shared(node), np.asarray(plain(leaf)))
        for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=shared)
        for rest, leaf in jax.tree_util.tree_leaves_with_path(node)
    }


def is_key(x):
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


# Origins of workers


@pytest.mark.parametrize(
    "old, new, scores, expected",
    [
        # Same grid: the order within a node stays.
        ((2, 2), (2, 2), [3, 1, 2, 0], [0, 1, 2, 3]),
        # Fewer: the best of all. Those of the remaining node come first.
        ((2, 4), (1, 4), [9, 1, 8, 7, 2, 6, 3, 5], [1, 4, 6, 7]),
        ((2, 4), (1, 4), [7, 6, 5, 4, 3, 2, 1, 0], [4, 5, 6, 7]),
        # The best two of each node; the best four of one node, two of which must move.
        ((2, 4), (2, 2), [9, 1, 8, 2, 7, 3, 6, 4], [1, 3, 5, 7]),
        ((2, 4), (2, 2), [1, 3, 2, 4, 9, 8, 7, 6], [0, 2, 1, 3]),
        ((1, 4), (1, 1), [4, 3, 1, 2], [2]),
        # More: copies of the node's leader; in a new node, of the leader of all.
        ((1, 4), (2, 4), [4, 3, 1, 2], [0, 1, 2, 3, 2, 2, 2, 2]),
        ((2, 2), (2, 3), [4, 3, 1, 2], [0, 1, 1, 2, 3, 2]),
        ((1, 1), (1, 4), [5], [0, 0, 0, 0]),
        # Odd: every worker that fits stays; the last place is a copy of the leader.
        ((2, 4), (3, 3), [1, 2, 3, 4, 0, 5, 6, 7], [0, 1, 2, 4, 5, 6, 3, 7, 4]),
        ((3, 1), (1, 5), [2, 0, 1], [0, 1, 2, 1, 1]),
        ((3, 3), (2, 2), [8, 7, 6, 5, 4, 3, 2, 1, 0], [6, 7, 5, 8]),
        # Same number, regrouped.
        ((2, 4), (1, 8), [7, 6, 5, 4, 3, 2, 1, 0], [0, 1, 2, 3, 4, 5, 6, 7]),
        ((1, 4), (4, 1), [3, 1, 0, 2], [2, 0, 1, 3]),
        # Nonfinite workers go first and are not copied, even as the best of a node.
        ((2, 2), (1, 2), [INF, 3, 2, INF], [1, 2]),
        ((2, 2), (2, 3), [INF, INF, 2, 1], [0, 1, 3, 2, 3, 3]),
        # No finite worker, and ties: the lowest numbers.
        ((2, 2), (1, 2), [INF] * 4, [0, 1]),
        ((1, 2), (2, 2), [INF] * 2, [0, 1, 0, 0]),
        ((2, 2), (2, 3), [1] * 4, [0, 1, 0, 2, 3, 2]),
    ],
)
def test_origins_of_the_new_workers(old, new, scores, expected):
    old, new = WorkersConfig(*old), WorkersConfig(*new)
    assert resharding.sources(old, new, scores).tolist() == expected


def training_state(score, sick, params, elects=True):
    """A training state. If its pulls elect leaders, the last one has these scores."""
    tx, workers = lj.lsgd() if elects else lj.local_sgd(), lj.Workers(1, len(score))
    opt_state = workers.map(tx.init)(workers.put(params))._replace(
        is_finite=~jnp.asarray(sick)
    )
    if elects:
        scored = lambda pull, score: pull._replace(rule=pull.rule._replace(score=score))
        scores = -jnp.asarray(score), jnp.asarray(score)
        opt_state = opt_state._replace(pulls=tuple(map(scored, opt_state.pulls, scores)))
    return TrainState(params, {}, opt_state, None, lj.Shared(jnp.int32(1)))


def test_scores_are_those_of_the_method_otherwise_recent_losses():
    params = {"w": np.ones((3, 2)), "b": np.ones((3,))}
    recent, healthy = np.array([3.0, 1.0, 2.0]), [False] * 3
    own = training_state([0.3, 0.1, np.nan], healthy, params)
    np.testing.assert_allclose(resharding.scores(own, recent), [0.3, 0.1, INF])
    none = training_state([0.3, 0.1, np.nan], healthy, params, elects=False)
    np.testing.assert_array_equal(resharding.scores(none, recent), recent)
    sick = training_state([0.3, 0.1, 0.2], [False, True, False], params)
    np.testing.assert_allclose(resharding.scores(sick, recent), [0.3, INF, 0.2])
    broken = {"w": np.array([[1, 1], [1, 1], [1, np.nan]]), "b": np.array([1, np.inf, 1])}
    lost = training_state([0.3, 0.1, 0.2], healthy, broken)
    np.testing.assert_allclose(resharding.scores(lost, recent), [0.3, INF, INF])


# Every method


@pytest.mark.parametrize("name", LOCK_STEP)
def test_the_table_of_methods_says_what_each_one_keeps(name):
    table = resharding.__doc__.partition("\n\n    method")[2].partition("\n\n")[0]
    columns = {word for line in table.splitlines() for word in line[:26].split()}
    assert name in {word.strip(",") for word in columns}


def options(name):
    small = {"period": 2, "switch_step": 4, "sync_period": 4, "group_size": 2}
    return {k: v for k, v in small.items() if k in METHODS[name].__dataclass_fields__}


class Toy:
    """The state of the trainer for a method, with few parameters."""

    def __init__(self, method, nodes, locals):
        self.grid = WorkersConfig(nodes, locals)
        config = dataclasses.replace(SMALL, workers=self.grid, method=method)
        self.workers = lj.Workers(nodes, locals)
        params = self.workers.replicate({"w": np.ones((2, 3), np.float32), "b": np.ones(4)})
        self.fresh = TrainState(
            params=params,
            stats={"mean": params["b"]},
            opt_state=self.workers.map(make_optimizer(config).init)(params),
            key=self.workers.put(jax.random.split(jax.random.key(0), nodes * locals)),
            step=self.workers.share(jnp.int32(0)),
        )

    def scattered(self, apart):
        """A state with random floats, which differ between the workers if `apart`."""
        draw = np.random.default_rng(0).uniform

        def spread(x):
            if not jnp.issubdtype(x.dtype, jnp.floating):
                return x
            drawn = draw(0.5, 1.5, x.shape if apart else x.shape[1:])
            return np.broadcast_to(np.asarray(drawn, x.dtype), x.shape)

        names = "params", "stats", "opt_state"
        drawn = {name: jax.tree.map(spread, getattr(self.fresh, name)) for name in names}
        return self.fresh._replace(**self.workers.put(drawn))

    def save(self, folder, state, losses):
        grid = {"nodes": self.workers.nodes, "locals": self.workers.locals}
        checkpoints = Checkpoints(folder, 3, pytest.fail, Session())
        notes = {"recent_losses": losses, "workers": grid, "seconds": 1.0}
        assert checkpoints.save(int(state.step.value), state, notes)
        assert checkpoints.close()

    def restore(self, folder):
        checkpoints = Checkpoints(folder, 3, pytest.fail, Session())
        restored = resharding.restore(checkpoints.restore_latest, self.fresh, self.workers)
        assert checkpoints.close()
        return restored


def check_resized(method, before, restored):
    """Checks a state against the one from which it was resized."""
    after, sources = on_host(restored.state), restored.resizing.sources
    before, old = on_host(before), before
    assert before.keys() == after.keys()
    kept = shared = 0
    for path, (is_shared, x) in before.items():
        if path == ".key" or path.endswith((".weight", ".leader")) or ".error" in path:
            continue  # new, see below
        expected = x if is_shared else x[sources]
        np.testing.assert_array_equal(after[path][1], expected, err_msg=path)
        shared, kept = shared + is_shared, kept + (not is_shared)
    assert shared >= 1 and kept >= 8
    W = len(sources)
    assert len(np.unique(after[".key"][1], axis=0)) == W
    for path, (_, x) in after.items():
        if path.endswith(".weight"):
            assert x.sum() == W and method in ("sgp", "osgp", "gosgd")
        if path.endswith(".leader"):
            assert (x == -1).all()
        if ".error" in path:
            assert not x.any() and method == "sparse-diloco"
    if method in ("easgd", "downpour", "parle"):  # they test the center
        center = lambda state: on_host(lj.center(state.params, state.opt_state))
        for path, (_, x) in center(old).items():
            np.testing.assert_array_equal(center(restored.state)[path][1], x)


# By default one of each kind of state: scores, anchors and weights.
KINDS = "lsgd diloco sgp".split()


@pytest.mark.parametrize("name", mostly_slow(LOCK_STEP, fast=KINDS))
def test_a_method_resumes_with_more_workers_and_with_fewer(name, tmp_path):
    method = METHODS[name](**options(name)) if name != "lsgd" else SMALL.method
    few, many = Toy(method, 1, 2), Toy(method, 2, 2)
    for old, new, losses in ((few, many, [0.2, 0.1]), (many, few, [0.3, 0.1, 0.4, 0.2])):
        state = old.scattered(apart=not method.first)
        folder = tmp_path / f"{len(losses)}"
        old.save(folder, state, losses)
        restored = new.restore(folder)
        scores = resharding.scores(state, np.array(losses))
        expected = resharding.sources(old.grid, new.grid, scores).tolist()
        assert restored.resizing.sources == expected
        check_resized(name, state, restored)
        # So that the compiled step accepts it.
        assert typed(restored.state) == typed(new.fresh)


def typed(tree):
    """The structure, types and shardings that a compiled function requires."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(x.aval, x.sharding) for x in leaves]


def test_a_diverged_worker_is_dropped_first_and_not_copied(tmp_path):
    toy = Toy(METHODS["independent"](), 2, 2)
    poison = lambda x: toy.workers.put(x.at[2].set(jnp.nan))
    state = toy.fresh._replace(params=jax.tree.map(poison, toy.fresh.params))
    toy.save(tmp_path, state, losses=[0.3, 0.2, 0.1, 0.4])
    grow, shrink = (Toy(METHODS["independent"](), *grid) for grid in ((2, 3), (1, 3)))
    assert grow.restore(tmp_path).resizing.sources == [0, 1, 1, 2, 3, 3]
    assert shrink.restore(tmp_path).resizing.sources == [0, 1, 3]


def test_messages_in_flight_refuse_other_workers_and_change_no_file(tmp_path):
    method = methods.make("osgp", staleness=2)
    four, two = (Toy(method, nodes, 2) for nodes in (2, 1))
    four.save(tmp_path, four.fresh, [0.0, 1.0, 2.0, 3.0])
    before = times(tmp_path)
    message = "1 x 2 workers cannot resume from 2 x 2: the workers must stay the same "
    message += r"while messages .* \(`staleness` above 1\)"
    with pytest.raises(ValueError, match=message):
        two.restore(tmp_path)
    assert times(tmp_path) == before
    assert four.restore(tmp_path).resizing is None
