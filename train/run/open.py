"""Opening a run: everything that training it needs, before the first step."""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

from train import config as configuration
from train.cluster import shared_folder
from train.cluster.exit_status import STOPPED
from train.cluster.session import Session
from train.cluster.signals import StopSignals
from train.command import tell_of_lost_output
from train.config import Config, check_installed
from train.metrics import log
from train.metrics.buffer import MetricsBuffer
from train.metrics.log import MetricsLog
from train.metrics.progress import Progress
from train.metrics.recent import RecentLosses
from train.run import folder as run_folder
from train.run import resharding
from train.run.checkpoints import Checkpoints
from train.run.lock import RunLock
from train.run.reporting import Reporter
from train.run.resharding import Resizing, Restored
from train.run.result import where
from train.run.stopwatch import Stopwatch
from train.task.asynchronous import AsynchronousExperiment
from train.task.experiment import BaseExperiment, Experiment


MANY = 128  # workers of a process, whose placing is felt


@dataclasses.dataclass
class Run:
    """A run that is open. Only `state` and `step` change while it is trained.

    Attributes:
      config: what to do.
      session: this process among those of the run.
      experiment: the configuration, built.
      folder: the run folder.
      state: of the training after `step` steps, see `train.task.state`.
      step: steps taken.
      resizing: how the workers have changed, or None.
      checkpoints: those of the run folder.
      stopwatch: seconds of training; started when training is.
      metrics: what the run folder says of training.
      buffer: what has not been written to it yet.
      progress: what the user sees.
      reporter: from the buffer to the metrics and the progress.
      stop_signals: Ctrl-C and SIGTERM.
      lock: holds the run folder; None in all processes but the main one.
    """

    config: Config
    session: Session
    experiment: BaseExperiment
    folder: pathlib.Path
    state: Any
    step: int
    resizing: Resizing | None
    checkpoints: Checkpoints
    stopwatch: Stopwatch
    metrics: MetricsLog
    buffer: MetricsBuffer
    progress: Progress
    reporter: Reporter
    stop_signals: StopSignals
    lock: RunLock | None

    def passed(self, every: int, since: int) -> bool:
        """Whether a multiple of `every` was passed after step `since`.

        The last step does not count: the end of the run reports, tests and saves.
        """
        return self.step < self.config.steps and self.step // every > since // every

    def write(self, kind: str, **values: Any) -> None:
        """Writes an event of this step to the metrics."""
        self.metrics.write(kind, self.step, self.stopwatch.seconds, **values)


def open_run(config: Config, session: Session | None = None) -> Run:
    """Opens a new run, or the one to resume.

    Args:
      config: what to do.
      session: this process among those of the run; None: this one by itself.

    Raises:
      ValueError: the configuration, the data or the run folder is not what it must be;
        nothing has been written then.
    """
    session = Session() if session is None else session
    resumed = run_folder.to_resume(config) if config.resume else None
    if resumed is not None:
        run_folder.check_same_experiment(config, resumed)
        shared_folder.check(session, resumed)
    if config.method.is_asynchronous:
        check_installed()
    progress = Progress(config.steps, process=session.process_id)
    lock = None if resumed is None else hold(resumed, session, progress)
    workers = config.workers.nodes * config.workers.locals
    if workers > MANY * session.num_processes:
        progress.say(f"placing {workers:,} workers, which takes a while")
    kind = AsynchronousExperiment if config.method.is_asynchronous else Experiment
    experiment = kind(config, session=session, warn=progress.warn_here)
    if resumed is not None:
        check_same_start(config, experiment.forward.sizes, resumed)
        check_kept(experiment.forward.kept, resumed)
    fresh = experiment.init()  # more fragments than leaves, say: before there is a folder
    folder = run_folder.create(config, session) if resumed is None else resumed
    if resumed is None:
        lock = hold(folder, session, progress)
    if session.is_main:
        for name, text in experiment.forward.kept.items():
            if not (folder / name).exists():
                (folder / name).write_text(text)
    session.where = lambda: where(config, folder, 0)
    check = (lambda: None) if lock is None else lock.check
    checkpoints = Checkpoints(
        folder / run_folder.CHECKPOINTS,
        config.keep_checkpoints,
        progress.warn_here,
        session,
        check,
    )
    start = starting_point(config, experiment, checkpoints, progress, fresh)
    written_by_main(session, folder, lambda: lock and lock.sign())
    progress.resume(start.step)
    if start.step > config.steps:
        progress.say(
            f"{start.step} steps have been taken already, more than --steps "
            f"{config.steps}: the run takes no other"
        )
    stopwatch = Stopwatch(start.notes["seconds"])
    metrics = MetricsLog(folder, progress.warn_here, session.is_main, check)
    run = Run(
        config=config,
        session=session,
        experiment=experiment,
        folder=folder,
        state=start.state,
        step=start.step,
        resizing=start.resizing,
        checkpoints=checkpoints,
        stopwatch=stopwatch,
        metrics=metrics,
        buffer=MetricsBuffer(
            experiment.workers,
            start.state.opt_state,
            start.recent,
            start.step,
            start.losses,
        ),
        progress=progress,
        reporter=Reporter(config, metrics, progress, stopwatch, start.recent),
        stop_signals=StopSignals(session),
        lock=lock,
    )
    session.where = lambda: where(config, folder, run.step)
    tell_of_lost_output(lambda text: run.write("warning", text=text))
    return run


