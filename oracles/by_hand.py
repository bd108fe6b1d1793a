"""Methods in NumPy, worker by worker, with a base optimizer of plain SGD.

Every function takes the start [W, P] and the gradients [steps, W, P] and returns the
parameters after every step, [steps, W, P], in float64.
"""

from collections.abc import Callable

import numpy as np
import optax

import lsgd_jax as lj


GRID = 2, 4  # nodes and workers of a node
WORKERS = 8
STEPS = 12
SIZE = 17
RATE = 0.1


def inputs() -> tuple[np.ndarray, np.ndarray]:
    """The start [W, P] and the gradients [steps, W, P] of all cases."""
    draw = np.random.default_rng(2026).normal
    return draw(size=(WORKERS, SIZE)), draw(size=(STEPS, WORKERS, SIZE))


def adpsgd(x, gradients):
    """Lian et al. 2018 in lock step: even workers meet the odd ones 1, 3 and 5 behind."""
    seen = []
    for t, g in enumerate(gradients):
        hop = (1, 3, 5)[t % 3]
        mixed = x.copy()
        for i in range(0, WORKERS, 2):
            j = (i + hop) % WORKERS
            mixed[i] = mixed[j] = (x[i] + x[j]) / 2
        x = mixed - RATE * g
        seen.append(x)
    return np.stack(seen)


# Not all workers send, so that the weights differ.
SENDERS = (((0, 1), (2, 3), (5, 4)), ((1, 2), (4, 7), (6, 0)), ((7, 5), (3, 6)))


def gosgd(x, gradients):
    """Blot et al. 2016, where every worker with a peer sends at every step."""
    weight = np.ones(WORKERS)
    seen = []
    for t, g in enumerate(gradients):
        y = x - RATE * g
        edges = SENDERS[t % len(SENDERS)]
        kept = weight.copy()
        for source, _ in edges:
            kept[source] /= 2
        total = kept.copy()
        sums = kept[:, None] * y
        for source, destination in edges:
            total[destination] += weight[source] / 2
            sums[destination] += weight[source] / 2 * y[source]
        x = sums / total[:, None]
        weight = total
        seen.append(x)
    return np.stack(seen)


def sparta(x, gradients):
    """All entries are drawn at every step."""
    seen = []
    for g in gradients:
        x = np.tile((x - RATE * g).mean(axis=0), (WORKERS, 1))
        seen.append(x)
    return np.stack(seen)


PARLE = {"period": 3, "anchor_pull": 0.2, "center_pull": 2.0, "decay": 0.75}


def parle(x, gradients):
    """Chaudhari et al. 2017, equations (8)."""
    period = PARLE["period"]
    decay = PARLE["decay"]
    anchor = x
    average = x
    center = x.mean(axis=0)
    seen = []
    for t, g in enumerate(gradients, 1):
        x = x - RATE * g - RATE * PARLE["anchor_pull"] * (x - anchor)
        average = decay * average + (1 - decay) * x
        if t % period == 0:
            pull = PARLE["center_pull"] * (anchor - center)
            anchor = anchor - RATE * (anchor - average + pull)
            center = anchor.mean(axis=0)
            x = anchor
            average = anchor
        seen.append(x)
    return np.stack(seen)


# With seed 5 and probability 0.4 these steps of the first 12 compute no gradient.
SKIPPED = (5, 7, 9, 12)


def palsgd(x, gradients):
    """PALSGD with a period of 5, a pull of 2, and an outer momentum of 0.5."""
    probability = 0.4
    anchor = x.mean(axis=0)
    momentum = np.zeros_like(anchor)
    seen = []
    for t, g in enumerate(gradients, 1):
        if t in SKIPPED:
            x = x - RATE / probability * 2.0 * (x - anchor)
        else:
            x = x - RATE / (1 - probability) * g
        if t % 5 == 0:
            momentum = 0.5 * momentum + anchor - x.mean(axis=0)
            anchor = anchor - 0.5 * momentum
            x = np.tile(anchor, (WORKERS, 1))
        seen.append(x)
    return np.stack(seen)


# Late pulls, which add what an agreement has moved to the steps since then


def _adding(*pulls):
    """Pulls (rule, strength, period, delay), which land at the end of their periods.

    rule: x -> a function from y [W, P] to the targets of all workers.
    """

    def compute(x, gradients):
        rules = [rule(x) for rule, *_ in pulls]
        in_flight = [0.0] * len(pulls)
        seen = []
        for t, g in enumerate(gradients, 1):
            x = x - RATE * g
            for k, (_, strength, period, delay) in enumerate(pulls):
                if t % period == 0:
                    x = x + strength * in_flight[k]
                if (t + delay) % period == 0:
                    in_flight[k] = rules[k](x) - x
            seen.append(x)
        return np.stack(seen)

    return compute


