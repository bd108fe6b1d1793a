"""python -m train NAME: trains a named experiment. See --help."""

import signal
import sys

from train.process import command, interrupts, names


if __name__ == "__main__":
    interrupts.end_at_once()  # before jax is imported
    if names.is_general(sys.argv[1:]):
        sys.exit(command.run(names.main, leaves_files=True))

try:
    import lsgd_jax as lj
    from train.cluster import devices, rendezvous
    from train.cluster.session import Session, WorkersLost, is_of_xla
    from train.config.schema import Config
    from train.data.arrays import DataError
    from train.metrics.log import METRICS
    from train.process import compilation_cache
    from train.process.exit_status import (
        CRASHED,
        INTERRUPTED,
        RESUME,
        STOPPED,
        SUCCESS,
        WRONG_USAGE,
    )
    from train.process.messages import NOTHING_LOST, check_installed
    from train.run import cli, lock
    from train.run import folder as run_folder
    from train.run.resuming import how_to_resume
except ValueError as error:  # jax rejects an environment variable
    print(f"error: {error}", file=sys.stderr)
    sys.exit(2)


def main(arguments: list[str]) -> int:
    """Trains and returns the exit status.

    0: success, 1: stopped or not saved, 2: wrong usage, 75: saved after SIGTERM, 130:
    interrupted. With several processes also 70: an unexpected error, and 75: a process was
    lost.
    """
    session = Session()
    try:
        config = cli.parse(arguments)
        if config.ray.processes and config.distributed.process_id is None:
            return on_ray(config, arguments)
        if config.method.is_asynchronous:
            devices.leave_to_workers()
        else:
            session = rendezvous.join(config)
    except ValueError as error:
        return session.leave(WRONG_USAGE, str(error))
    except ConnectionError as error:  # not RESUME: no other process is to blame
        return session.leave(CRASHED, str(error))
    except KeyboardInterrupt:
        return session.leave(INTERRUPTED, interrupts.NOT_BEGUN)
    with session.ended_by_errors():
        return train(config, session)


def on_ray(config: Config, arguments: list[str]) -> int:
    """Trains in lock step in processes of Ray; returns the exit status."""
    check_installed("`ray.processes`", "async", "ray", "pyarrow", "pandas")
    from train.cluster import ray_train

    folder = run_folder.choose(config).absolute()
    files = folder / run_folder.CONFIG, folder / METRICS
    status, reason = ray_train.run(config, arguments, *files)
    if not reason:
        return status
    lock.remove_left(folder, patience=5.0)
    again = NOTHING_LOST
    if (folder / run_folder.CONFIG).exists():
        again = how_to_resume(config, folder)
    return Session().leave(status, f"{reason}; {again}")


def train(config: Config, session: Session) -> int:
    """Trains together with the processes of the session; returns the exit status."""
    from train.run import loop  # takes half a second, which --help can do without
    from train.run.open import open_run
    from train.run.result import ENDED

    try:
        compilation_cache.use(say=session.prints, each=session.words is not None)
        interrupts.check()
        run = open_run(config, session)
        interrupts.check()
    except ValueError as error:
        if is_of_xla(error):
            raise
        return session.leave(WRONG_USAGE, str(error))
    except lj.LoopEnded as error:  # before this process has begun
        if not error.is_over:
            return session.leave(RESUME, str(error))
        print(f"{error}: nothing is left to do for this process")
        return SUCCESS
    except KeyboardInterrupt:
        return session.leave(INTERRUPTED, interrupts.NOT_BEGUN)
    try:
        result = loop.train(run)
    except KeyboardInterrupt:
        kept = "interrupted a second time; checkpoints written before are kept"
        return session.leave(INTERRUPTED, f"{kept}; {how_to_resume(config, run.folder)}")
    except (DataError, WorkersLost) as error:
        again = how_to_resume(config, run.folder, "to resume later")
        return session.leave(STOPPED, f"{error}; {again}")
    if result.stopped_by == signal.SIGINT:
        return INTERRUPTED
    if not result.is_good:
        return STOPPED
    return RESUME if result.stopped_by in (signal.SIGTERM, ENDED) else SUCCESS


if __name__ == "__main__":
    interrupts.listen()
    sys.exit(command.run(main, leaves_files=True))
