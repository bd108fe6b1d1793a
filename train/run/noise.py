"""What libraries print about checkpoints that fail, beside the error that they raise."""

import logging
import sys
import types


def silence() -> None:
    """Has Orbax and TensorStore print nothing of what they also raise."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _print_unless_noise


def _print_unless_noise(
    kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
) -> None:
    """Once a read or write has failed TensorStore has no loop left to report the others to."""
    if str(error) != "Event loop is closed":
        sys.__excepthook__(kind, error, trace)
