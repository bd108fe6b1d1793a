"""Crops, flips and scaling, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.data import transforms


IMAGES = np.random.default_rng(0).integers(0, 256, size=(64, 32, 32, 3), dtype=np.uint8)


@pytest.mark.slow
def test_random_crops_and_flips_are_parts_of_the_image():
    crops = np.asarray(
        transforms.random_crop_flip(jax.random.key(0), jnp.asarray(IMAGES), 28)
    )
    found = set()
    for image, crop in zip(IMAGES, crops):
        places = [
            (top, left, flip)
            for flip in (False, True)
            for top in range(5)
            for left in range(5)
            if np.array_equal(
                image[top : top + 28, left : left + 28][:, :: -1 if flip else 1], crop
            )
        ]
        assert len(places) == 1
        found |= set(places)
    assert {top for top, _, _ in found} == {left for _, left, _ in found} == set(range(5))
    assert {flip for *_, flip in found} == {False, True}


def test_cifar10_is_cropped_and_scaled_per_channel():
    got = transforms.cifar10().test(jnp.asarray(IMAGES))
    mean, std = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
    expected = (IMAGES[:, 2:30, 2:30] / 255 - np.array(mean)) / np.array(std)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)
    assert got.dtype == jnp.float32


def test_padding_adds_a_black_border_to_random_crops():
    padded = np.pad(IMAGES, ((0, 0), (4, 4), (4, 4), (0, 0)))
    key = jax.random.key(1)
    crops = transforms.cifar10(32, padding=4).train(key, jnp.asarray(IMAGES))
    expected = transforms.cifar10(32).train(key, jnp.asarray(padded))
    np.testing.assert_allclose(crops, expected, rtol=1e-5, atol=1e-5)
    assert crops.shape == (64, 32, 32, 3)
    black = transforms.cifar10(32).test(jnp.zeros((1, 32, 32, 3), jnp.uint8))[0, 0, 0]
    corners = np.asarray(crops)[:, [0, 0, -1, -1], [0, -1, 0, -1]]
    assert np.isclose(corners, black, rtol=1e-5, atol=1e-5).all(-1).any()


def test_test_images_are_never_padded():
    whole = transforms.cifar10(32, padding=4).test(jnp.asarray(IMAGES))
    np.testing.assert_array_equal(whole, transforms.cifar10(32).test(jnp.asarray(IMAGES)))
