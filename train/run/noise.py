"""What libraries print of a checkpoint that fails, besides raising an error."""

import logging
import sys
from typing import Any


def silence() -> None:
    """Has Orbax and TensorStore print nothing of what they also raise."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _show_unless_noise


def _show_unless_noise(unraisable: Any) -> None:
    """TensorStore tells a loop that has ended of each failure after the first one."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)
