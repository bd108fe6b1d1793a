"""The named experiments, in the folder `configs` beside the trainer.

`import configs` would take a package of this name in the current folder.
"""

import dataclasses
import importlib

from train.config.schema import Config
from train.process.names import CONFIGS


__path__ = [str(CONFIGS)]


def load(name: str) -> tuple[str, Config]:
    """Imports an experiment: its description and its configuration."""
    module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
    config = dataclasses.replace(module.CONFIG, experiment=name)
    return (module.__doc__ or "").strip(), config
