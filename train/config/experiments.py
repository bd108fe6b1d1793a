"""The named experiments, in the folder `configs` beside the trainer.

`import configs` would take a package of this name in the current folder.
"""

import dataclasses
import importlib
import pathlib
import pkgutil

from train.config.schema import Config


__path__ = [str(pathlib.Path(__file__).parents[2] / "configs")]


def names() -> list[str]:
    """The names of all experiments: those of the files, with hyphens.

    >>> names()[:3]
    ['cifar10-cnn7', 'cifar10-resnet20', 'cifar10-vgg16']
    """
    return [module.name.replace("_", "-") for module in pkgutil.iter_modules(__path__)]


def load(name: str) -> tuple[str, Config]:
    """Imports an experiment: its description and its configuration."""
    module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    config = dataclasses.replace(module.CONFIG, experiment=name)
    return (module.__doc__ or "").strip(), config
