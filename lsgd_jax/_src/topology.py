"""Gossip graphs: the messages of each exchange, as rounds of permutations.

A graph changes from exchange to exchange: exchange n = 1, 2, … uses round (n - 1) mod m of
its m rounds. A pull with a period of 1 has an exchange at every step.
The edges of a round are colored, so that each color is a (partial) permutation: every
worker sends at most one message and receives at most one. A permutation is one call of
`Group.permute`.
"""

import collections
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np
import numpy.typing as npt

from lsgd_jax._src.checks import check_positive_int


Edge = tuple[int, int]  # (source, destination)
Permutation = tuple[Edge, ...]
Permutations = tuple[Permutation, ...]
Matrix = tuple[tuple[float, ...], ...]


@dataclasses.dataclass(frozen=True, repr=False)
class Topology:
    """A directed graph over W workers, in rounds. Built and checked by the functions below.

    Attributes:
      name: the name of the graph in its text form.
      num_workers: the number of workers W.
      rounds: for each round a tuple of permutations, each a tuple of edges
        (source, destination). No self-loops, and no edge twice in a round.
      weights: for each round its mixing matrix, or None for equal shares.
    """

    name: str
    num_workers: int
    rounds: tuple[Permutations, ...]
    weights: tuple[Matrix | None, ...]

    @functools.cached_property
    def out_degrees(self) -> np.ndarray:
        """The number of workers to which each worker sends: int [rounds, W]."""
        degrees = np.zeros((len(self.rounds), self.num_workers), int)
        for r, round in enumerate(self.rounds):
            for source, _ in _edges(round):
                degrees[r, source] += 1
        return degrees

    @functools.cached_property
    def mixing(self) -> np.ndarray:
        """The mixing matrices P, float [rounds, W, W].

        P[r, i, j] is the share of j's value that i receives in round r: the given weight,
        or 1 / (out-degree of j + 1) for j itself and every worker to which it sends. So
        every column sums to 1. If all rows also sum to 1, the graph is `balanced`.
        """
        matrices = np.zeros((len(self.rounds), self.num_workers, self.num_workers))
        for r, round in enumerate(self.rounds):
            given = self.weights[r]
            if given is not None:
                matrices[r] = given
                continue
            shares = 1 / (self.out_degrees[r] + 1)
            matrices[r] = np.diag(shares)
            for source, destination in _edges(round):
                matrices[r, destination, source] = shares[source]
        return matrices

    @functools.cached_property
    def kept(self) -> np.ndarray:
        """The share of its value that each worker keeps, P[r, j, j]: float [rounds, W]."""
        return np.diagonal(self.mixing, axis1=1, axis2=2)

    @functools.cached_property
    def taken(self) -> np.ndarray:
        """The sum of the shares that each worker takes of others: float [rounds, W]."""
        others = ~np.eye(self.num_workers, dtype=bool)
        return np.sum(self.mixing, axis=2, where=others)

    @functools.cached_property
    def given(self) -> np.ndarray:
        """The share that each worker sends along each permutation of a round.

        float [rounds, W, n], with n the largest number of permutations; 0 without an edge.
        """
        most = max(map(len, self.rounds))
        shares = np.zeros((len(self.rounds), self.num_workers, most))
        for r, round in enumerate(self.rounds):
            for n, permutation in enumerate(round):
                for source, destination in permutation:
                    shares[r, source, n] = self.mixing[r, destination, source]
        return shares

    @property
    def balanced(self) -> bool:
        """Whether every round's mixing matrix is doubly stochastic."""
        return bool(np.allclose(self.mixing.sum(axis=2), 1))

    @property
    def weighted(self) -> bool:
        """Whether mixing matrices were given for some rounds."""
        return any(matrix is not None for matrix in self.weights)

    @property
    def paired(self) -> bool:
        """Whether in every round each worker exchanges with at most one other worker."""
        return all(
            len(round) <= 1 and all((j, i) in _edges(round) for i, j in _edges(round))
            for round in self.rounds
        )

    @functools.cached_property
    def spectral_gap(self) -> float:
        r"""The rate at which gossip on the graph reaches consensus, per exchange.

        .. math:: 1 - |\lambda_2(P_m \cdots P_1)|^{1 / m}

        with λ₂ the eigenvalue of second largest magnitude. At 1, the m rounds compute the
        exact mean; at 0, the workers never agree.
        """
        product = functools.reduce(lambda a, b: b @ a, self.mixing)
        sizes = np.sort(np.abs(np.linalg.eigvals(product)))
        second = sizes[-2] if self.num_workers > 1 else 0.0
        # The exact mean has eigenvalues 0, computed as up to 1e-8, whose roots are large.
        second = 0.0 if second < 1e-6 else min(second, 1.0)
        return float(1 - second ** (1 / len(self.rounds)))

    def round_at(self, exchange: jax.Array) -> jax.Array:
        """The round of exchange n = 1, 2, …: int32, an index into `rounds`."""
        return (exchange - 1) % len(self.rounds)

    def __repr__(self) -> str:
        degrees = np.unique(self.out_degrees)
        sends = "-".join(map(str, sorted({degrees.min(), degrees.max()})))
        return (
            f"Topology({self.name}: {self.num_workers} workers, {len(self.rounds)} "
            f"round{'s' * (len(self.rounds) != 1)}, {sends} "
            f"peer{'s' * (sends != '1')} each, spectral gap {self.spectral_gap:.3f})"
        )

    def __str__(self) -> str:
        lines = [repr(self)]
        for r, round in enumerate(self.rounds):
            edges = " ".join(self._described(r, i, j) for i, j in sorted(_edges(round)))
            lines.append(f"  round {r}: {edges or 'no worker sends'}")
        return "\n".join(lines)

    def _described(self, r: int, i: int, j: int) -> str:
        """An edge of a round in a few characters, with its share if shares differ."""
        if not self.weighted:
            return f"{i}→{j}"
        return f"{i}→{j} ({self.mixing[r, j, i]:.3g})"


