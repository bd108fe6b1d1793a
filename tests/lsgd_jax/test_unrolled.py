"""Workers of a device one after the other: the same values, fewer grouped convolutions."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import lsgd_jax as lj


def network(weights, images):
    """A convolution and a sum, per image."""
    dimensions = ("NHWC", "HWIO", "NHWC")
    hidden = lax.conv_general_dilated(
        images, weights, (1, 1), "SAME", dimension_numbers=dimensions
    )
    return jnp.tanh(hidden).sum(axis=(1, 2, 3))


def step_of(wrap, talk=lambda loss: loss):
    def step(weights, images, key):
        noise = jax.random.normal(key, images.shape)
        loss = lambda w: talk(jnp.square(network(w, images + noise)).mean())
        return wrap(jax.value_and_grad(loss))(weights)

    return step


def compiled(workers, step):
    """(a function of all workers, its arguments)."""
    rng, count = np.random.default_rng(0), workers.num_workers
    weights = rng.normal(size=(count, 3, 3, 2, 4)).astype(np.float32)
    images = rng.normal(size=(count, 5, 6, 6, 2)).astype(np.float32)
    keys = jax.random.split(jax.random.key(0), count)
    return workers.map(step), workers.put((jnp.asarray(weights), jnp.asarray(images), keys))


def groups(fn, arguments):
    """The numbers of groups of the convolutions that are compiled."""
    text = fn.lower(*arguments).as_text()
    return {int(n) for n in re.findall(r"(?:feature|batch)_group_count = (\d+)", text)}


@pytest.mark.parametrize(
    "nodes, locals, devices", [(1, 4, 1), (2, 2, 1), (2, 4, 2), (1, 9, 1)]
)
def test_the_values_are_those_of_vmapped_workers(nodes, locals, devices):
    """Also with workers of two axes on one device, and with more than are unrolled."""
    workers = lj.Workers(nodes, locals, devices=jax.devices()[:devices])
    vmapped, arguments = compiled(workers, step_of(lambda fn: fn))
    one_by_one, _ = compiled(workers, step_of(lj.unrolled))
    for a, b in zip(vmapped(*arguments), one_by_one(*arguments)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert max(groups(vmapped, arguments)) > 1
    unrolls = locals <= 8
    assert (groups(one_by_one, arguments) == {1}) == unrolls


def test_what_communicates_stays_vmapped():
    workers = lj.Workers(1, 4, devices=jax.devices()[:1])
    mean = lambda loss: lj.Group("local").mean(loss)
    vmapped, arguments = compiled(workers, step_of(lambda fn: fn, mean))
    one_by_one, _ = compiled(workers, step_of(lj.unrolled, mean))
    for a, b in zip(vmapped(*arguments), one_by_one(*arguments)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_without_workers_it_is_the_function_itself():
    step, weights = step_of(lj.unrolled), jnp.ones([3, 3, 2, 4])
    arguments = weights, jnp.ones([5, 6, 6, 2]), jax.random.key(0)
    for a, b in zip(step(*arguments), step_of(lambda fn: fn)(*arguments)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
