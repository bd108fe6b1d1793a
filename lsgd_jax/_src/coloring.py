"""Edge coloring: the edges of a graph as few permutations, each one call to `permute`."""

from collections.abc import Sequence


Edge = tuple[int, int]  # (source, destination)
Permutation = tuple[Edge, ...]
Round = tuple[Permutation, ...]


def color(edges: Sequence[Edge], num_workers: int) -> Round:
    """The edges in as few partial permutations (colors) as the largest degree (König).

    Every edge takes the lowest color that is free at both its ends. If there is none, let
    a be free at its source and b at its destination: exchanging a and b along the path of
    those colors that leaves the destination frees a there, and changes nothing at the
    source, which the path cannot reach.
    """
    nodes = [(side, i) for side in ("source", "destination") for i in range(num_workers)]
    at: dict[tuple[str, int], dict[int, Edge]] = {node: {} for node in nodes}
    ends = lambda edge: (("source", edge[0]), ("destination", edge[1]))
    degree = max((sum(end in ends(e) for e in edges) for end in nodes), default=0)

    def free(*nodes: tuple[str, int]) -> int | None:
        fits = lambda c: all(c not in at[node] for node in nodes)
        return next(filter(fits, range(degree)), None)

    # Edges of one hop form a permutation: taken in that order they share a color.
    for edge in sorted(edges, key=lambda e: ((e[1] - e[0]) % num_workers, e)):
        source, destination = ends(edge)
        chosen = free(source, destination)
        if chosen is None:
            a, b = free(source), free(destination)
            assert a is not None and b is not None  # neither end has all its edges yet
            path, node, here, other = [], destination, a, b
            while here in at[node]:
                step = at[node][here]
                path.append((step, other))
                near, far = ends(step)
                node, here, other = (far if node == near else near), other, here
            for step, new in path:
                for end in ends(step):
                    if at[end].get(a + b - new) == step:
                        del at[end][a + b - new]
            for step, new in path:
                for end in ends(step):
                    at[end][new] = step
            chosen = a
        at[source][chosen] = at[destination][chosen] = edge
    sent = [at["source", i] for i in range(num_workers)]
    return tuple(tuple(used[c] for used in sent if c in used) for c in range(degree))