Graph = Topology | Callable[[int], Topology]


def ring(num_workers: int) -> Topology:
    """Returns a ring: every worker sends to both neighbors, at every exchange.

    >>> import lsgd_jax as lj
    >>> print(lj.topology.ring(4))
    Topology(ring: 4 workers, 1 round, 2 peers each, spectral gap 0.667)
      round 0: 0→1 0→3 1→0 1→2 2→1 2→3 3→0 3→2
    """
    check_positive_int("num_workers", num_workers)
    return _circulant("ring", num_workers, [{1, num_workers - 1}])


def exponential(num_workers: int, peers: int = 1) -> Topology:
    """Worker i sends to i + hop mod W, where hop cycles through 1, 2, 4, …, 2^(m-1).

    m = max(1, ceil(log2 W)). With one peer and W = 2^m, m exchanges give the exact mean.

    Args:
      num_workers: W, any number.
      peers: the number of workers to which each worker sends per exchange. Each exchange
        uses that many hops, and the next one continues with the following hops.

    Raises:
      ValueError: more peers than there are hops.

    >>> import lsgd_jax as lj
    >>> lj.topology.exponential(6).out_degrees.tolist()
    [[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1]]
    """
    check_positive_int("num_workers", num_workers)
    check_positive_int("peers", peers)
    hops = [2**k for k in range(max(1, math.ceil(math.log2(num_workers))))]
    if peers > len(hops):
        raise ValueError(
            f"`peers` must be at most {len(hops)}, the number of hops of an exponential "
            f"graph of {num_workers} workers, got {peers=}"
        )
    count = math.lcm(len(hops), peers) // peers
    rounds = [
        {hops[(r * peers + k) % len(hops)] for k in range(peers)} for r in range(count)
    ]
    name = "exponential" if peers == 1 else f"exponential ({peers} peers)"
    return _circulant(name, num_workers, rounds)


def bipartite_exponential(num_workers: int) -> Topology:
    """Pairs even with odd workers: i with i + hop, where hop = 1, 3, 5, 9, 17, ….

    With an odd number of workers, one of them has no partner in each round.

    >>> import lsgd_jax as lj
    >>> print(lj.topology.bipartite_exponential(4))
    Topology(bipartite exponential: 4 workers, 2 rounds, 1 peer each, spectral gap 1.000)
      round 0: 0→1 1→0 2→3 3→2
      round 1: 0→3 1→2 2→1 3→0
    """
    check_positive_int("num_workers", num_workers)
    even = num_workers + num_workers % 2  # the extra worker is a placeholder
    hops = [1, *(2**k + 1 for k in range(1, even.bit_length()) if 2**k + 1 < even)]
    rounds = []
    for hop in hops:
        pairs = [(i, (i + hop) % even) for i in range(0, even, 2)]
        there = [pair for pair in pairs if max(pair) < num_workers]
        rounds.append(there + [(j, i) for i, j in there])
    return _build("bipartite exponential", num_workers, rounds)


