"""Where a leader pays: methods among workers that are not alike, on scikit-learn's digits.

    python benchmarks/when_to_follow.py [--seeds 3] [--steps 800]

trains a network of two layers with 8 workers by SGD with a learning rate of 0.1. Methods
with a period exchange every 8 steps. In each scenario the workers differ in one way:

- equal workers: they do not differ.
- learning rates: from 0.00625 to 1.6, evenly spaced on a logarithmic scale.
- corrupted labels: the labels of 5 workers are random.
- flipped bits: in 2 % of the steps of one worker a bit in the exponent of one number of the
  gradient is wrong.
- classes apart: every worker has an eighth of the training images, sorted by their class.

The script prints a Markdown table of the test error of the center in percent, mean ± sd
over the seeds. The steps end with an exchange, after which the center of `lsgd, λ = 1` is
the leader. All of it takes a few minutes on two cores.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

import lsgd_jax as lj
from train.compare import spread
from train.data import digits
from train.metrics import tables


WORKERS, BATCH, WIDTH, RATE, PERIOD = 8, 32, 64, 0.1, 8
SGD = optax.sgd(1.0)  # the gradients are already scaled by the worker's learning rate
METHODS = {
    "lsgd, λ = 0.1": optax.chain(SGD, lj.lsgd(0.1, 0.0, local_period=PERIOD)),
    "lsgd, λ = 1": optax.chain(SGD, lj.lsgd(1.0, 0.0, local_period=PERIOD)),
    "easgd": optax.chain(SGD, lj.easgd(period=PERIOD)),
    "local SGD": optax.chain(SGD, lj.local_sgd(PERIOD)),
    "diloco": optax.chain(SGD, lj.diloco(PERIOD)),
    "all-reduce": optax.chain(lj.allreduce(), SGD),
    "all-reduce, coordinate median": optax.chain(lj.coordinate_median(), SGD),
}


class Setting(NamedTuple):
    """The properties of the workers, [W, ...].

    Attributes:
      rows: int32 [W, N], rows of the training images that the worker draws from.
      labels: int32 [W, N], labels of all training images as the worker sees them.
      rate: float32 [W], the learning rate.
      faults: float32 [W], the probability that a step's gradient has a wrong bit.
    """

    rows: np.ndarray
    labels: np.ndarray
    rate: np.ndarray
    faults: np.ndarray


def equal_workers(labels: np.ndarray, seed: int) -> Setting:
    """Returns workers that do not differ."""
    each = lambda x: np.repeat(np.asarray(x)[None], WORKERS, axis=0)
    rows, rate, faults = np.arange(len(labels), dtype=np.int32), RATE, 0.0
    return Setting(
        each(rows), each(labels), each(np.float32(rate)), each(np.float32(faults))
    )


def learning_rates(labels: np.ndarray, seed: int) -> Setting:
    """Returns workers whose learning rates lie between RATE / 16 and 16 RATE."""
    rate = np.float32(RATE * 16 ** np.linspace(-1, 1, WORKERS))
    return equal_workers(labels, seed)._replace(rate=rate)


def corrupted_labels(labels: np.ndarray, seed: int) -> Setting:
    """Returns workers of which the first five have random labels."""
    setting = equal_workers(labels, seed)
    setting.labels[:5] = np.random.default_rng(seed).integers(10, size=(5, len(labels)))
    return setting


def flipped_bits(labels: np.ndarray, seed: int) -> Setting:
    """Returns workers of which the first sometimes computes a wrong gradient."""
    setting = equal_workers(labels, seed)
    setting.faults[0] = 0.02
    return setting


def classes_apart(labels: np.ndarray, seed: int) -> Setting:
    """Returns workers that have one or two classes each."""
    parts = np.array_split(np.argsort(labels, kind="stable"), WORKERS)
    rows = np.stack([np.resize(part, len(labels)) for part in parts]).astype(np.int32)
    return equal_workers(labels, seed)._replace(rows=rows)


SCENARIOS: dict[str, Callable[[np.ndarray, int], Setting]] = {
    f.__name__.replace("_", " "): f
    for f in (equal_workers, learning_rates, corrupted_labels, flipped_bits, classes_apart)
}


def start_of(seed: int) -> Any:
    """Returns the initial parameters."""
    sizes = (64, WIDTH, 10)
    keys = jax.random.split(jax.random.key(seed), 2)
    layer = lambda key, a, b: (jax.random.normal(key, (a, b)) / a**0.5, jnp.zeros((1, b)))
    return [layer(*each) for each in zip(keys, sizes, sizes[1:])]


def logits_of(params: Any, images: jax.Array) -> jax.Array:
    """Returns the outputs of the network, [B, 10]."""
    (a, b), (c, d) = params
    return jnp.tanh(images @ a + b) @ c + d


def loss_of(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean cross entropy."""
    losses = optax.softmax_cross_entropy_with_integer_labels
    return losses(logits_of(params, images), labels).mean()


