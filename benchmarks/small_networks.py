"""Small networks, their data, and sweeps over methods and scenarios."""

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from train.data import cifar10 as cifar10_files
from train.data import digits as digits_files


# Training inputs, float32 [N, ...], and labels, int32 [N]; the same for testing.
Data = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
Layers = list[tuple[jax.Array, jax.Array]]  # weights [a, b] and bias [1, b]


def digits() -> Data:
    """Returns scikit-learn's digits, [N, 64] with values from 0 to 1."""
    data = digits_files.load()
    flat = lambda x: x.reshape(-1, 64).astype(np.float32) / 255
    train, test = data.train, data.test
    return flat(train.images), train.labels, flat(test.images), test.labels


def cifar10(folder: str) -> Data:
    """Returns CIFAR-10 at 8 x 8 pixels, [N, 8, 8, 3] with values from -1 to 1."""
    data = cifar10_files.load(folder, accept_other_files=True)

    def small(x: np.ndarray) -> np.ndarray:
        pixels = x.reshape(-1, 8, 4, 8, 4, 3).mean((2, 4), dtype=np.float32)
        return pixels / 127.5 - 1

    train, test = data.train, data.test
    labels = (part.labels.astype(np.int32) for part in (train, test))
    return small(train.images), next(labels), small(test.images), next(labels)


def start(key: jax.Array, sizes: Sequence[int], gain: float = 1.0) -> Layers:
    """Returns random layers; the variance of the weights is `gain` over the inputs."""
    keys = jax.random.split(key, len(sizes) - 1)
    weights = lambda key, a, b: jax.random.normal(key, (a, b)) * (gain / a) ** 0.5
    return [
        (weights(key, a, b), jnp.zeros((1, b))) for key, a, b in zip(keys, sizes, sizes[1:])
    ]


def logits_of(layers: Layers, x: jax.Array, activation: Any = jnp.tanh) -> jax.Array:
    """Returns the outputs [B, classes] of dense layers for inputs [B, features]."""
    for weights, bias in layers[:-1]:
        x = activation(x @ weights + bias)
    weights, bias = layers[-1]
    return x @ weights + bias


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean cross entropy in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def error(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the share of wrong classes in percent."""
    return 100 * (logits.argmax(axis=-1) != labels).mean()


def add_choices(
    words: argparse.ArgumentParser,
    methods: Iterable[str],
    scenarios: Iterable[str],
    more: Sequence[str] = (),
) -> None:
    """Adds --methods, --scenarios and --seeds; `more` methods run only if named."""
    usual, cases = list(methods), list(scenarios)
    words.add_argument("--methods", nargs="+", choices=[*usual, *more], default=usual)
    words.add_argument("--scenarios", nargs="+", choices=cases, default=cases)
    words.add_argument("--seeds", type=int, default=3)


def sweep(
    options: argparse.Namespace,
    prepare: Callable[[str], Callable[[str, int], Any]],
    summary: Callable[[list[Any]], Any],
) -> dict[str, dict[str, list[Any]]]:
    """Runs all methods in all scenarios with all seeds.

    Args:
      options: those of `add_choices`.
      prepare: method -> (scenario, seed) -> the result of a run.
      summary: results of all seeds -> what is said of them on the way.

    Returns:
      The results by method, scenario and seed.
    """
    found: dict[str, dict[str, list[Any]]] = {}
    for method in options.methods:
        run, row = prepare(method), found.setdefault(method, {})
        for scenario in options.scenarios:
            row[scenario] = [run(scenario, seed) for seed in range(options.seeds)]
            said = f"{method}, {scenario}: {summary(row[scenario])}"
            print(said, file=sys.stderr, flush=True)
    return found
