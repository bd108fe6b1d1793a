"""The trainer: python -m train NAME."""

import logging


# If HOME is not writable, matplotlib uses a temporary folder and warns about it each time.
logging.getLogger("matplotlib").setLevel(logging.ERROR)
