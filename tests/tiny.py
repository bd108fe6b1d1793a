"""A trainer that starts fast, for tests of everything around it."""

import dataclasses
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.digits import CONFIG
from train.config import Config, TransformerConfig, WorkersConfig, methods
from train.data import digits
from train.data.arrays import Dataset, Images
from train.run import loop
from train.run import open as opening
from train.task import models
from train.task.asynchronous import AsynchronousExperiment
from train.task.experiment import Experiment, Task
from train.task.models import MODELS


SMALL = dataclasses.replace(
    CONFIG,
    workers=WorkersConfig(nodes=2, locals=2),
    method=methods.make("lsgd", local_period=2, global_period=4, loss_window=3),
    steps=12,
    batch_size=16,
    log_every=4,
    test_every=6,
    checkpoint_every=6,
)


def of_words(config, data, learning_rate, warmup_steps):
    """An experiment on text or translation with a small transformer, 60 steps long."""
    rate = dict(learning_rate=learning_rate, warmup_steps=warmup_steps)
    return dataclasses.replace(
        config,
        data=data,
        transformer=TransformerConfig(layers=1, heads=2, width=16),
        workers=WorkersConfig(1, 2),
        optimizer=dataclasses.replace(config.optimizer, **rate),
        method=methods.make("diloco", period=10),
        steps=60,
        log_every=20,
        test_every=30,
        checkpoint_every=30,
    )


# Settings on which an experiment does not depend.
OF_THE_RUN = (
    "steps log_every test_every checkpoint_every keep_checkpoints stop_after_nonfinite "
    "wandb runs run_dir resume distributed"
).split()


class Tiny(nn.Module):
    """A network of one layer."""

    num_classes: int = 10

    @nn.compact
    def __call__(self, x, train):
        return nn.Dense(self.num_classes)(x.reshape(x.shape[0], -1))


class TinyNorm(nn.Module):
    """A network of one layer with batch statistics."""

    num_classes: int = 10

    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train)(x.reshape(x.shape[0], -1))
        return nn.Dense(self.num_classes)(x)


class Wide(nn.Module):
    """A network of two layers with 0.3 MB of parameters."""

    num_classes: int = 10

    @nn.compact
    def __call__(self, x, train):
        return Tiny(self.num_classes)(nn.Dense(1024)(x.reshape(x.shape[0], -1)), train)


def made_up_digits():
    """Images in the shape of the digits. Importing the real ones takes seconds."""
    rng = np.random.default_rng(0)
    labels = rng.integers(10, size=1797, dtype=np.int32)
    noise = rng.integers(128, size=(1797, 8, 8, 1))
    classes = rng.integers(128, size=(10, 8, 8, 1))
    images = (classes[labels] + noise).astype(np.uint8)
    train, test = Images(images[:1437], labels[:1437]), Images(images[1437:], labels[1437:])
    return Dataset(train, test, num_classes=10)


def install(network=Tiny, share=False, set=setattr):
    """Makes the trainer of this process use a small network, and draw no figures.

    share: whether equal experiments are built and compiled only once.
    """
    small = {"digits-cnn": network, "digits-bn": TinyNorm}
    set(models, "MODELS", MODELS | small)
    set(digits, "load", made_up_digits)
    set(loop, "draw", lambda folder: None)
    if share:
        from paper.landscape import saved_run

        set(opening, "Experiment", shared)
        set(
            opening,
            "AsynchronousExperiment",
            functools.partial(shared, kind=SharedAsynchronousExperiment),
        )
        set(saved_run, "Experiment", shared)


def note_traces(set=setattr):
    """The list of the tasks whose steps, without an exchange, are traced from now on."""
    seen = []
    defer = Task.defer

    @functools.wraps(defer)
    def noted(self, *arguments):
        seen.append(self)
        return defer(self, *arguments)

    set(Task, "defer", noted)
    return seen


def run_shared(config):
    """Trains in this process with a shared experiment: (run, result)."""
    with pytest.MonkeyPatch.context() as patch:
        install(share=True, set=patch.setattr)
        run = opening.open_run(config)
        return run, loop.train(run)


def train_shared(config):
    """Trains in this process with a shared experiment. Returns the result."""
    return run_shared(config)[1]


def of_all_runs(config):
    """The configuration without the settings on which an experiment does not depend."""
    defaults = {x.name: x.default for x in dataclasses.fields(Config)}
    return dataclasses.replace(config, **{name: defaults[name] for name in OF_THE_RUN})


def shared(config, *_, kind=None, **__):
    """The experiment of a configuration, shared by all its runs in this process."""
    return (kind or Shared).of(of_all_runs(config))


class Shared(Experiment):
    """An experiment that computes its first state once."""

    of = functools.cache(lambda config: Shared(config))

    @functools.cached_property
    def _first(self):
        return super().init()

    def init(self):
        return jax.tree.map(jnp.copy, self._first)


class SharedAsynchronousExperiment(AsynchronousExperiment):
    """The same for asynchronous workers."""

    of = functools.cache(lambda config: SharedAsynchronousExperiment(config))


def leaves(state):
    """The arrays of a training state by name, in host memory."""
    key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    plain = lambda x: np.asarray(jax.random.key_data(x) if key(x) else x)
    return {
        jax.tree_util.keystr(path): plain(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(state)
    }


def assert_equal_to_the_bit(state, other):
    a, b = leaves(state), leaves(other)
    assert a.keys() == b.keys() and len(a) > 10
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)
