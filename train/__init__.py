"""The trainer: python -m train NAME. `train.load(RUN)` loads what it has trained."""

import logging
import sys
from typing import Any

from train.process import names
from train.process.messages import check_installed


# If HOME is not writable, matplotlib uses a temporary folder and warns about it each time.
logging.getLogger("matplotlib").setLevel(logging.ERROR)

PACKAGES = (
    *("jax", "optax", "filelock", "flax", "grain", "matplotlib", "numpy", "orbax", "PIL"),
    *("rich", "tensorboardX", "tyro"),
)


def _command() -> str | None:
    """The command `train` or `train.NAME` that Python starts by this import, or None."""
    if sys.argv[:1] != ["-m"]:  # which stands there while Python looks for the module
        return None
    words = (word.removeprefix("-m") for word in sys.orig_argv)
    return next((word for word in words if word.partition(".")[0] == __name__), None)


_started = _command()
if _started is not None:
    try:
        check_installed("the trainer", "train", *PACKAGES)
        names.check(_started, sys.argv[1:])  # a typo need not wait for jax
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def __getattr__(name: str) -> Any:
    """Imports `load` when it is used, because it imports jax."""
    if name != "load":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from train.run.loading import load

    return load
