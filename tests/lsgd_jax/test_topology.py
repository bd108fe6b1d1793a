"""Gossip graphs: their edges, colors, spectral gaps and errors."""

import math

import numpy as np
import pytest
from harness import exchanged

import lsgd_jax as lj
from lsgd_jax._src import topology


BUILDERS = {
    "ring": topology.ring,
    "exponential": topology.exponential,
    "bipartite_exponential": topology.bipartite_exponential,
    "complete": topology.complete,
}


def edges(round):
    return sorted(edge for permutation in round for edge in permutation)


def check_round(round, num_workers):
    """Asserts that there are no self-loops and no edge twice, only partial permutations."""
    joined = edges(round)
    assert len(set(joined)) == len(joined)
    assert all(i != j for i, j in joined)
    assert all(0 <= i < num_workers for edge in joined for i in edge)
    for permutation in round:
        for side in zip(*permutation):
            assert len(set(side)) == len(side)


@pytest.mark.parametrize("num_workers", range(1, 13))
@pytest.mark.parametrize("name", BUILDERS)
def test_every_number_of_workers(name, num_workers):
    graph = BUILDERS[name](num_workers)
    for round in graph.rounds:
        check_round(round, num_workers)
    assert graph.balanced
    np.testing.assert_allclose(graph.mixing.sum(axis=1), 1)
    # In the long run, every worker's value reaches every other worker.
    assert graph.spectral_gap > 0.05
    assert str(num_workers) in str(graph)


def test_exponential_hops():
    rounds = topology.exponential(8).rounds
    assert [edges(round)[0] for round in rounds] == [(0, 1), (0, 2), (0, 4)]
    assert len(topology.exponential(5).rounds) == 3
    two = topology.exponential(8, peers=2)
    assert [edges(round)[:2] for round in two.rounds] == [
        [(0, 1), (0, 2)],
        [(0, 1), (0, 4)],
        [(0, 2), (0, 4)],
    ]
    assert (two.out_degrees == 2).all()


@pytest.mark.parametrize("num_workers", [2, 3, 4, 7, 8])
def test_bipartite_pairs_are_mutual_and_alternate(num_workers):
    graph = topology.bipartite_exponential(num_workers)
    assert graph.paired
    for round in graph.rounds:
        assert len(edges(round)) == num_workers - num_workers % 2
        if num_workers % 2 == 0:
            assert all((i + j) % 2 for i, j in edges(round))
    assert not topology.exponential(4).paired


@pytest.mark.parametrize("num_workers", [3, 4, 8])
def test_spectral_gaps_have_their_known_values(num_workers):
    known = 1 - abs(1 / 3 + 2 / 3 * math.cos(2 * math.pi / num_workers))
    assert topology.ring(num_workers).spectral_gap == pytest.approx(known)
    assert topology.complete(num_workers).spectral_gap == pytest.approx(1)
    apart = topology.from_edges([[(0, 1), (1, 0)]], num_workers)
    assert apart.spectral_gap == pytest.approx(0)


def test_unequal_degrees():
    star = topology.from_edges([[(0, 1), (0, 2), (0, 3), (1, 0), (2, 0), (3, 0)]])
    assert star.num_workers == 4
    assert star.out_degrees.tolist() == [[3, 1, 1, 1]]
    assert star.mixing[0, :, 0].tolist() == [0.25] * 4
    assert not star.balanced
    names = [topology.exponential(4, peers).name for peers in (1, 2)]
    assert names == ["exponential", "exponential (2 peers)"]
    assert topology.from_edges([[]], num_workers=1).out_degrees.tolist() == [[0]]


# Columns sum to 1; rows do not.
PUSH = [[0.5, 0.2, 0.0], [0.3, 0.8, 0.4], [0.2, 0.0, 0.6]]
PUSHED = [(0, 1), (0, 2), (1, 0), (2, 1)]


def test_weights_are_the_mixing_matrix():
    graph = topology.from_edges([PUSHED], weights=[PUSH])
    np.testing.assert_array_equal(graph.mixing[0], PUSH)
    assert graph.weighted and not graph.balanced
    # The other eigenvalues have the sum 0.9 and the product 0.22.
    assert graph.spectral_gap == pytest.approx(1 - math.sqrt(0.22))
    assert "0→1 (0.3) 0→2 (0.2) 1→0 (0.2) 2→1 (0.4)" in str(graph)
    twice = topology.from_edges([PUSHED] * 2, weights=np.array([PUSH] * 2))
    assert twice.spectral_gap == pytest.approx(graph.spectral_gap)
    assert graph == topology.from_edges([PUSHED], weights=[PUSH])
    assert len({graph, topology.from_edges([PUSHED])}) == 2


