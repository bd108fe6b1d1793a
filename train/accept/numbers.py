"""The numbers of every method on these devices, against its oracles."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

import lsgd_jax as lj
import oracles
from train.accept.findings import Finding, at_most, failed
from train.cluster.session import is_of_loss
from train.process.messages import one_line


PART = "numbers"
INSIDE = "copy"  # the mesh axis of devices that compute the same worker


def names() -> list[str]:
    """The oracles to reproduce: of those that differ in the number of workers, the largest.

    >>> [name for name in names() if name.startswith("mgrawa")]
    ['mgrawa-4']
    """
    largest: dict[str, str] = {}
    for name in sorted(oracles.NAMES):
        largest[name.partition("-")[0]] = name
    return [name for name in oracles.NAMES if name in largest.values()]


def check() -> Iterator[Finding]:
    """Yields one finding for each oracle."""
    for name in names():
        yield of_oracle(oracles.load(name))


def of_oracle(case: oracles.Case) -> Finding:
    """Trains with a method and compares the parameters after every step."""
    title = f"{case.method}: {case.name}"
    try:
        difference = worst(trained(case), case)
    except Exception as error:
        if is_of_loss(error):
            raise
        return failed(PART, title, f"{type(error).__name__}: {one_line(error)}")
    if difference == math.inf:
        return failed(PART, title, "numbers are missing or not finite")
    return at_most(PART, title, difference, case.atol)


def worst(seen: Mapping[str, np.ndarray], case: oracles.Case) -> float:
    """The largest difference beyond the relative tolerance; inf if any number is missing.

    Args:
      seen: the parameters after every step, {name: [steps, W, ...]}.
      case: the oracle.
    """
    largest = 0.0
    for (name, x), (other, y) in zip(
        sorted(seen.items()), sorted(case.expected.items()), strict=True
    ):
        if name != other or x.shape != y.shape or not np.isfinite(x).all():
            return math.inf
        excess = np.abs(x - y) - case.rtol * np.abs(y)
        largest = max(largest, float(excess.max()))
    return largest


def trained(case: oracles.Case) -> dict[str, np.ndarray]:
    """The parameters after every step on all devices of all processes.

    If there are more devices than workers, groups of them compute the same worker, so that
    no process is idle.
    """
    count = jax.device_count()
    copies = count // math.gcd(count, case.nodes * case.locals)
    workers = lj.Workers(case.nodes, case.locals, inside={INSIDE: copies})

    def train_step(x: Any, state: Any, gradient: Any, loss: Any) -> tuple[Any, Any]:
        updates, state = case.tx.update(gradient, state, x, value=loss)
        return lj.apply_updates(x, updates), state

    step = workers.map(train_step)
    x = workers.put(case.start)
    state = workers.map(case.tx.init)(x)
    seen = []
    for t, losses in enumerate(case.losses):
        x, state = step(x, state, *workers.put((oracles.at(case.gradients, t), losses)))
        seen.append(x)
    return {
        name: np.stack([tree[name] for tree in workers.fetch(seen)])
        for name in case.expected
    }
