"""Tests of unrolled: the same values, without grouped convolutions."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import mostly_slow
from jax import lax

import lsgd_jax as lj


def network(weights, images):
    """Returns one number per image: a convolution and a sum."""
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
    """Returns (a function of all workers, its arguments)."""
    rng, count = np.random.default_rng(0), workers.num_workers
    weights = rng.normal(size=(count, 3, 3, 2, 4)).astype(np.float32)
    images = rng.normal(size=(count, 5, 6, 6, 2)).astype(np.float32)
    keys = jax.random.split(jax.random.key(0), count)
    return workers.map(step), workers.put((jnp.asarray(weights), jnp.asarray(images), keys))


def groups(fn, arguments):
    """Returns the numbers of groups of the compiled convolutions."""
    text = fn.lower(*arguments).as_text()
    return {int(n) for n in re.findall(r"(?:feature|batch)_group_count = (\d+)", text)}


@pytest.mark.parametrize(
    "nodes, locals, devices",
    mostly_slow([(1, 4, 1), (2, 2, 1), (2, 4, 2), (1, 9, 1)], fast=[(2, 4, 2)]),
)
def test_the_values_are_those_of_vmapped_workers(nodes, locals, devices):
    """Also with two vmapped axes on one device, and with too many workers to unroll."""
    workers = lj.Workers(nodes, locals, devices=jax.devices()[:devices])
    vmapped, arguments = compiled(workers, step_of(lambda fn: fn))
    one_by_one, _ = compiled(workers, step_of(lj.unrolled))
    for a, b in zip(vmapped(*arguments), one_by_one(*arguments)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert max(groups(vmapped, arguments)) > 1
    unrolls = locals <= 8
    assert (groups(one_by_one, arguments) == {1}) == unrolls


def test_a_function_that_communicates_stays_vmapped():
    workers = lj.Workers(1, 4, devices=jax.devices()[:1])
    mean = lambda loss: lj.rules.Group("local").mean(loss)
    vmapped, arguments = compiled(workers, step_of(lambda fn: fn, mean))
    one_by_one, _ = compiled(workers, step_of(lj.unrolled, mean))
    for a, b in zip(vmapped(*arguments), one_by_one(*arguments)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_outside_of_workers_the_function_is_unchanged():
    step, weights = step_of(lj.unrolled), jnp.ones([3, 3, 2, 4])
    arguments = weights, jnp.ones([5, 6, 6, 2]), jax.random.key(0)
    for a, b in zip(step(*arguments), step_of(lambda fn: fn)(*arguments)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
