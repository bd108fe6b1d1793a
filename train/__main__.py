"""python -m train NAME: trains a named experiment. See --help."""

import signal
import sys

from train import interrupts


if __name__ == "__main__":
    interrupts.listen()  # before jax is imported

from train import cli, command, compilation_cache  # noqa: E402
from train.cluster import devices, rendezvous  # noqa: E402
from train.cluster.exit_status import (  # noqa: E402
    INTERRUPTED,
    STOPPED,
    SUCCESS,
    WRONG_USAGE,
)
from train.cluster.lost import WorkersLost, may_mean_a_loss  # noqa: E402
from train.cluster.session import Session  # noqa: E402
from train.data.arrays import DataError  # noqa: E402
from train.run.resuming import resume_command  # noqa: E402


def main(arguments: list[str]) -> int:
    """Trains; the exit status is 0, 1 (stopped, or not saved), 2 (wrong usage), 130.

    With several processes also 70 (an unexpected error) and 75 (a process was lost).
    """
    session = Session.single()
    try:
        config = cli.parse(arguments)
        from train.run import recovery  # half a second that --help does without
        from train.run.open import open_run

        if config.method.is_asynchronous:
            devices.leave_to_workers()
        else:
            session = rendezvous.join(config)
            devices.provide(config.workers.devices, len(session.members))
        compilation_cache.use(say=session.is_main)
        interrupts.check()
        run = open_run(config, session)
        interrupts.check()
    except ValueError as error:
        if may_mean_a_loss(error):
            raise
        return session.leave(WRONG_USAGE, str(error))
    except KeyboardInterrupt:
        line = "interrupted before training began; nothing was lost"
        return session.leave(INTERRUPTED, line)
    try:
        result = recovery.train(run)
    except KeyboardInterrupt:
        kept = "interrupted a second time; checkpoints written before are kept, to go on: "
        return session.leave(INTERRUPTED, kept + resume_command(config, run.folder))
    except (DataError, WorkersLost) as error:
        again = f"to go on later: {resume_command(config, run.folder)}"
        return session.leave(STOPPED, f"{error}; {again}")
    if result.stopped_by == signal.SIGINT:
        return INTERRUPTED
    return SUCCESS if result.is_good else STOPPED


if __name__ == "__main__":
    sys.exit(command.run(main, leaves_files=True))
