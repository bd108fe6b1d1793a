"""python -m train NAME: trains a named experiment. See --help."""

import signal
import sys

from train import cli, devices
from train.loop import Run


def main(arguments: list[str]) -> int:
    """Trains; the exit status is 0, 1 (stopped, or not saved), 2 (wrong usage), 130."""
    try:
        config = cli.parse(arguments)
        devices.provide(config.workers.nodes * config.workers.locals)
        run = Run(config)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted before training began; nothing was lost", file=sys.stderr)
        return 130
    try:
        result = run.train()
    except KeyboardInterrupt:
        print(
            "interrupted a second time; checkpoints written before are kept, to go on: "
            f"python -m train {config.name} --run-dir {run.folder} --resume",
            file=sys.stderr,
        )
        return 130
    if result.stopped_by == signal.SIGINT:
        return 130
    return 0 if result.saved and result.stopped_by != "nonfinite" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
