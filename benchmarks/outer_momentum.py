"""The largest outer momentum with which DiLoCo is stable on parabolas.

    python benchmarks/outer_momentum.py

An inner SGD with Nesterov's momentum of 0.9, which stays with its worker, takes H steps
from the anchor on q x² / 2; q runs up to the inner optimizer's own limit. In lock step the
anchor moves by Nesterov's outer SGD with a rate of 0.7. Asynchronously the workers come in
turn, and delayed Nesterov renews the momentum every W turns. All is linear: it is stable
if no eigenvalue of a cycle of turns is larger than 1. Printed is the largest momentum, in
steps of 0.05, up to which it is.
"""

import numpy as np


RATE, INNER = 0.7, 0.9
MOMENTA = np.arange(0, 1, 0.05)


def inner(q):
    """One inner step of (y, u), u the momentum times the inner rate."""
    u = np.array([q, INNER])
    return np.array([[1 - q, 0] - INNER * u, u])


def radius(matrix):
    return max(abs(np.linalg.eigvals(matrix)))


def cycle(q, local_steps, momentum, workers):
    """What W turns do to the anchor, its momentum, what has come, and the workers."""
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
    """The largest stable momentum; in lock step all workers are as one."""
    stable = None
    for momentum in MOMENTA:
        cycles = (cycle(q, local_steps, momentum, workers) for q in curvatures)
        if any(radius(matrix) > 1 + 1e-9 for matrix in cycles):
            break
        stable = momentum
    return "none" if stable is None else f"{stable:.2f}"


def main():
    limit = max(q for q in np.arange(0.001, 4, 0.001) if radius(inner(q)) <= 1 + 1e-9)
    # Within 2 % of the limit the inner optimizer itself is hardly stable.
    curvatures = 0.98 * limit * np.geomspace(1e-4, 1, 150)
    print("| H | lock step | W = 4 | W = 8 | W = 16 |\n| --- | --- | --- | --- | --- |")
    for local_steps in (4, 8, 16, 32, 64, 128):
        found = [largest(local_steps, workers, curvatures) for workers in (1, 4, 8, 16)]
        print(f"| {local_steps} | " + " | ".join(found) + " |")


if __name__ == "__main__":
    main()
