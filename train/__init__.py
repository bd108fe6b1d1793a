"""The trainer: python -m train NAME. `train.load(RUN)` loads what it has trained."""

import logging
from typing import Any


# If HOME is not writable, matplotlib uses a temporary folder and warns about it each time.
logging.getLogger("matplotlib").setLevel(logging.ERROR)


def __getattr__(name: str) -> Any:
    """Imports `load` when it is used, because it imports jax."""
    if name != "load":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from train.run.loading import load

    return load
