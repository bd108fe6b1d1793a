"""Opening a run: everything that training needs, before the first step."""

import dataclasses
import functools
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import lsgd_jax as lj
from train.cluster import shared_folder
from train.cluster.session import Session
from train.cluster.signals import StopSignals, StopTogether
from train.config import settings
from train.config.schema import Config, fields
from train.metrics import log, trackers
from train.metrics.buffer import MetricsBuffer
from train.metrics.log import MetricsLog
from train.metrics.progress import Progress
from train.metrics.recent import RecentLosses
from train.process import numerics
from train.process.command import tell_of_lost_output
from train.process.exit_status import STOPPED
from train.process.messages import check_installed, counted
from train.run import folder as run_folder
from train.run import resharding
from train.run.checkpoints import Checkpoints
from train.run.lock import RunLock
from train.run.resharding import Restored
from train.run.result import Tested, where
from train.run.resuming import tell_launcher
from train.run.stopwatch import Pace, Stopwatch
from train.task.asynchronous import AsynchronousExperiment
from train.task.experiment import BaseExperiment, Experiment
from train.task.forward import Check


MANY = 128  # workers per process above which placing them takes a while


class Run:
    """An open run. Training changes only `state`, `step` and the last four attributes.

    Args:
      config: the configuration.
      session: this process among the processes of the run.
      experiment: the configuration, built.
      folder: the run folder.
      start: the starting point.
      checkpoints: the checkpoints in the run folder.
      metrics: the log of metrics in the run folder.
      progress: messages and progress on the screen.
      lock: holds the run folder; None in all processes but the main one.

    Attributes:
      state: the training state after `step` steps, see `train.task.state`.
      step: steps taken.
      resizing: how the grid of workers has changed, or None.
      stopwatch: seconds of training; started with it.
      pace: steps per second.
      buffer: measurements that are not in the log yet.
      stop_signals: Ctrl-C and SIGTERM.
      lowest: the first measure of the best test that has a checkpoint, otherwise inf.
      test_is_due: whether the test of this step was left, or is about to begin.
      last_test: the step of the latest test of this session and its result, or None.
      center: the center of the current state, if `find_center` has computed it.
    """

    def __init__(
        self,
        config: Config,
        session: Session,
        experiment: BaseExperiment,
        folder: pathlib.Path,
        start: Restored,
        checkpoints: Checkpoints,
        metrics: MetricsLog,
        progress: Progress,
        lock: RunLock | None,
    ):
        self.config = config
        self.session = session
        self.experiment = experiment
        self.folder = folder
        self.checkpoints = checkpoints
        self.metrics = metrics
        self.progress = progress
        self.lock = lock
        self.state: Any = start.state
        self.step = start.step
        self.resizing = start.resizing
        self.stopwatch = Stopwatch(start.seconds, start.compile_seconds)
        every = config.log_every
        self.pace = Pace(at_least=every // 2)
        method = getattr(experiment, "method", None)
        self.buffer = MetricsBuffer(
            experiment.workers,
            start.state.opt_state,
            start.recent,
            # Asynchronous workers have a method of another kind, which pulls in no step.
            method if isinstance(method, lj.Exchange) else None,
            start.step,
            start.losses,
            closes=lambda step: min(-(-step // every) * every, config.steps),
            at_home=None if experiment.waited is None else experiment.at_home,
            known=experiment.known,
            late=experiment.late,
            measures=functools.partial(measures_distances, config, session),
            around_exchanges=not session.has_others,
        )
        crew = experiment.crew
        self.stop_signals = StopSignals(session) if crew is None else StopTogether(crew)

        def measure_of_the_best() -> str:
            best = checkpoints.best()
            return "inf" if best is None else repr(best.value)

        self.lowest = float(session.of_main(measure_of_the_best))
        self.test_is_due = start.test_is_due
        self.last_test: tuple[int, Tested] | None = None
        self.center: dict[str, Any] | None = None

    def find_center(self, check: Check) -> dict[str, Any]:
        """The variables of the center, computed once for a test and a checkpoint.

        Args:
          check: called before each batch of a reestimation of its batch statistics.

        Raises:
          DataError: no data can be read for the reestimation.
          StopRequested: by `check`.
        """
        if self.center is None:
            self.center = self.experiment.center(self.state, check)
        return self.center

    def passed(self, every: int, since: int) -> bool:
        """Whether a multiple of `every` was passed after step `since`.

        Always False at the last step: the end of the run reports, tests and saves.
        """
        return self.step < self.config.steps and self.step // every > since // every

    def write(self, kind: str, step: int | None = None, **values: Any) -> None:
        """Writes an event to the metrics. `step` defaults to the current one."""
        step = self.step if step is None else step
        self.metrics.write(kind, step, self.stopwatch.seconds, **values)


def open_run(config: Config, session: Session | None = None) -> Run:
    """Opens a new run, or the one to resume.

    Args:
      config: the configuration.
      session: this process among the processes of the run. Defaults to this one alone.

    Raises:
      ValueError: the configuration, the data or the run folder is not valid. Nothing has
        been written then.
    """
    session = Session() if session is None else session
    resumed = None
    if config.resume and session.tests:
        resumed = run_folder.to_resume(config)
    if resumed is not None:
        run_folder.check_same_experiment(config, resumed)
        shared_folder.check(session, resumed)
    check_packages(config)
    progress = Progress(config.steps, process=session.process_id)
    lock = None if resumed is None else hold(resumed, session, progress)
    workers = config.workers.nodes * config.workers.locals
    if workers > MANY * session.num_processes:
        progress.say(f"placing {workers:,} workers, which takes a while")
    kind = AsynchronousExperiment if config.method.is_asynchronous else Experiment
    experiment = kind(config, session=session, warn=progress.warn_here)
    if resumed is not None:
        check_begun(config, experiment, resumed, progress)
    fresh = experiment.init()  # finds more errors, and there is no folder yet
    folder = own_folder(config, session, experiment, progress, resumed)
    if not session.tests:
        config = dataclasses.replace(config, run_dir=str(folder), resume=True)
    if resumed is None:
        lock = hold(folder, session, progress)
    if session.is_main:
        keep(experiment.forward.kept, folder)
    if session.prints:
        tell_launcher(config, folder)
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
    if experiment.crew is not None:
        start = start_together(experiment, start)
    written_by_main(session, folder, lambda: lock and lock.sign())
    progress.resume(start.step)
    if start.step > config.steps:
        progress.say(
            f"the run has taken {counted(start.step, 'step')} already, more than --steps "
            f"{config.steps}: it takes no more"
        )
    services = tracked(config, folder, progress) if session.prints else []
    metrics = MetricsLog(folder, progress.warn_here, session.is_main, check, services)
    run = Run(
        config=config,
        session=session,
        experiment=experiment,
        folder=folder,
        start=start,
        checkpoints=checkpoints,
        metrics=metrics,
        progress=progress,
        lock=lock,
    )
    session.where = lambda: where(config, folder, run.step)
    tell_of_lost_output(lambda text: run.write("warning", text=text))
    return run


def check_packages(config: Config) -> None:
    """Raises ValueError unless the packages that a configuration needs are installed."""
    if config.method.is_asynchronous:
        check_installed("an asynchronous run", "async", "ray")
    for service in projects(config):
        check_installed(f"`{service}`", service, service)


def check_begun(
    config: Config, experiment: BaseExperiment, folder: pathlib.Path, progress: Progress
) -> None:
    """Raises ValueError unless a run can be resumed with these settings and data."""
    check_same_start(config, experiment.forward.sizes, folder, progress.warn)
    check_kept(experiment.forward.kept, folder)
    check_checkpoints(folder)


def own_folder(
    config: Config,
    session: Session,
    experiment: BaseExperiment,
    progress: Progress,
    resumed: pathlib.Path | None,
) -> pathlib.Path:
    """The run folder in which this process writes, made unless it is there.

    Where processes may be lost, process 0 tells the others where it is. That of another
    process stands below it, and has begun already if the process starts again.

    Raises:
      ValueError: it is of another run, or cannot be made.
    """
    if session.tests:
        folder = resumed or run_folder.create(config, session)
        if session.words is not None:
            session.words.of_main(str(folder))
        return folder
    assert session.words is not None
    main = pathlib.Path(session.words.of_main(""))
    folder = run_folder.of_process(config, session.process_id, main)
    run_folder.check_same_experiment(config, folder)
    check_begun(config, experiment, folder, progress)
    return folder


def start_together(experiment: BaseExperiment, start: Restored) -> Restored:
    """The starting point in one of several processes that may be lost.

    A process whose checkpoint is of another step takes from the others what all have in
    common, and keeps the rest.
    """
    state, step = experiment.begin(start.state, start.step)
    start = start._replace(state=state, test_is_due=False)
    return start if step == start.step else start._replace(step=step, losses=[])


def measures_distances(config: Config, session: Session, step: int) -> bool:
    """Whether the distance between workers is measured before a report at this step.

    It sends as much as an exchange. So among several processes it is measured as often as
    the center is tested, which sends the parameters, too, and never around exchanges.
    Where processes may be lost, each one sees its own workers only.
    """
    if session.words is not None:
        return False
    if session.num_processes == 1 or step >= config.steps:
        return True
    last = max(0, step - config.log_every)
    return step // config.test_every > last // config.test_every


def tracked(
    config: Config, folder: pathlib.Path, progress: Progress
) -> list[trackers.Service]:
    """Opens the services to which the metrics are sent."""
    services = []
    for service, project in projects(config).items():
        last = log.last_steps(folder)
        services.append(
            trackers.Service(
                service, project, folder, fields(config), last, progress.warn_here
            )
        )
    return services


def projects(config: Config) -> dict[str, str]:
    """The projects to which the metrics are sent, by the packages of their services."""
    found = {name: getattr(config, name) for name in trackers.SERVICES}
    return {name: project for name, project in found.items() if project is not None}


def hold(folder: pathlib.Path, session: Session, progress: Progress) -> RunLock | None:
    """Locks a run folder. The main process does so for all processes of the run.

    Raises:
      ValueError: another run holds the folder, or it cannot be written to.
    """

    def lost(line: str) -> None:
        progress.close()
        line = f"{line}; this run has stopped {session.where()}"
        os._exit(session.leave(STOPPED, line))  # even if the main thread hangs

    held: list[RunLock] = []

    def take() -> None:
        held.append(RunLock(folder, progress.say, lost))

    written_by_main(session, folder, take)
    return held[0] if held else None


def written_by_main(
    session: Session, folder: pathlib.Path, write: Callable[[], object]
) -> None:
    """Calls `write`, which writes to a run folder, in the main process.

    Raises:
      ValueError: `write` raises one, or an OSError. All processes raise it.
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
    """Returns the latest checkpoint if the run is resumed, otherwise the fresh state."""
    if config.resume:
        restored = resharding.restore(checkpoints.restore_latest, fresh, experiment.workers)
        if restored is not None:
            if restored.recent.nonfinite_steps >= config.stop_after_nonfinite:
                restored.recent.nonfinite_steps = 0  # it was resumed deliberately
            return restored
        folder = run_folder.to_resume(config)
        progress.warn(f"{folder} holds no checkpoint yet; the run begins at step 0")
    unknown = RecentLosses.unknown(experiment.workers.num_workers)
    return Restored(0, fresh, 0.0, 0.0, unknown, losses=[], resizing=None)


def check_same_start(
    config: Config,
    sizes: Mapping[str, int],
    folder: pathlib.Path,
    warn: Callable[[str], None],
) -> None:
    """Raises ValueError if a run began with other data or settings than the current ones.

    Args:
      config: the settings, which agree with config.json.
      sizes: see `Forward.sizes`.
      folder: the run folder.
      warn: called with one line if packages have other versions than before.
    """
    if not (folder / log.METRICS).exists():
        return
    try:
        starts = log.read(folder).get("start", [])
    except OSError as error:
        raise ValueError(f"{folder / log.METRICS} cannot be read: {error}") from error
    now = settings.began_with(config)
    for start in starts:
        for name, count in sizes.items():
            before = start.get(name)
            if isinstance(before, int) and before != count:
                raise ValueError(
                    f"{folder} is a run on other data: with {before} "
                    f"{name.replace('_', ' ')}, not {count}"
                )
        begun = start.get("settings")
        if not isinstance(begun, dict):
            begun = {}
        for name, before in begun.items():
            if name in now and now[name] != before:
                raise ValueError(
                    f"{folder / run_folder.CONFIG} was edited: the run began with "
                    f"{name}={before}, and it says {name}={now[name]}"
                )
        _check_same_jax_settings(start, folder)
    if starts:
        _warn_of_other_versions(starts[-1], warn)


def _check_same_jax_settings(start: Mapping[str, Any], folder: pathlib.Path) -> None:
    """Raises ValueError if jax had settings at a start that give other numbers."""
    before = start.get("jax_settings")
    if not isinstance(before, dict):
        return
    now = numerics.jax_settings()
    for name, value in before.items():
        if name in now and now[name] != value:
            variable = name.upper()
            remedy = f"unset {variable}" if value is None else f"set {variable}={value}"
            raise ValueError(
                f"{folder} is a run with {name}={value}, not {now[name]}; {remedy} to "
                "resume it"
            )


def _warn_of_other_versions(start: Mapping[str, Any], warn: Callable[[str], None]) -> None:
    """Warns if packages have other versions than at a start, which may change numbers."""
    before = start.get("packages")
    now = numerics.versions()
    if not isinstance(before, dict):
        return
    changed = [x for x in now if before.get(x, now[x]) != now[x]]
    named = ", ".join(f"{x} {before[x]} -> {now[x]}" for x in changed)
    if named:
        warn(f"the run continues with other versions: {named}")


def check_checkpoints(folder: pathlib.Path) -> None:
    """Raises ValueError if a run has lost its checkpoints; it would begin at step 0.

    A run creates their folder before it writes metrics, which note the first checkpoint.
    """
    path = folder / run_folder.CHECKPOINTS
    events = log.read(folder) if (folder / log.METRICS).exists() else {}
    wrong = ""
    if path.is_dir():
        if "saved" in events and not any(path.iterdir()):
            wrong = "is empty, although the run has saved"
    elif path.exists():
        wrong = "is not a folder"
    elif path.is_symlink() or events:
        wrong = "is missing (is its disk mounted?)"
    if wrong:
        raise ValueError(
            f"{path} must hold the checkpoints of the run, but it {wrong}; to begin again, "
            "start a run in another folder"
        )


def check_kept(kept: Mapping[str, str], folder: pathlib.Path) -> None:
    """Raises ValueError if files of the data in a run folder are not those of these data.

    Args:
      kept: see `Forward.kept`.
      folder: the run folder.
    """
    for name, text in kept.items():
        path = folder / name
        if path.exists() and path.read_text() != text:
            raise ValueError(f"{folder} is a run on other data, which {path} describes")


def keep(kept: Mapping[str, str], folder: pathlib.Path) -> None:
    """Writes the files of the data that a run folder does not have yet."""
    for name, text in kept.items():
        if not (folder / name).exists():
            (folder / name).write_text(text)
