"""Times steps in alternating blocks, because the pace of a shared machine drifts.

An arm of a comparison has a method `seconds_per_step(steps)`, which runs a block of steps.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax


class Arm(Protocol):
    """What is compared: it runs blocks of steps."""

    def seconds_per_step(self, steps: int) -> float:
        """Runs a block of steps and returns the seconds per step."""
        ...


class TimedStep:
    """An arm: a function (*state, *given) -> state, and the state, which arms may share."""

    def __init__(self, step: Callable[..., Any], state: list[Any], *given: Any):
        self._step = step
        self._state = state
        self._given = given

    def seconds_per_step(self, steps: int) -> float:
        """Runs a block of steps and returns the seconds per step."""
        jax.block_until_ready(self._state)
        began = time.perf_counter()
        for _ in range(steps):
            self._state[:] = self._step(*self._state, *self._given)
        jax.block_until_ready(self._state)
        return (time.perf_counter() - began) / steps


def in_turns(
    arms: Mapping[str, Arm], rounds: int, steps: int | Mapping[str, int]
) -> dict[str, list[float]]:
    """Returns the milliseconds per step of each arm in each round.

    A block of steps before the first round compiles. `steps` may differ between the arms.
    """
    blocks = dict.fromkeys(arms, steps) if isinstance(steps, int) else steps
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds + 1):
        for name, arm in arms.items():
            times[name].append(1e3 * arm.seconds_per_step(blocks[name]))
    return {name: seen[1:] for name, seen in times.items()}


def ratios(first: list[float], second: list[float]) -> list[float]:
    """Returns the ratio in each round."""
    return [a / b for a, b in zip(first, second, strict=True)]
