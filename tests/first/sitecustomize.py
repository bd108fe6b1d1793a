"""What Python runs first in the processes of a test: what `trainers.environment` says."""

import os


exec(os.environ.get("BEFORE", ""))
