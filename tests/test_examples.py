"""The examples do what the documentation says."""

import jax
import numpy as np
import optax
import pytest
from harness import train
from outside import ROOT, loaded
from toys import slow

import lsgd_jax as lj


def load(name):
    return loaded(ROOT / "examples" / f"{name}.py")


@pytest.fixture(scope="module")
def example():
    return load("pull_to_the_median_worker")


@pytest.mark.slow
def test_the_median_worker_is_followed(example):
    goals, x, expected = np.arange(1.0, 9.0), np.zeros(8), []
    for t in range(1, 21):
        losses = 3 * (x - goals) ** 2
        x = x - 0.2 * (x - goals)
        if t % 4 == 0:
            expected.append(int(np.argsort(losses)[3]))
            x += 0.5 * (x[expected[-1]] - x)
    followed, sent = example.main()
    assert followed == expected and len(set(followed)) > 1
    assert (sent.exchanges, sent.payload, sent.bytes_sent) == (5, 4 + 12, 80)


def test_a_nonfinite_worker_is_not_followed(example):
    """The kernel adds restoring, parts and delays, which the rule does not mention."""
    workers = lj.Workers(1, 3)
    rule = example.median_worker("local")
    part = lambda path: path == "a"
    tx = lj.exchange(lj.Pull(rule, 1.0, every=3, offset=2, delay=1, part=part))

    x = {k: np.array([np.nan, 1.0, 2.0], np.float32) for k in "ab"}
    still = {k: np.zeros(3, np.float32) for k in "ab"}
    seen, state = train(tx, workers, x, [still] * 3, [[2.0, 1.0, 3.0]] * 3)
    # Sent at t = 1, taken at t = 2; of the two that are finite worker 1 is the median.
    np.testing.assert_array_equal([x["a"][1] for x in seen], [1, 1, 1])
    np.testing.assert_array_equal([x["a"][2] for x in seen], [2, 1, 1])
    np.testing.assert_array_equal(seen[1]["a"], [1, 1, 1])
    np.testing.assert_array_equal(seen[2]["b"], [np.nan, 1, 2])
    assert workers.fetch(state).pulls[0].rule.followed.value == 1


def test_the_page_on_rules_shows_the_rule_of_the_example():
    page = (ROOT / "docs" / "writing_a_rule.md").read_text()
    rule = (ROOT / "examples/pull_to_the_median_worker.py").read_text()
    rule = rule.partition("class MedianState")[2].partition("def main")[0]
    assert "class MedianState" + rule.rstrip() in page


@pytest.mark.slow
def test_shard_map_and_vmap_agree_under_custom_axes():
    in_shard_map, in_vmap, in_pmap = load("without_workers").main()
    np.testing.assert_allclose(in_shard_map, in_vmap, rtol=1e-5, atol=1e-6)
    assert np.ptp(in_vmap, axis=0).min() > 1  # workers have goals of their own
    assert in_pmap.shape == (8, 3) and np.ptp(in_pmap, axis=0).max() < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize("name", ["injected", "muon", "schedule_free"])
def test_training_with_optax_wrappers(name):
    module = load("optax_wrappers")
    losses, params, state = module.train(module.CHAINS[name]())
    assert losses[-5:].mean() < 0.8 * losses[:5].mean()
    assert not any(int(pull.misplaced.sum()) for pull in lj.diagnostics(state))
    if name == "schedule_free":  # the workers were averaged at the last step
        z = optax.tree.get(state, "z")
        assert all(np.ptp(x, axis=0).max() < 1e-6 for x in jax.tree.leaves((params, z)))


@pytest.mark.slow
def test_diloco_with_a_leader_moves_its_anchor_to_the_leader():
    example = load("combined_methods")
    method = example.diloco_leader(2, optax.sgd(0.5), loss_window=1)
    seen, (pull,) = example.train(method, steps=6)
    x, anchor = np.zeros(4), 0.0
    for t in range(1, 7):
        losses = (x - example.GOALS) ** 2
        x = x - 0.2 * (x - example.GOALS)
        if t % 2 == 0:
            leader = np.argmin(losses)
            anchor -= 0.5 * (anchor - x[leader])
            x = np.full(4, anchor)
        np.testing.assert_allclose(seen[t - 1], x, rtol=1e-5)
    assert pull.leader.tolist() == [leader] * 4 and pull.exchanges == 3


@pytest.mark.slow
def test_two_levels_pull_inside_nodes_and_across():
    example = load("combined_methods")
    method = example.two_levels(0.25, 2, 4, optax.sgd(0.5), loss_window=1)
    seen, pulls = example.train(method, steps=8)
    x, anchors = np.zeros(4), np.zeros(2)
    for t in range(1, 9):
        losses = ((x - example.GOALS) ** 2).reshape(2, 2)
        x = x - 0.2 * (x - example.GOALS)
        if t % 2 == 0:
            grid = x.reshape(2, 2)
            leaders = grid[[0, 1], losses.argmin(axis=1)]
            x = (grid - 0.25 * (grid - leaders[:, None])).ravel()
        if t % 4 == 0:
            anchors -= 0.5 * (anchors - x.reshape(2, 2).mean(axis=0))
            x = np.tile(anchors, 2)
        np.testing.assert_allclose(seen[t - 1], x, rtol=1e-5)
    assert [pull.axes for pull in pulls] == [("local",), ("node",)]


# Of the one-bit mean 800 steps; the test below it is the same in small.
@pytest.mark.parametrize("name", ["combined_methods", slow("one_bit_mean")])
def test_an_example_prints_what_its_docstring_shows(name, capsys):
    example = load(name)
    example.main()
    printed = capsys.readouterr().out.splitlines()
    assert [f"    {line}" for line in printed] == example.__doc__.splitlines()[-2:]


def test_one_bit_per_parameter_learns_and_keeps_workers_equal():
    """300 weights are 38 bytes and 10 biases 2; two scales and a bool make 49."""
    example = load("one_bit_mean")
    rule = lj.Pull(example.one_bit_mean(), strength=1.0, every=4)
    params, payload, loss = example.train(lj.exchange(rule), steps=100)
    assert payload == 38 + 2 + 2 * 4 + 1
    assert loss < 34.6 / 10  # of the first step
    for leaf in jax.tree.leaves(params):
        np.testing.assert_allclose(leaf - leaf[0][None], 0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("graph", ["ring", "exponential", "complete"])
def test_gossip_graphs_are_drawn(graph, tmp_path):
    for workers in (1, 8):
        load("gossip_graphs").main(graph, workers, tmp_path / "graph.png")
        assert (tmp_path / "graph.png").read_bytes()[:4] == b"\x89PNG"
