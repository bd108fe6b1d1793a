"""Small networks, their data, workers that train them, and sweeps over methods."""

import argparse
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

import lsgd_jax as lj
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


# Tasks


class Task(NamedTuple):
    """A classification.

    Attributes:
      inputs: [N, ...], the training inputs: float32 features, or ids of characters.
      labels: int32 [N].
      test_inputs, test_labels: the same for testing.
      classes: the number of classes.
      rate: the usual learning rate.
      unit: 'error in percent' or 'loss in nats'.
      start: key -> random parameters.
      logits: (parameters, inputs, key of the dropout or None) -> outputs, [B, classes].
      batch: inputs of a worker's step.
    """

    inputs: np.ndarray
    labels: np.ndarray
    test_inputs: np.ndarray
    test_labels: np.ndarray
    classes: int
    rate: float
    unit: str
    start: Callable[[jax.Array], Any]
    logits: Callable[[Any, jax.Array, jax.Array | None], jax.Array]
    batch: int = 32

    def loss(self, params: Any, x: jax.Array, labels: jax.Array, key: Any) -> jax.Array:
        """Returns the mean cross entropy."""
        return cross_entropy(self.logits(params, x, key), labels)

    def tester(self) -> Callable[[Any], float]:
        """Returns a function (params) -> test result, inf if it is not finite."""
        measure = cross_entropy if self.unit == "loss in nats" else error

        @jax.jit
        def test(params: Any, inputs: jax.Array, labels: jax.Array) -> jax.Array:
            result = measure(self.logits(params, inputs, None), labels)
            is_finite = jnp.isfinite(ravel_pytree(params)[0]).all()
            return jnp.where(is_finite & jnp.isfinite(result), result, jnp.inf)

        return lambda params: float(test(params, self.test_inputs, self.test_labels))


def images(data: Data, *widths: int) -> Task:
    """Returns the classification of images in 10 classes by a dense network."""
    x, labels, test_x, test_labels = data
    flat = x.reshape(len(x), -1), labels, test_x.reshape(len(test_x), -1), test_labels
    begin = lambda key: start(key, (flat[0].shape[1], *widths, 10))
    logits = lambda layers, x, key: logits_of(layers, x)
    return Task(*flat, 10, 0.1, "error in percent", begin, logits)


# Workers


SGD = optax.inject_hyperparams(optax.sgd)(learning_rate=1.0)  # see `trainer` for the rate


class Setting(NamedTuple):
    """The properties of the workers, [W, ...].

    Attributes:
      rows: int32 [W, N], the training inputs that the worker draws from.
      labels: int32 [W, N], labels of all training inputs as the worker sees them.
      rate: float32 [W], the learning rate.
      faults: float32 [W], the probability that a step's gradient has a wrong bit.
      lies: bool [W], whether the worker reports losses of 0 and goes astray.
    """

    rows: np.ndarray
    labels: np.ndarray
    rate: np.ndarray
    faults: np.ndarray
    lies: np.ndarray


def equal_workers(task: Task, count: int) -> Setting:
    """Returns workers that do not differ."""
    each = lambda x: np.repeat(np.asarray(x)[None], count, axis=0)
    rows = np.arange(len(task.labels), dtype=np.int32)
    rate, faults = np.float32(task.rate), np.float32(0)
    return Setting(*map(each, (rows, task.labels, rate, faults, np.bool_(False))))


def with_fault(gradient: Any, key: jax.Array, probability: jax.Array) -> Any:
    """Flips a random bit in the exponent of a random number, with a probability."""
    happens, where, which = jax.random.split(key, 3)
    flat, unravel = ravel_pytree(gradient)
    bits = jax.lax.bitcast_convert_type(flat, jnp.uint32)
    i = jax.random.randint(where, (), 0, flat.size)
    bit = jnp.uint32(1) << jax.random.randint(which, (), 23, 31).astype(jnp.uint32)
    wrong = jax.lax.bitcast_convert_type(bits.at[i].set(bits[i] ^ bit), jnp.float32)
    return unravel(jnp.where(jax.random.bernoulli(happens, probability), wrong, flat))


class Trained(NamedTuple):
    """Parameters of each worker, the center, and learning rates [W]."""

    params: list[Any]
    center: Any
    rates: np.ndarray


def trainer(
    task: Task, tx: optax.GradientTransformation, steps: int, count: int
) -> Callable[..., list[Trained]]:
    """Returns (setting, seed, tested=[steps]) -> what there is after some of the steps.

    The returned function trains `count` workers of one device, and compiles once.
    """
    workers = lj.Workers(nodes=1, locals=count, devices=jax.devices()[:1])
    update = optax.with_extra_args_support(tx).update
    loss_of, gradient_of = map(lj.unrolled, (task.loss, jax.value_and_grad(task.loss)))

    def begin(params, setting, key):  # one worker
        key, astray = jax.random.split(key)
        state = optax.tree.set(tx.init(params), learning_rate=setting.rate)
        return (params, state), task.start(astray), jax.random.split(key, steps)

    def step(carry, wrong, keys, setting, inputs, t):  # one worker
        params, state = carry
        draw, fault = jax.random.split(keys[t.value])
        which = jax.random.randint(draw, (task.batch,), 0, len(setting.rows))
        rows = setting.rows[which]
        batch = inputs.value[rows], setting.labels[rows], jax.random.fold_in(draw, 1)

        loss, grads = gradient_of(params, *batch)
        grads = with_fault(grads, fault, setting.faults)
        rate = optax.tree.get(state, "learning_rate")
        to = lambda g, x, z: jnp.where(setting.lies, (x - z) / rate, g)
        grads = jax.tree.map(to, grads, params, wrong)
        reported = lambda loss: jnp.where(setting.lies, 0.0, loss)
        value_fn = lambda params: reported(loss_of(params, *batch))
        more = {"value": reported(loss), "value_fn": value_fn, "grad": grads}
        updates, state = update(grads, state, params, **more)
        return lj.apply_updates(params, updates), state

    first, run = workers.map(begin), workers.map(step, donate=(0,))

    def seen(params: Any, state: Any) -> Trained:
        rates = optax.tree.get(state, "learning_rate")
        params, *more = jax.device_get((params, lj.center(params, state), rates))
        leaves, tree = jax.tree.flatten(params)
        return Trained([tree.unflatten(each) for each in zip(*leaves)], *more)

    def train(
        setting: Setting, seed: int, tested: Collection[int] = (steps,)
    ) -> list[Trained]:
        start = workers.replicate(task.start(jax.random.key(seed)))
        keys = workers.put(jax.random.split(jax.random.key(100 + seed), count))
        given, inputs = workers.put(setting), workers.share(task.inputs)
        carry, wrong, keys = first(start, given, keys)
        found = []
        for t in range(steps):
            carry = run(carry, wrong, keys, given, inputs, lj.Shared(jnp.int32(t)))
            if t + 1 in tested:
                found.append(seen(*carry))
        return found

    return train


def still(params: Any) -> lj.asynchronous.Training:
    """Returns asynchronous workers whose steps do not move these parameters."""

    @jax.jit
    def step(params: Any, opt_state: Any, own: Any, t: Any) -> Any:
        return jax.tree.map(jnp.zeros_like, params), opt_state, own, 0.0

    return lj.asynchronous.Training(lambda i: (params, (), ()), step)


# Sweeps


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