def test_given_equal_shares_are_the_default():
    default = topology.from_edges([PUSHED])
    given = topology.from_edges([PUSHED], weights=default.mixing)
    np.testing.assert_array_equal(given.mixing, default.mixing)
    assert given.spectral_gap == default.spectral_gap
    # Each permutation of a round has its own weights, 0 for workers that do not send in it.
    np.testing.assert_allclose(given.given.sum(axis=2) + given.kept, 1)
    assert (given.given[0] > 0).sum(axis=1).tolist() == given.out_degrees[0].tolist()


def test_metropolis_weights():
    """A path of three workers and one more at its middle: degrees 1, 3, 1, 1."""
    star = topology.metropolis([(1, 0), (1, 2), (3, 1)])
    quarter = [[3, 1, 0, 0], [1, 1, 1, 1], [0, 1, 3, 0], [0, 1, 0, 3]]
    np.testing.assert_allclose(star.mixing[0] * 4, quarter)
    assert star.balanced and star.weighted
    assert star.spectral_gap == pytest.approx(1 / 4)  # eigenvalues 1, 3/4, 3/4, 0
    both = topology.metropolis([(1, 0), (0, 1), (1, 2), (1, 3)])
    assert both == star
    # With equal degrees they are the equal shares.
    ring = topology.metropolis([(i, (i + 1) % 5) for i in range(5)])
    np.testing.assert_allclose(ring.mixing, topology.ring(5).mixing)


def weigh(*weights, edges=PUSHED):
    return topology.from_edges([edges], weights=weights)


EXPONENTIAL = topology.exponential(8)


@pytest.mark.parametrize(
    "rule, every, delay",
    [
        pytest.param(lj.rules.neighbors(EXPONENTIAL), 1, 0, marks=pytest.mark.slow),
        (lj.rules.neighbors(EXPONENTIAL), 3, 2),
        pytest.param(lj.rules.butterfly(2), 2, 0, marks=pytest.mark.slow),
        (lj.sgp(EXPONENTIAL).pulls[0].rule, 3, 0),
        pytest.param(lj.sgp(EXPONENTIAL).pulls[0].rule, 6, 0, marks=pytest.mark.slow),
    ],
)
def test_the_round_is_that_of_the_exchange(rule, every, delay):
    """Three exchanges give the exact mean, whatever the number of steps between them."""
    tx = lj.exchange(lj.Pull(rule, 1.0, every=every, delay=delay))
    x = np.arange(8.0, dtype=np.float32)[:, None]
    got, _ = exchanged(tx, lj.Workers(2, 4), x, steps=3 * every)
    np.testing.assert_allclose(got, np.full([8, 1], 3.5), rtol=1e-6)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: topology.ring(0), "`num_workers` must be a positive int"),
        (lambda: topology.complete(2.5), "`num_workers` must be a positive int"),
        (lambda: topology.exponential(8, peers=0), "`peers` must be a positive int"),
        (lambda: topology.exponential(8, peers=4), "`peers` must be at most 3"),
        (lambda: topology.from_edges([]), "at least one round"),
        (lambda: topology.from_edges([[(0, 1)], []]), "none in round 1"),
        (lambda: topology.from_edges([[(0, 1), (1, 1)]]), "must not send to itself"),
        (lambda: topology.from_edges([[(0, 1), (0, 1)]]), "may occur once in a round"),
        (lambda: topology.from_edges([[(0, 4)]], 4), r"workers in 0\.\.3"),
        (lambda: topology.from_edges([[(0, -1)]], 4), r"workers in 0\.\.3"),
        (lambda: weigh(PUSH, PUSH), r"per round, \(1, 3, 3\), got \(2, 3, 3\)"),
        (lambda: weigh([[1.1, 0], [-0.1, 1]], edges=[(0, 1)]), "at least 0, got -0.1"),
        (lambda: weigh([[np.nan, 0], [0, 1]], edges=[(0, 1)]), "must be finite"),
        (lambda: weigh([[0, 0], [1, 1]], edges=[(0, 1)]), "got 0 for worker 0 in round 0"),
        (lambda: weigh(PUSH, edges=PUSHED[:3] + [(1, 2)]), r"P\[1, 2\] = 0.4 without"),
        (lambda: weigh([[0.5, 0], [0.2, 1]], edges=[(0, 1)]), "to 1, got 0.7 in column 0"),
        (lambda: topology.metropolis([(0, 0)]), "must not send to itself"),
        (lambda: topology.metropolis([(0, 4)], 4), r"workers in 0\.\.3"),
        (lambda: topology.metropolis([]), "none in round 0"),
    ],
)
def test_refuses(build, message):
    with pytest.raises(ValueError, match=message):
        build()