def complete(num_workers: int) -> Topology:
    """Returns a complete graph: every worker sends to all others, at every exchange.

    >>> import lsgd_jax as lj
    >>> lj.topology.complete(3).spectral_gap
    1.0
    """
    check_positive_int("num_workers", num_workers)
    return _circulant("complete", num_workers, [set(range(1, num_workers))])


def matchings(num_workers: int, rounds: int = 16, seed: int = 0) -> Topology:
    """Workers meet in random pairs, drawn anew for each of so many rounds.

    With an odd number of workers one of them sits out in each round. A compiled program
    holds up to ceil(log2 W) + 1 different rounds of a graph as branches. Of more rounds it
    holds none: a message then travels twice, in W parts, one through each worker.

    >>> import lsgd_jax as lj
    >>> print(lj.topology.matchings(4, rounds=2))
    Topology(matchings: 4 workers, 2 rounds, 1 peer each, spectral gap 1.000)
      round 0: 0→3 1→2 2→1 3→0
      round 1: 0→2 1→3 2→0 3→1
    """
    check_positive_int("num_workers", num_workers)
    check_positive_int("rounds", rounds)
    rng = np.random.default_rng(seed)
    half = num_workers // 2
    edges = list[list[Edge]]()
    for _ in range(rounds):
        order = rng.permutation(num_workers).tolist()
        met = list(zip(order[:half], order[half : 2 * half]))
        edges.append(met + [(j, i) for i, j in met])
    return _build("matchings", num_workers, edges)


def from_edges(
    rounds: Sequence[Iterable[Edge]],
    num_workers: int | None = None,
    weights: npt.ArrayLike | None = None,
) -> Topology:
    """Returns the graph with the given edges.

    Args:
      rounds: for each round its edges (source, destination), as indices of workers.
        Out-degrees may differ between workers and between rounds.
      num_workers: the number of workers W. Defaults to one more than the largest index.
      weights: for each round its mixing matrix P, [rounds, W, W]. P[i, j] is the share of
        j's value that i receives, and P[j, j] > 0 the share that j keeps. Each column sums
        to 1; for D-PSGD also each row. Defaults to equal shares, 1 / (out-degree + 1).

    Raises:
      ValueError: no rounds, a round without edges for more than one worker, a self-loop,
        an edge twice in a round, an index outside 0..W-1; weights of another shape, a
        weight that is negative, not finite or not on an edge, a worker that keeps nothing,
        a column that does not sum to 1.

    >>> import lsgd_jax as lj
    >>> print(lj.topology.from_edges([[(0, 1), (0, 2), (1, 0), (2, 0)]]))
    Topology(from edges: 3 workers, 1 round, 1-2 peers each, spectral gap 0.500)
      round 0: 0→1 0→2 1→0 2→0
    >>> P = [[0.9, 0.5], [0.1, 0.5]]  # worker 0 sends a tenth of its weight, worker 1 half
    >>> print(lj.topology.from_edges([[(0, 1), (1, 0)]], weights=[P]))
    Topology(from edges: 2 workers, 1 round, 1 peer each, spectral gap 0.600)
      round 0: 0→1 (0.1) 1→0 (0.5)
    """
    edges = [[(int(i), int(j)) for i, j in round] for round in rounds]
    if not edges:
        raise ValueError(f"`rounds` must hold at least one round, got {rounds=}")
    for r, round in enumerate(edges):
        if not round and num_workers != 1:
            raise ValueError(f"every round must have an edge, got none in round {r}")
    if num_workers is None:
        num_workers = 1 + max(index for round in edges for edge in round for index in edge)
    check_positive_int("num_workers", num_workers)
    graph = _build("from edges", num_workers, edges)
    if weights is None:
        return graph
    matrices = np.asarray(weights, np.float64)
    _check_weights(matrices, graph)
    return dataclasses.replace(graph, weights=_as_tuples(matrices))


