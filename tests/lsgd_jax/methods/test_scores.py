"""Workers judged by their peers, and the mean of the best: numbers, lies, and nan."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import after, around, train

import lsgd_jax as lj


INF = np.inf


def best(keep, **options):
    return lj.leader(("node", "local"), keep=keep, **options)


def run(method, x, batch, losses=None, steps=1, devices=1, **options):
    """The workers' x after some steps that do not move it, and the last state.

    The loss of x on a worker's batch is (x - batch)²; losses: what the workers claim.
    """
    x, batch = (np.asarray(v, np.float32) for v in (x, batch))
    claims = (x - batch) ** 2 if losses is None else losses
    seen, state = train(
        method,
        lj.Workers(1, len(x), devices=jax.devices()[:devices]),
        x,
        [batch] * steps,
        [claims] * steps,
        gradient=lambda x, batch: 0 * x,
        extra=lambda x, batch: {"value_fn": lambda x: (x - batch) ** 2},
        **options,
    )
    return seen[-1], state


def pulled_to(rule, strength=1.0):
    return lj.exchange(lj.Pull(rule, strength))


# Worker i is judged on the batch of i + 1: (0-2)², (1-3)², (5-4)², (2-1)². Ties go to the
# lowest index.
X, BATCH, SCORES = [0, 1, 5, 2], [1, 2, 3, 4], [4, 4, 1, 1]


@pytest.mark.parametrize("devices, outer", [(1, False), (4, False), (4, True)])
def test_a_worker_is_judged_on_the_batch_of_the_next_one(devices, outer):
    method = lj.lsgd(0.5, 0.0, local_period=2, judged_by="peers")
    options = {"devices": devices}
    if outer:
        method, options = around(lj.outer(method)), {"devices": devices, "apply": after}
    x, state = run(method, X, BATCH, **options)
    assert x.tolist() == X and lj.diagnostics(state)[0].score.tolist() == [INF] * 4
    x, state = run(method, X, BATCH, steps=2, **options)
    (pull,) = lj.diagnostics(state)
    assert pull.leader.tolist() == [2] * 4 and pull.score.tolist() == SCORES
    assert x.tolist() == [2.5, 3, 5, 3.5]
    assert pull.payload == 4 + 8 + 4  # the peer's x, its loss and health, the leader's x


def test_a_worker_that_lies_leads_by_its_own_losses_only():
    x, batch, claims = [99.0, 1, 2, 3], [0.0, 0, 0, 0], [0.0, 1, 4, 9]
    own, _ = run(pulled_to(lj.leader("local")), x, batch, claims)
    peers, state = run(pulled_to(lj.leader("local", judged_by="peers")), x, batch, claims)
    assert own.tolist() == [99] * 4 and peers.tolist() == [1] * 4
    assert lj.diagnostics(state)[0].score.tolist() == [99.0**2, 1, 4, 9]
    for judged_by, mean in (("own", 50), ("peers", 1.5)):
        x_, _ = run(pulled_to(best(2, judged_by=judged_by)), x, batch, claims)
        assert x_.tolist() == [mean] * 4


@pytest.mark.parametrize("keep", [1, 4])
def test_workers_that_are_not_finite_never_lead(keep):
    """Worker 1's x and worker 3's loss. Worker 3 judges worker 2, which comes last."""
    rule = best(keep, judged_by="peers")
    x, batch = [4, np.nan, 0, 0, 5], [0, 0, 0, np.nan, 0]
    claims = [1, 1, 1, np.nan, 1]
    x, state = run(pulled_to(rule), x, batch, claims)
    expected = 4 if keep == 1 else 3  # the mean of 4, 0 and 5
    assert x.tolist() == [expected] * 5
    assert lj.diagnostics(state)[0].restored.tolist() == [0, 1, 0, 1, 0]
    x, _ = run(pulled_to(rule), [1, 2], [np.nan, np.nan])  # no judge has a loss
    assert x.tolist() == [1, 2]


def test_a_worker_alone_measures_itself():
    x, state = run(pulled_to(lj.leader("local", judged_by="peers")), [3], [1])
    assert x.tolist() == [3] and lj.diagnostics(state)[0].score.tolist() == [4]


def test_the_mean_of_the_best():
    mean = lambda keep, losses: run(pulled_to(best(keep)), X, BATCH, losses)[0]
    assert mean(2, [3, 1, 4, 2]).tolist() == [1.5] * 4  # workers 1 and 3
    assert mean(1, [1, 1, 4, 2]).tolist() == [0] * 4  # ties go to the lowest index
    assert mean(9, [1, 1, 1, np.nan]).tolist() == [2] * 4  # all that are finite
    x, _ = run(pulled_to(best(2, judged_by="peers")), X, BATCH)
    assert x.tolist() == [3.5] * 4  # workers 2 and 3


def test_a_part_is_judged_within_all_parameters():
    """The judge keeps its own other leaf, and integers, which are never exchanged."""
    rule = lj.leader("local", judged_by="peers")
    tx = lj.exchange(lj.Pull(rule, 1.0, part=["a"]))
    values = {"a": [1.0, 0.0], "b": [0.0, 3.0], "n": [2, 2]}
    params = {k: jnp.asarray(v) for k, v in values.items()}
    still = jax.tree.map(jnp.zeros_like, params)
    judge = lambda x, batch: {"value_fn": lambda p: p["n"] * (p["a"] + p["b"])}
    _, state = train(tx, lj.Workers(1, 2), params, [still], extra=judge)
    assert lj.diagnostics(state)[0].score.tolist() == [2 * (1 + 3), 2 * (0 + 0)]


def test_fields_of_the_optimizer_move_with_the_leader_that_peers_elect():
    base = optax.sgd(1.0, momentum=0.5)
    tx = lj.with_state(base, pulled_to(lj.leader("local", judged_by="peers")), "trace")
    x, grads = np.float32([5, 2]), np.float32([1, 3])
    judge = lambda x, batch: {"value_fn": jnp.square}
    (x,), state = train(tx, lj.Workers(1, 2), x, [grads], extra=judge)
    assert x.tolist() == [-1, -1]
    assert optax.tree.get(state, "trace").tolist() == [3, 3]


def test_errors():
    tx = lj.lsgd(judged_by="peers")
    workers = lj.Workers(1, 2, devices=jax.devices()[:1])
    x = workers.put(jnp.ones([2, 3]))
    state = workers.map(tx.init)(x)
    update = lambda f: workers.map(lambda x, s: tx.update(x, s, x, value=1.0, value_fn=f))
    with pytest.raises(ValueError, match="need `value_fn`, .* got value_fn=None"):
        update(None)(x, state)
    with pytest.raises(ValueError, match="`value_fn` must return the loss, a scalar"):
        update(lambda x: x)(x, state)
    with pytest.raises(ValueError, match="`judged_by` must be 'own', got"):
        lj.asynchronous.Pulls(tx)
