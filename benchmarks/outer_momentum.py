"""The largest outer momentum with which DiLoCo is stable on parabolas.

    python benchmarks/outer_momentum.py

Inner SGD with Nesterov's momentum of 0.9, which each worker keeps, takes H steps from the
anchor on q x² / 2, where q goes up to the stability limit of the inner optimizer. In lock
step the anchor moves by Nesterov's outer SGD with a rate of 0.7. Asynchronously the workers
take turns, and delayed Nesterov updates the momentum every W turns. The map of a cycle of
turns is linear, and stable if no eigenvalue has a modulus above 1. The script prints the
largest outer momentum up to which it is stable, in steps of 0.05.
"""

import numpy as np
from usage import head, parser, row


RATE, INNER = 0.7, 0.9
MOMENTA = np.arange(0, 1, 0.05)


def inner(q):
    """Returns the matrix of an inner step of (y, u), with u the momentum times the rate."""
    u = np.array([q, INNER])
    return np.array([[1 - q, 0] - INNER * u, u])


def radius(matrix):
    return max(abs(np.linalg.eigvals(matrix)))


def cycle(q, local_steps, momentum, workers):
    """Returns the matrix of W turns on the anchor, its momentum, gradients and workers."""
    taken = np.linalg.matrix_power(inner(q), local_steps)
    rows = np.eye(3 + 2 * workers)
    anchor, m, gathered = rows[:3]
    begun = list(rows[3:].reshape(workers, 2, -1))
    for worker in range(workers):
        y, u = taken @ begun[worker]
        gradient = begun[worker][0] - y
        gathered = gathered + gradient
        step = gradient / workers
        if worker == workers - 1:
            m = momentum * m + gathered / workers
            gathered, step = 0 * gathered, step + momentum * m
        anchor = anchor - RATE * step
        begun[worker] = np.array([anchor, u])
    return np.vstack([anchor, m, gathered, *begun])


def largest(local_steps, workers, curvatures):
    """Returns the largest stable momentum; W = 1 stands for workers in lock step."""
    stable = None
    for momentum in MOMENTA:
        cycles = (cycle(q, local_steps, momentum, workers) for q in curvatures)
        if any(radius(matrix) > 1 + 1e-9 for matrix in cycles):
            break
        stable = momentum
    return "none" if stable is None else f"{stable:.2f}"


def main():
    parser(__doc__).parse_args()
    limit = max(q for q in np.arange(0.001, 4, 0.001) if radius(inner(q)) <= 1 + 1e-9)
    # Within 2 % of the limit the inner optimizer itself is hardly stable.
    curvatures = 0.98 * limit * np.geomspace(1e-4, 1, 150)
    head("H", "lock step", "W = 4", "W = 8", "W = 16")
    for local_steps in (4, 8, 16, 32, 64, 128):
        row(local_steps, *(largest(local_steps, w, curvatures) for w in (1, 4, 8, 16)))


if __name__ == "__main__":
    main()
