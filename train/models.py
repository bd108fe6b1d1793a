"""The networks, as Flax linen modules: images [B, H, W, C] -> logits [B, classes]."""

from typing import ClassVar

import flax.linen as nn
from jax import Array


def max_pool_2x2(x: Array) -> Array:
    """The maximum over 2 x 2 patches: [B, H, W, C] -> [B, H // 2, W // 2, C].

    On CPUs the backward pass of a maximum over a reshape is far faster than that of
    `nn.max_pool` (a select-and-scatter).

    >>> import jax.numpy as jnp
    >>> max_pool_2x2(jnp.arange(16.0).reshape(1, 4, 4, 1))[0, :, :, 0].tolist()
    [[5.0, 7.0], [13.0, 15.0]]
    """
    batch, height, width, channels = x.shape
    x = x[:, : height // 2 * 2, : width // 2 * 2]
    return x.reshape(batch, height // 2, 2, width // 2, 2, channels).max(axis=(2, 4))


class DigitsCNN(nn.Module):
    """A small CNN for 8 x 8 images."""

    num_classes: int = 10

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        x = nn.relu(nn.Conv(32, (3, 3))(x))
        x = nn.relu(nn.Conv(64, (3, 3))(x))
        x = max_pool_2x2(x).reshape(x.shape[0], -1)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        x = nn.relu(nn.Dense(128)(x))
        return nn.Dense(self.num_classes)(x)


class DigitsBatchNormCNN(nn.Module):
    """The same with batch normalization."""

    num_classes: int = 10

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        for features in (32, 64):
            x = nn.Conv(features, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        x = max_pool_2x2(x).reshape(x.shape[0], -1)
        x = nn.relu(nn.Dense(128)(x))
        return nn.Dense(self.num_classes)(x)


class CNN7(nn.Module):
    """The 7-layer CNN of LSGD's CIFAR-10 experiments, for 28 x 28 crops: 351,946 numbers.

    Teng et al., NeurIPS 2019, released code. There is no nonlinearity behind the 256 units.
    """

    num_classes: int = 10
    image_size: ClassVar[int] = 28

    @nn.compact
    def __call__(self, x: Array, train: bool) -> Array:
        x = max_pool_2x2(nn.relu(nn.Conv(64, (5, 5), padding="VALID")(x)))
        x = max_pool_2x2(nn.relu(nn.Conv(128, (5, 5), padding="VALID")(x)))
        x = nn.relu(nn.Conv(64, (3, 3), padding="VALID")(x))
        x = nn.Dense(256)(x.reshape(x.shape[0], -1))
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(self.num_classes)(x)


MODELS = {"digits-cnn": DigitsCNN, "digits-bn": DigitsBatchNormCNN, "cnn7": CNN7}
