"""The workers and points that a landscape shows."""

import dataclasses
import io
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from landscapes import QUICK, but

import lsgd_jax as lj
from paper.landscape import plots
from paper.landscape.cli import LandscapeOptions
from paper.landscape.compute import compute_landscape
from paper.landscape.points import Points, leaders_of


def level(leader, score, axes):
    return SimpleNamespace(leader=leader, score=score, axes=axes)


def test_leaders_by_the_last_election_or_by_scores():
    scores = np.array([4.0, 1.0, 3.0, 2.0, 9.0, 0.5])  # 2 nodes of 3 workers
    of_node = level(np.array([1, 1, 1, 2, 2, 2]), scores, ("local",))
    of_all = level(np.array([5] * 6), scores, ("node", "local"))
    both = lambda worker: leaders_of(worker, [of_node, of_all], scores, nodes=2)
    assert both(0) == [("leader of node 0", 1), ("leader of all", 5)]
    assert both(3) == [("leader of node 1", 5), ("leader of all", 5)]
    never = level(np.full(6, -1), scores, ("local",))
    assert leaders_of(2, [never], scores, nodes=2) == [("leader of node 0", 1)]
    one = level(np.array([3] * 6), scores, ("local",))
    assert leaders_of(2, [one, one], scores, nodes=1) == [("leader", 3)]
    assert leaders_of(2, [level(None, None, ("local",))], scores, nodes=2) == []


def test_the_worst_worker_that_does_not_lead_is_shown(saved, monkeypatch):
    """Worker 1 still leads its node, although its losses are now the worst."""
    scores = np.array([np.inf, 9.0, 3.0, 1.0])
    node, everyone = lj.diagnostics(saved.state.opt_state)
    pulls = [
        dataclasses.replace(node, leader=np.array([1, 1, 1, 1]), score=scores),
        dataclasses.replace(everyone, leader=np.full(4, 3), score=scores),
    ]
    monkeypatch.setattr(lj, "diagnostics", lambda opt_state: pulls)
    assert Points(saved, None).worker == 2
    assert Points(saved, 1).roles == [("leader of node 0", 1), ("leader of all", 3)]


def test_workers_with_nonfinite_parameters_are_not_chosen(saved):
    worker = Points(saved, None).worker
    poisoned = jax.tree.map(lambda x: x.at[worker].set(jnp.nan), saved.state.params)
    sick = saved.state._replace(params=lj.Workers(2, 2).put(poisoned))
    ill = but(saved, state=sick)
    with pytest.raises(ValueError, match=f"`worker` must have finite .* got {worker=}"):
        Points(ill, worker)
    options = LandscapeOptions(saved.folder, **QUICK, path_steps=0)
    result = compute_landscape(ill, options, lambda line: None)
    assert result.worker != worker and np.isnan(result.positions[worker]).all()
    assert np.isfinite(result.maps[0].loss).all()
    plots.draw(result, io.BytesIO(), "test")
    diverged = jax.tree.map(lambda x: x * jnp.nan, saved.state.params)
    with pytest.raises(ValueError, match="no worker has finite parameters at step 12"):
        Points(but(saved, state=saved.state._replace(params=diverged)), None)
    with pytest.raises(ValueError, match="`worker` must be in 0..3, got worker=-1"):
        Points(saved, -1)
