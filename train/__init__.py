"""The trainer: python -m train NAME. `train.load(RUN)` loads what it has trained."""

import logging
import sys
from typing import Any

from train.process.messages import check_installed


# If HOME is not writable, matplotlib uses a temporary folder and warns about it each time.
logging.getLogger("matplotlib").setLevel(logging.ERROR)

PACKAGES = (
    *("jax", "optax", "filelock", "flax", "grain", "matplotlib", "numpy", "orbax", "PIL"),
    *("rich", "tensorboardX", "tyro"),
)


def _is_command() -> bool:
    """Whether this import is the start of `python -m train` or `python -m train.NAME`."""
    if sys.argv[:1] != ["-m"]:  # which stands there while Python looks for the module
        return False
    words = (word.removeprefix("-m") for word in sys.orig_argv)
    return any(word.partition(".")[0] == __name__ for word in words)


if _is_command():
    try:
        check_installed("the trainer", "train", *PACKAGES)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def __getattr__(name: str) -> Any:
    """Imports `load` when it is used, because it imports jax."""
    if name != "load":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from train.run.loading import load

    return load