def with_fault(gradient: Any, key: jax.Array, probability: jax.Array) -> Any:
    """Flips a random bit in the exponent of a random number, with a probability."""
    happens, where, which = jax.random.split(key, 3)
    flat, unravel = ravel_pytree(gradient)
    bits = jax.lax.bitcast_convert_type(flat, jnp.uint32)
    i = jax.random.randint(where, (), 0, flat.size)
    bit = jnp.uint32(1) << jax.random.randint(which, (), 23, 31).astype(jnp.uint32)
    wrong = jax.lax.bitcast_convert_type(bits.at[i].set(bits[i] ^ bit), jnp.float32)
    return unravel(jnp.where(jax.random.bernoulli(happens, probability), wrong, flat))


def trainer(tx: optax.GradientTransformation, steps: int) -> Callable[..., Any]:
    """Returns a function (setting, images, seed) -> center, compiled once per method."""
    workers = lj.Workers(nodes=1, locals=WORKERS, devices=jax.devices()[:1])

    def train(params, setting, key, images):  # one worker
        def step(carry, key):
            params, state = carry
            draw, fault = jax.random.split(key)
            which = jax.random.randint(draw, (BATCH,), 0, len(setting.rows))
            rows = setting.rows[which]
            gradient = jax.value_and_grad(loss_of)
            loss, grads = gradient(params, images.value[rows], setting.labels[rows])
            grads = with_fault(grads, fault, setting.faults)
            grads = jax.tree.map(lambda g: setting.rate * g, grads)
            updates, state = tx.update(grads, state, params, value=loss)
            return (lj.apply_updates(params, updates), state), None

        keys = jax.random.split(key, steps)
        return jax.lax.scan(step, (params, tx.init(params)), keys)[0]

    run = workers.map(train)

    def center_of(setting: Setting, images: np.ndarray, seed: int) -> Any:
        keys = jax.random.split(jax.random.key(100 + seed), WORKERS)
        given = workers.replicate(start_of(seed)), workers.put(setting), workers.put(keys)
        return lj.center(*run(*given, workers.share(images)))

    return center_of


def main(arguments: list[str]) -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=800, help="steps of every worker")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument(
        "--scenarios", nargs="+", choices=SCENARIOS, default=list(SCENARIOS)
    )
    options = parser.parse_args(arguments)
    data = digits.load()
    flat = lambda part: part.images.reshape(-1, 64).astype(np.float32) / 255
    images, tested = flat(data.train), flat(data.test)
    rows = []
    for method in options.methods:
        center_of, row = trainer(METHODS[method], options.steps), {"method": method}
        for name in options.scenarios:
            errors = []
            for seed in range(options.seeds):
                center = center_of(SCENARIOS[name](data.train.labels, seed), images, seed)
                answers = np.argmax(logits_of(center, tested), axis=1)
                is_finite = np.isfinite(ravel_pytree(center)[0]).all()
                error = 100 * np.mean(answers != data.test.labels)
                errors.append(float(error) if is_finite else np.inf)
            row[name] = spread(errors, 1)
            print(f"{method}, {name}: {row[name]}", file=sys.stderr, flush=True)
        rows.append(row)
    print(tables.markdown(rows), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
