"""The code that Python runs first in the processes of a test: `trainers.environment`."""

import os


exec(os.environ.get("BEFORE", ""))