def metropolis(edges: Iterable[Edge], num_workers: int | None = None) -> Topology:
    r"""Returns an undirected graph with Metropolis-Hastings weights, doubly stochastic.

    .. math::
      P_{ij} = \frac{1}{1 + \max(d_i, d_j)} \ \text{on each edge}, \qquad
      P_{ii} = 1 - \sum_{j \ne i} P_{ij},

    with d_i the number of neighbors of worker i. So D-PSGD runs on any undirected graph,
    also with unequal degrees.

    Args:
      edges: pairs of neighbors, as indices of workers; messages travel in both directions.
      num_workers: the number of workers W. Defaults to one more than the largest index.

    Raises:
      ValueError: as for `from_edges`.

    Reference: Xiao, Boyd, Lall, A Scheme for Robust Distributed Sensor Fusion Based on
    Average Consensus, IPSN 2005, section III.

    >>> import lsgd_jax as lj
    >>> print(lj.topology.metropolis([(0, 1), (0, 2), (0, 3)]))
    Topology(metropolis: 4 workers, 1 round, 1-3 peers each, spectral gap 0.250)
      round 0: 0→1 (0.25) 0→2 (0.25) 0→3 (0.25) 1→0 (0.25) 2→0 (0.25) 3→0 (0.25)
    """
    joined = {(i, j) for a, b in edges for i, j in ((a, b), (b, a))}
    graph = from_edges([sorted(joined)], num_workers)
    degrees = graph.out_degrees[0]
    P = np.zeros((graph.num_workers, graph.num_workers))
    for i, j in joined:
        P[i, j] = 1 / (1 + max(degrees[i], degrees[j]))
    P += np.diag(1 - P.sum(axis=1))
    return dataclasses.replace(graph, name="metropolis", weights=_as_tuples(P[None]))


def for_group(
    topology: Graph, check: Callable[[Topology], None] = lambda topology: None
) -> Callable[[int], Topology]:
    """Returns the graph as a function of the number of workers, known only while tracing.

    Args:
      topology: a graph, or a function such as `ring` that builds it for W workers.
      check: raises ValueError for a wrong graph. It runs at once if `topology` is a graph.
    """
    if isinstance(topology, Topology):
        check(topology)

    @functools.cache  # a large graph takes seconds
    def build(num_workers: int) -> Topology:
        graph = topology if isinstance(topology, Topology) else topology(num_workers)
        if graph.num_workers != num_workers:
            raise ValueError(
                f"`topology` must be a graph of {num_workers} workers, got {graph!r}"
            )
        check(graph)
        return graph

    return build


def check_balanced(topology: Topology) -> None:
    """Raises ValueError unless the mixing matrices are doubly stochastic."""
    if not topology.balanced:
        raise ValueError(
            "`topology` must be balanced: its mixing matrices must be doubly stochastic "
            "(with equal weights, each worker receives as many messages as it sends), "
            f"got {topology!r}; `sgp` takes any graph"
        )


def check_paired(topology: Topology) -> None:
    """Raises ValueError unless the workers exchange in pairs."""
    if not topology.paired:
        raise ValueError(
            "`topology` must pair the workers: in every round each worker exchanges with "
            f"at most one other, in both directions; got {topology!r}"
        )


def check_one_peer(topology: Topology) -> None:
    """Raises ValueError unless each worker sends and receives at most once in a round."""
    if any(len(round) > 1 for round in topology.rounds):
        raise ValueError(
            "`topology` must have one peer: in every round each worker sends to at most "
            f"one and receives from at most one; got {topology!r}"
        )
    if topology.weighted:
        raise ValueError(
            "`topology` must have no `weights`, because the method weighs its messages "
            f"itself; got {topology!r}"
        )


def _circulant(name: str, num_workers: int, rounds: Sequence[set[int]]) -> Topology:
    """The graph in which i sends to i + hop mod W for each hop of a round."""
    if num_workers == 1:
        return _build(name, num_workers, [[]])
    edges = [
        [(i, (i + hop) % num_workers) for hop in sorted(hops) for i in range(num_workers)]
        for hops in rounds
    ]
    return _build(name, num_workers, edges)


