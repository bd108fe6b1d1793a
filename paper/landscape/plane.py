"""A plane through points of parameter space: its directions, coordinates, and a grid on it.

Points are flat vectors [P], as `jax.flatten_util.ravel_pytree` makes them of parameters.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import lsgd_jax as lj


# Rounding to float32 can move a point by this share of its norm.
SAME_POINT = 1e-5
# Below this relative distance from the span, rounding dominates the direction.
SAME_LINE = 1e-3

Vector = np.ndarray | Array


def flat(params: Any) -> np.ndarray:
    """Returns the parameters of one model as a vector [P] on the host."""
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(params)])


class Plane(NamedTuple):
    """The points o + a u + b v.

    Attributes:
      origin: o [P].
      basis: u and v, orthonormal, [2, P].
    """

    origin: Vector
    basis: Vector


def through(
    origin: np.ndarray, candidates: Iterable[tuple[str, np.ndarray]]
) -> tuple[Plane, dict[str, np.ndarray]]:
    r"""Returns the plane through o and the first two candidates that span one with it.

    Gram-Schmidt: with :math:`d = z - o` for a candidate z and the directions e_k so far,

    .. math:: r = d - \sum_k \langle d, e_k \rangle e_k, \qquad e = r / \|r\|.

    A candidate is skipped if it is not finite, equals o up to rounding, or lies on the line
    found before. The first direction points from o to the first candidate taken, whose
    coordinates are (‖d‖, 0).

    Args:
      origin: o [P].
      candidates: names and points z [P], taken one by one until two are found.

    Returns:
      The plane in float64, and the coordinates (a, b) of the two candidates by their names.

    Raises:
      ValueError: the candidates span no plane.

    >>> o, x, y = np.zeros(3), np.array([2.0, 0, 0]), np.array([1.0, 1, 0])
    >>> plane, taken = through(o, [("o", o), ("x", x), ("2 x", 2 * x), ("y", y)])
    >>> {name: place.tolist() for name, place in taken.items()}
    {'x': [2.0, 0.0], 'y': [1.0, 1.0]}
    >>> plane.basis.tolist()
    [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    """
    origin = np.asarray(origin, np.float64)
    nearest = SAME_POINT * np.linalg.norm(origin)
    basis = np.zeros([0, origin.size])
    taken = {}
    for name, point in candidates:
        direction = np.asarray(point, np.float64) - origin
        length = np.linalg.norm(direction)
        rest = direction - (basis @ direction) @ basis
        new = np.linalg.norm(rest)
        if length > nearest and new > SAME_LINE * length and np.isfinite(new):
            basis = np.vstack([basis, rest / new])
            taken[name] = direction
        if len(taken) == 2:
            return Plane(origin, basis), {k: basis @ d for k, d in taken.items()}
    raise ValueError(f"two directions make a plane, got {len(taken)}")


def coordinates(plane: Plane, point: Vector) -> Array:
    """Returns [a, b, distance from the plane] of a point [P].

    >>> plane = Plane(jnp.zeros(3), jnp.eye(3)[:2])
    >>> coordinates(plane, jnp.array([3.0, 4.0, -2.0])).tolist()
    [3.0, 4.0, 2.0]
    """
    gap = point - plane.origin
    # Not matrix products, which some devices round to fewer bits.
    along = jnp.sum(plane.basis * gap[None], axis=1)
    off = gap - jnp.sum(along[:, None] * plane.basis, axis=0)
    return jnp.append(along, jnp.sqrt(jnp.sum(jnp.square(off))))


def point_at(plane: Plane, place: Vector) -> Vector:
    """Returns the point o + a u + b v [P] at the coordinates (a, b)."""
    return plane.origin + place[0] * plane.basis[0] + place[1] * plane.basis[1]


def filterwise_random(seed: int, params: Any) -> Any:
    """Returns a random direction whose filters have the norms of the parameters' filters.

    A filter is all numbers of a leaf with one index of the last axis. Leaves with at most
    one axis (biases, scales) are 0. Li et al., Visualizing the Loss Landscape of Neural
    Nets, NeurIPS 2018, section 4.

    >>> params = {"kernel": np.full((4, 2), [[1.0, 3.0]]), "bias": np.ones(2)}
    >>> direction = filterwise_random(0, params)
    >>> np.linalg.norm(direction["kernel"], axis=0).tolist(), direction["bias"].tolist()
    ([2.0, 6.0], [0.0, 0.0])
    """
    rng = np.random.default_rng(seed)

    def direction(x: Any) -> np.ndarray:
        if np.ndim(x) < 2:
            return np.zeros_like(x)
        drawn = rng.standard_normal(np.shape(x)).astype(x.dtype)

        def norm(x):
            return np.sqrt(np.square(x).sum(tuple(range(x.ndim - 1)), keepdims=True))

        return drawn * norm(np.asarray(x)) / norm(drawn)

    return jax.tree.map(direction, params)


def evaluate(
    function: Callable[..., Array],
    plane: Plane,
    places: np.ndarray,
    batches: Sequence[Any],
    workers: lj.Workers,
    progress: Callable[[int], None] = lambda done: None,
) -> np.ndarray:
    r"""Returns the sum of a function over batches, at places of the plane.

    .. math:: F(a, b) = \sum_k f(o + a u + b v, \text{batch}_k)

    Every device evaluates one place at a time. f is compiled once.

    Args:
      function: f, (parameters [P], batch) -> array [n].
      plane: a plane, in the dtype of the parameters that f receives.
      places: (a, b), [N, 2].
      batches: trees of arrays, all of the same shapes.
      workers: one worker for each device to use.
      progress: called with the number of places done, after every round.

    Returns:
      float64 [N, n].

    >>> plane = Plane(jnp.zeros(3), jnp.eye(3)[:2])
    >>> square = lambda x, scale: scale * jnp.sum(x**2)[None]
    >>> places = np.array([[0.0, 1.0], [2.0, 1.0], [3.0, 4.0]])
    >>> evaluate(square, plane, places, [1.0, 3.0], lj.Workers(1, 2)).tolist()
    [[4.0], [20.0], [100.0]]
    """
    shared = workers.share(plane)
    count = workers.num_workers
    placed = [workers.share(batch) for batch in batches]
    at_place = workers.map(
        lambda place, plane, batch: function(point_at(plane.value, place), batch.value)
    )
    rounds = -(-len(places) // count)
    # The last place fills up the last round.
    rows = np.minimum(np.arange(rounds * count), len(places) - 1).reshape(rounds, count)
    sums = []
    for done, here in enumerate(np.asarray(places, plane.origin.dtype)[rows], 1):
        of_batches = [at_place(workers.put(here), shared, batch) for batch in placed]
        sums.append(np.sum(workers.fetch(of_batches), axis=0, dtype=np.float64))
        progress(min(done * count, len(places)))
    return np.concatenate(sums)[: len(places)]
