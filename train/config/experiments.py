"""The named experiments, in the folder `configs` beside the trainer.

`import configs` would take a package of this name in the current folder.
"""

import dataclasses
import importlib
import pathlib
import pkgutil

from train.config.schema import Config


__path__ = [str(pathlib.Path(__file__).parents[2] / "configs")]


def named() -> dict[str, tuple[str, Config]]:
    """The experiments by name, as (description, configuration).

    >>> list(named())[:3]
    ['cifar10-cnn7', 'cifar10-resnet20', 'cifar10-vgg16']
    """
    found = {}
    for module in pkgutil.iter_modules(__path__):
        loaded = importlib.import_module(f"{__name__}.{module.name}")
        name, text = loaded.CONFIG.name, (loaded.__doc__ or "").strip()
        found[name] = text, dataclasses.replace(loaded.CONFIG, experiment=name)
    return found
