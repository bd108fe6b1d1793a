"""The loss at a point of parameter space."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
from landscapes import SMALL

from paper.landscape import loss
from paper.landscape.plane import flat
from train.task.datasets import load_dataset
from train.task.experiment import Experiment


def test_batch_statistics_are_computed_from_the_images_at_the_point():
    """They are not those of the workers, which are spoiled here."""
    config = dataclasses.replace(SMALL, model="digits-bn")
    dataset, transforms = data = load_dataset(config)
    forward = Experiment(config, data).forward
    ((images, labels),) = loss.batches_of(dataset.train, 64, seed=0)
    model, x = forward.model, transforms.test(images)
    variables = jax.jit(lambda: model.init(jax.random.key(0), x, train=False))()
    params = variables["params"]
    spoiled = jax.tree.map(lambda x: x + 7, {"batch_stats": variables["batch_stats"]})
    state = jax.tree.map(lambda x: x[None], {"params": params, "stats": spoiled})
    case = SimpleNamespace(
        experiment=SimpleNamespace(forward=forward), state=SimpleNamespace(**state)
    )
    measure = jax.jit(loss.measure_of(case))
    logits, _ = model.apply(variables, x, True, mutable=["batch_stats"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    expected = [float(losses.sum()), float(np.sum(logits.argmax(axis=1) != labels))]
    seen = measure(jnp.asarray(flat(params)), (images, labels))
    np.testing.assert_allclose(seen, expected, rtol=1e-5)