def _build(name: str, num_workers: int, rounds: Sequence[Sequence[Edge]]) -> Topology:
    """Checks the edges and colors them."""
    for r, edges in enumerate(rounds):
        for edge in edges:
            if not all(0 <= index < num_workers for index in edge):
                raise ValueError(
                    f"edges must join workers in 0..{num_workers - 1}, got {edge} in "
                    f"round {r}"
                )
            if edge[0] == edge[1]:
                raise ValueError(
                    f"a worker must not send to itself, got {edge} in round {r}"
                )
        if len(set(edges)) < len(edges):
            twice = sorted({edge for edge in edges if list(edges).count(edge) > 1})
            raise ValueError(f"an edge may occur once in a round, got {twice} in round {r}")
    colored = tuple(_color(edges, num_workers) for edges in rounds)
    m = len(colored)
    return Topology(name, num_workers, colored, weights=(None,) * m)


def _as_tuples(matrices: np.ndarray) -> tuple[Matrix, ...]:
    return tuple(tuple(map(tuple, matrix)) for matrix in matrices.tolist())


def _check_weights(matrices: np.ndarray, graph: Topology) -> None:
    """Raises ValueError unless the mixing matrices are column-stochastic on the edges."""
    shape = len(graph.rounds), graph.num_workers, graph.num_workers
    if matrices.shape != shape:
        raise ValueError(
            f"`weights` must be one matrix [W, W] per round, {shape}, got {matrices.shape}"
        )
    for r, (round, P) in enumerate(zip(graph.rounds, matrices)):
        if not (P >= 0).all():
            raise ValueError(
                f"`weights` must be finite and at least 0, got {P.min()} in round {r}"
            )
        kept = P.diagonal()
        if not kept.all():
            raise ValueError(
                "every worker must keep a share of its own, P[j, j] > 0, got 0 for worker "
                f"{int(kept.argmin())} in round {r}"
            )
        joined = np.eye(graph.num_workers, dtype=bool)
        for source, destination in _edges(round):
            joined[destination, source] = True
        if (P[~joined] > 0).any():
            i, j = map(int, np.argwhere(~joined & (P > 0))[0])
            raise ValueError(
                f"`weights` must be 0 without an edge, got P[{i}, {j}] = {P[i, j]} without "
                f"the edge ({j}, {i}) in round {r}"
            )
        sums = P.sum(axis=0)
        if not np.allclose(sums, 1, rtol=0, atol=1e-6):
            j = int(np.abs(sums - 1).argmax())
            raise ValueError(
                f"every column of `weights` must sum to 1, got {sums[j]} in column {j} of "
                f"round {r}"
            )


def _edges(round: Permutations) -> list[Edge]:
    return [edge for permutation in round for edge in permutation]


def _color(edges: Sequence[Edge], num_workers: int) -> Permutations:
    """Colors the edges: as many partial permutations as the largest degree (König).

    Every edge takes the lowest color that is free at both its ends. If there is none, let
    a be free at its source and b at its destination. Swapping a and b along the path of
    these two colors that starts at the destination frees a there. The path cannot reach the
    source, so a stays free at the source.
    """
    nodes = [(side, i) for side in ("source", "destination") for i in range(num_workers)]
    at: dict[tuple[str, int], dict[int, Edge]] = {node: {} for node in nodes}

    def ends(edge: Edge) -> tuple[tuple[str, int], tuple[str, int]]:
        return ("source", edge[0]), ("destination", edge[1])

    counts = collections.Counter(end for edge in edges for end in ends(edge))
    degree = max(counts.values(), default=0)

    def free(*nodes: tuple[str, int]) -> list[int]:
        return [c for c in range(degree) if all(c not in at[node] for node in nodes)]

    # Edges with the same hop form a permutation. In this order they share a color.
    for edge in sorted(edges, key=lambda e: ((e[1] - e[0]) % num_workers, e)):
        source, node = ends(edge)
        common = free(source, node)
        here = (common or free(source))[0]
        other = (common or free(node))[0]
        at[source][here] = edge
        # The edge takes the color from another edge at this node, which takes the other
        # color, and so on along the path.
        while here in at[node]:
            displaced = at[node][here]
            at[node][here] = edge
            at[node][other] = displaced
            near, far = ends(displaced)
            edge = displaced
            node = far if node == near else near
            del at[node][here]
            here, other = other, here
        at[node][here] = edge
    sent = [at["source", i] for i in range(num_workers)]
    return tuple(tuple(used[c] for used in sent if c in used) for c in range(degree))
