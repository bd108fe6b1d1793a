"""A trainer that starts fast, for tests of what surrounds it."""

import flax.linen as nn
import numpy as np

from train.data import digits
from train.data.arrays import Dataset, Images
from train.run import loop
from train.task import experiment
from train.task.models import MODELS


class Tiny(nn.Module):
    """One layer, in place of any other network."""

    num_classes: int = 10

    @nn.compact
    def __call__(self, x, train):
        return nn.Dense(self.num_classes)(x.reshape(x.shape[0], -1))


class TinyNorm(nn.Module):
    """The same with batch statistics."""

    num_classes: int = 10

    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train)(x.reshape(x.shape[0], -1))
        return nn.Dense(self.num_classes)(x)


class Wide(nn.Module):
    """One layer more, with 0.3 MB of parameters."""

    num_classes: int = 10

    @nn.compact
    def __call__(self, x, train):
        return Tiny(self.num_classes)(nn.Dense(1024)(x.reshape(x.shape[0], -1)), train)


def made_up_digits():
    """Images of the digits' shape; to import what brings the real ones takes seconds."""
    rng = np.random.default_rng(0)
    labels = rng.integers(10, size=1797, dtype=np.int32)
    noise = rng.integers(128, size=(1797, 8, 8, 1))
    classes = rng.integers(128, size=(10, 8, 8, 1))
    images = (classes[labels] + noise).astype(np.uint8)
    train, test = Images(images[:1437], labels[:1437]), Images(images[1437:], labels[1437:])
    return Dataset(train, test, num_classes=10)


def install(network=Tiny, figures=False, set=setattr):
    """Has the trainer of this process train such a network, and draw no figures."""
    small = {"digits-cnn": network, "digits-bn": TinyNorm}
    set(experiment, "MODELS", MODELS | small)
    set(digits, "load", made_up_digits)
    if not figures:
        set(loop, "draw", lambda folder: None)