def hold(folder: pathlib.Path, session: Session, progress: Progress) -> RunLock | None:
    """Holds a run folder for the processes of a run, the main one for all of them.

    Raises:
      ValueError: another run holds it, or it cannot be written to.
    """

    def lost(line: str) -> None:
        progress.close()
        line = f"{line}; this run has stopped {session.where()}"
        os._exit(session.leave(STOPPED, line))  # whatever the main thread hangs in

    held: list[RunLock] = []
    take = lambda: held.append(RunLock(folder, progress.say, lost))
    written_by_main(session, folder, take)
    return held[0] if held else None


def written_by_main(
    session: Session, folder: pathlib.Path, write: Callable[[], object]
) -> None:
    """Has the main process write to a run folder.

    Raises:
      ValueError: it cannot, or `write` raises one; in every process.
    """

    def attempt() -> str:
        try:
            write()
        except OSError as error:
            raise ValueError(f"{folder} cannot be written to: {error.strerror}") from error
        return ""

    session.of_main(attempt)


def starting_point(
    config: Config,
    experiment: BaseExperiment,
    checkpoints: Checkpoints,
    progress: Progress,
    fresh: Any,
) -> Restored:
    """The latest checkpoint if the run is resumed, or else the state before step 1."""
    if config.resume:
        restored = resharding.restore(checkpoints, fresh, experiment.workers)
        if restored is not None:
            return restored
        folder = run_folder.to_resume(config)
        progress.warn(f"{folder} holds no checkpoint yet; the run begins at step 0")
    unknown = RecentLosses.unknown(experiment.workers.num_workers)
    return Restored(0, fresh, {"seconds": 0.0}, unknown, losses=[], resizing=None)


def check_same_start(
    config: Config, sizes: Mapping[str, int], folder: pathlib.Path
) -> None:
    """Raises ValueError if a run began with other data or settings than those at hand.

    Args:
      config: the settings, which agree with those in config.json.
      sizes: see `Forward.sizes`.
      folder: of the run.
    """
    if not (folder / log.METRICS).exists():
        return
    try:
        starts = log.read(folder).get("start", [])
    except OSError as error:
        raise ValueError(f"{folder / log.METRICS} cannot be read: {error}") from error
    now = configuration.began_with(config)
    for start in starts:
        for name, count in sizes.items():
            before = start.get(name)
            if isinstance(before, int) and before != count:
                raise ValueError(
                    f"{folder} is a run on other data: with {before} "
                    f"{name.replace('_', ' ')}, and here are {count}"
                )
        settings = start.get("settings")
        for name, before in settings.items() if isinstance(settings, dict) else ():
            if name in now and now[name] != before:
                raise ValueError(
                    f"{folder / run_folder.CONFIG} was edited: the run began with "
                    f"{name}={before}, and it says {name}={now[name]}"
                )


def check_kept(kept: Mapping[str, str], folder: pathlib.Path) -> None:
    """Raises ValueError if a run folder keeps something else of the data.

    Args:
      kept: see `Forward.kept`.
      folder: of the run.
    """
    for name, text in kept.items():
        path = folder / name
        if path.exists() and path.read_text() != text:
            raise ValueError(f"{folder} is a run on another text: {path} is of that one")
