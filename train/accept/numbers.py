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
LEAST = 4  # workers; three lie on one device where there are four


def names() -> list[str]:
    """The oracles to reproduce, at least one of each method."""
    return [name for name in oracles.NAMES if oracles.load(name).workers >= LEAST]


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

    All steps are one program, because compiling takes longest. If there are more devices
    than workers, groups of them compute the same worker, so that no process is idle.
    """
    count = jax.device_count()
    copies = count // math.gcd(count, case.workers)
    workers = lj.Workers(case.nodes, case.locals, inside={INSIDE: copies})

    def step(carry: Any, given: Any) -> tuple[Any, Any]:
        x, state = carry
        gradient, loss = given
        updates, state = case.tx.update(gradient, state, x, value=loss)
        x = lj.apply_updates(x, updates)
        return (x, state), x

    def train(x: Any, gradients: Any, losses: Any) -> Any:
        _, seen = jax.lax.scan(step, (x, case.tx.init(x)), (gradients, losses))
        return seen

    gradients, losses = swapped((case.gradients, case.losses))
    given = workers.put((case.start, gradients, losses))
    return swapped(workers.fetch(workers.map(train)(*given)))


def swapped(tree: Any) -> Any:
    """A tree with the first two axes, steps and workers, swapped."""
    return jax.tree.map(lambda x: np.swapaxes(x, 0, 1), tree)