def _mean(x):
    """The rule of local SGD."""
    del x
    return lambda y: y.mean(axis=0)


def _first_worker(nodes):
    """The rule of LSGD where all losses are equal: the first worker of each node leads."""

    def rule(x):
        del x
        each = WORKERS // nodes
        return lambda y: np.repeat(y[::each], each, axis=0)

    return rule


def _nesterov(rate, momentum):
    """The rule of DiLoCo."""

    def rule(x):
        anchor = x.mean(axis=0)
        trace = np.zeros_like(anchor)

        def agree(y):
            nonlocal anchor, trace
            delta = anchor - y.mean(axis=0)
            trace = momentum * trace + delta
            anchor = anchor - rate * (delta + momentum * trace)
            return anchor

        return agree

    return rule


# Aggregates of gradients


def licm(gradients):
    """The mean of the values within half of the median of a coordinate."""
    median = np.median(gradients, axis=0)
    near = np.abs(gradients - median) <= 0.5 * np.abs(median)
    count = near.sum(axis=0)
    mean = np.where(near, gradients, 0).sum(axis=0) / np.maximum(count, 1)
    return np.where(count > 0, mean, median)


def trimmed_mean(gradients):
    """The mean without the two smallest and the two largest values of a coordinate."""
    return np.sort(gradients, axis=0)[2:-2].mean(axis=0)


def krum(gradients):
    """Blanchard et al. 2017: the gradient closest to its W - 1 - 2 nearest others."""
    distances = np.square(gradients[:, None] - gradients[None]).sum(axis=-1)
    nearest = np.sort(distances, axis=1)[:, 1 : WORKERS - 2]
    return gradients[nearest.sum(axis=1).argmin()]


def geometric_median(gradients):
    """The point with the least sum of distances, by 2,000 steps of Weiszfeld."""
    center = gradients.mean(axis=0)
    for _ in range(2000):
        weights = 1 / np.linalg.norm(gradients - center, axis=1)
        center = (weights[:, None] * gradients).sum(axis=0) / weights.sum()
    return center


def _of_aggregates(aggregate: Callable[[np.ndarray], np.ndarray]):
    """SGD whose gradient is an aggregate of all workers' gradients."""

    def compute(x, gradients):
        seen = []
        for g in gradients:
            x = x - RATE * aggregate(g)
            seen.append(x)
        return np.stack(seen)

    return compute


def _last(method):
    return optax.chain(optax.sgd(RATE), method)


def _first(method):
    return optax.chain(method, optax.sgd(RATE))


# By name: the public name, the transformation, the function here, and the tolerance.
CASES = {
    "adpsgd": ("adpsgd", _last(lj.adpsgd()), adpsgd, 2e-6),
    "gosgd": (
        "contrib.gosgd",
        _last(lj.contrib.gosgd(lj.topology.from_edges(SENDERS, WORKERS), 1.0)),
        gosgd,
        2e-6,
    ),
    "sparta": ("contrib.sparta", _last(lj.contrib.sparta(1.0)), sparta, 2e-6),
    "parle": ("parle", _last(lj.parle(RATE, **PARLE)), parle, 2e-6),
    "palsgd": (
        "contrib.palsgd",
        _last(lj.contrib.palsgd(5, RATE, 0.4, 2.0, optax.sgd(0.5, 0.5), 5)),
        palsgd,
        2e-6,
    ),
    "local_sgd_late": (
        "local_sgd",
        _last(lj.local_sgd(4, mixing=0.25, delay=4, late="add")),
        _adding((_mean, 0.75, 4, 4)),
        2e-6,
    ),
    "diloco_late": (
        "diloco",
        _last(
            lj.diloco(
                4, optax.sgd(0.7, 0.5, nesterov=True), mixing=0.25, delay=3, late="add"
            )
        ),
        _adding((_nesterov(0.7, 0.5), 0.75, 4, 3)),
        2e-6,
    ),
    "lsgd_late": (
        "lsgd",
        _last(lj.lsgd(0.3, 0.2, 2, 4, delay=2, late="add")),
        _adding((_first_worker(2), 0.3, 2, 2), (_first_worker(1), 0.2, 4, 2)),
        2e-6,
    ),
    "licm": ("robust.licm", _first(lj.robust.licm(0.5)), _of_aggregates(licm), 2e-6),
    "trimmed_mean": (
        "robust.trimmed_mean",
        _first(lj.robust.trimmed_mean(2)),
        _of_aggregates(trimmed_mean),
        2e-6,
    ),
    "krum": ("robust.krum", _first(lj.robust.krum(1)), _of_aggregates(krum), 2e-6),
    "geometric_median": (
        "robust.geometric_median",
        _first(lj.robust.geometric_median()),
        _of_aggregates(geometric_median),
        1e-5,
    ),
}
