"""python -m train NAME: trains a named experiment. See --help."""

import signal
import sys

from train import cli
from train.cluster import devices
from train.cluster import key_value_store as coordination
from train.cluster import rendezvous as distributed
from train.data.arrays import DataError
from train.run import recovery as survival
from train.run.loop import Run, resume_command


def main(arguments: list[str]) -> int:
    """Trains; the exit status is 0, 1 (stopped, or not saved), 2 (wrong usage), 130.

    With several processes also 70 (an unexpected error) and 75 (a process was lost).
    """
    try:
        config = cli.parse(arguments)
        distributed.join(config)
        devices.provide(config.workers.nodes * config.workers.locals)
        run = Run(config)
    except ValueError as error:
        if coordination.may_mean_a_loss(error):
            raise
        return distributed.leave(2, str(error))
    except KeyboardInterrupt:
        return distributed.leave(130, "interrupted before training began; nothing was lost")
    try:
        result = survival.train(run)
    except KeyboardInterrupt:
        kept = "interrupted a second time; checkpoints written before are kept, to go on: "
        return distributed.leave(130, kept + resume_command(config, run.folder))
    except DataError as error:
        again = f"to go on later: {resume_command(config, run.folder)}"
        return distributed.leave(1, f"{error}; {again}")
    if result.stopped_by == signal.SIGINT:
        return 130
    return 0 if result.saved and result.stopped_by != "nonfinite" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
