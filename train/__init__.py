"""The trainer: python -m train NAME."""

import logging


# Matplotlib takes a temporary folder where HOME cannot be written, and says so each time.
logging.getLogger("matplotlib").setLevel(logging.ERROR)
