"""The training loop."""

import contextlib
import dataclasses
import pathlib
import platform
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

import lsgd_jax as lj
from train import config as configuration
from train.cluster.nodes import Nodes
from train.cluster.session import Session
from train.cluster.signals import StopSignals
from train.config import Config
from train.data.arrays import DataError
from train.metrics import log as records
from train.metrics.buffer import Ledger, Report
from train.metrics.log import Records
from train.metrics.plots import draw
from train.metrics.progress import Screen
from train.run import folder as run_folder
from train.run import resharding as elastic
from train.run.checkpoints import Checkpoints
from train.task.experiment import Experiment, TrainState


class Result(NamedTuple):
    """How a run ended.

    Attributes:
      folder: its run folder.
      step: steps taken.
      seconds: training time, without tests and checkpoints.
      center_error, best_error: test errors in %; nan if the run was not tested.
      stopped_by: the signal that stopped it early, 'nonfinite', or None.
      saved: whether the last checkpoint has arrived.
      leaving: the processes that leave while the others go on; none if the run has ended.
    """

    folder: pathlib.Path
    step: int
    seconds: float
    center_error: float
    best_error: float
    stopped_by: signal.Signals | str | None
    saved: bool
    leaving: list[int]


class Stopwatch:
    """Seconds of training; stands still while the run does something else."""

    def __init__(self, seconds: float = 0.0):
        self._before, self._since = seconds, time.monotonic()

    @property
    def seconds(self) -> float:
        """Training time so far, earlier sessions of the run included."""
        return self._before + time.monotonic() - self._since

    def __enter__(self) -> None:
        self._before = self.seconds

    def __exit__(self, *_) -> None:
        self._since = time.monotonic()


class Run:
    """One run: an experiment, its state, and where it is written.

    Args:
      config: what to do.
      session: the processes of the run; None: this one by itself.
      devices: see `Experiment`.

    Raises:
      ValueError: the configuration, the data or the run folder is not what it must be;
        nothing has been written then.
    """

    def __init__(
        self,
        config: Config,
        session: Session | None = None,
        devices: Sequence[jax.Device] | None = None,
    ):
        self.config = config
        self.session = session = Session.single() if session is None else session
        resumed = run_folder.to_resume(config) if config.resume else None
        if resumed is not None:
            run_folder.check_same_experiment(config, resumed)
        self.experiment = Experiment(
            config, warn=self._warn_here, devices=devices, session=session
        )
        if resumed is not None:
            self._check_same_data(resumed)
        self.folder = run_folder.create(config, session) if resumed is None else resumed
        self.step = 0
        session.tell_where(self._where)
        self._screen = Screen(config.steps, is_main=session.is_main)
        self._checkpoints = Checkpoints(
            self.folder / run_folder.CHECKPOINTS,
            config.keep_checkpoints,
            self._warn,
            session,
        )
        state: TrainState = self.experiment.init()
        seconds, before = 0.0, 0
        # Of each worker, over the last interval; inf if none of them was finite.
        self._recent_losses = np.full(self.experiment.workers.num_workers, np.inf)
        self._resizing: elastic.Resizing | None = None
        restored = None
        if config.resume:
            began = configuration.read(self.folder / run_folder.CONFIG)
            restored = elastic.restore(
                self._checkpoints, state, self.experiment.workers, began.workers
            )
        if restored is not None:
            self.step, state = restored.step, restored.state
            seconds, self._recent_losses = restored.notes["seconds"], restored.recent_losses
            self._resizing = restored.resizing
            # What an exchange costs may depend on the number of workers.
            now = _bytes_sent(lj.diagnostics(state.opt_state))
            before = restored.notes.get("bytes_sent", now) - now
        elif config.resume:
            self._warn(f"{self.folder} holds no checkpoint yet; the run begins at step 0")
        self.state, self._bytes_before = state, before
        self._watch = Stopwatch(seconds)
        self._records: Records | None = None
        self._reported_at: float | None = None
        self._nonfinite_steps = 0
        self._interrupts = StopSignals(session)
        self._saved_step = -1 if restored is None else self.step

    def train(self) -> Result:
        """Trains to the end, or until a signal, or until no worker is finite any more."""
        self._screen = Screen(self.config.steps, self.step, is_main=self.session.is_main)
        if not self.session.is_main:
            return self._train()
        with contextlib.closing(Records(self.folder, self._warn)) as self._records:
            return self._train()

    def _train(self) -> Result:
        config, experiment = self.config, self.experiment
        self._ledger = Ledger(experiment.workers, self.state.opt_state)
        self._watch = Stopwatch(self._watch.seconds)
        grid = [config.workers.nodes, config.workers.locals]
        sizes = experiment.data_sizes
        processes = len(self.session.members)
        self._write("start", workers=grid, processes=processes, **sizes, **_versions())
        self._screen.say(f"{experiment.workers}; run folder {self.folder}")
        if self._resizing is not None:
            self._screen.say(str(self._resizing))
            self._write("resized", **self._resizing.event())
        tested = None
        stopped_by: signal.Signals | str | None = None

        batches = experiment.batches(range(self.step, config.steps))
        backlog = experiment.backlog()
        reading = contextlib.closing(batches)
        interrupts = self._interrupts
        with interrupts, self._screen, reading, self._data_may_be_lost():
            while self.step < config.steps and stopped_by is None:
                batch = next(batches)
                self.state, loss = experiment.step(self.state, experiment.data, batch)
                backlog.add(loss)
                self.step += 1
                self._ledger.add(self.step, loss, self.state.opt_state)
                last = self.step == config.steps
                tested = None

                if self.step % config.log_every == 0 or last:
                    self._report(self._ledger.close_interval(self.step, self.state))
                if self.step % config.test_every == 0 and not last:
                    tested = self._test()
                if self.step % config.checkpoint_every == 0 and not last:
                    self._save()
                if self._nonfinite_steps >= config.stop_after_nonfinite:
                    stopped_by = "nonfinite"
                elif interrupts.stop_at(self.step):
                    stopped_by = interrupts.received

            self._report(self._ledger.flush())
            jax.block_until_ready(self.state)
            seconds = self._watch.seconds
            if stopped_by is None:
                tested = tested or self._test()
            begun = self._save()
            saved = self._checkpoints.close() and begun
            # Who is lost before here is missed by all, or by none.
            self.session.wait_for_all()

        center, best = tested or (np.nan, np.nan)
        leaving = self._leaving() if stopped_by == signal.SIGTERM else []
        result = Result(
            self.folder, self.step, seconds, center, best, stopped_by, saved, leaving
        )
        if not leaving:
            self._end(result)
        return result

    @property
    def is_to_stop(self) -> bool:
        """Whether this process has been asked to stop."""
        return self._interrupts.received is not None

    def _leaving(self) -> list[int]:
        """Those who were asked to stop, if others can go on without them."""
        asked = self._interrupts.asked
        left = Nodes.of(self.experiment.workers).without(asked)
        can = self.config.distributed.survive and 0 in left.processes
        return asked if can else []

    def abandon(self) -> None:
        """Ends what is under way after training has failed."""
        self._checkpoints.abandon()

    def _warn(self, text: str) -> None:
        """Of all processes, since it may concern only one."""
        if self.session.is_main:
            self._screen.warn(text)  # on the screen of that moment
        else:
            print(f"process {self.session.process_id}: warning: {text}", file=sys.stderr)

    def _where(self) -> str:
        """Where this run is and how to go on with it, if it can not go on by itself."""
        return (
            f"at step {self.step}; checkpoints are kept in "
            f"{self.folder / run_folder.CHECKPOINTS}; to go on: "
            f"{resume_command(self.config, self.folder)}"
        )

    def _warn_here(self, text: str) -> None:
        self._screen.warn_here(text)

    def _check_same_data(self, folder: pathlib.Path) -> None:
        """Raises ValueError if the run has begun with other data than those at hand."""
        if not (folder / run_folder.METRICS).exists():
            return
        for start in records.read(folder).get("start", []):
            for name, count in self.experiment.data_sizes.items():
                before = start.get(name, count)
                if before != count:
                    raise ValueError(
                        f"{folder} is a run on other data: with {before} "
                        f"{name.replace('_', ' ')}, and here are {count}"
                    )

    @contextlib.contextmanager
    def _data_may_be_lost(self) -> Iterator[None]:
        """Saves the state if no data can be read any more."""
        try:
            yield
        except DataError:
            if not self.session.has_others:  # the others would not take part
                self._save()
                self._checkpoints.close()
            raise

    def _test(self) -> tuple[float, float]:
        """Tests the center and the best worker: their errors in %."""
        self._report(self._ledger.flush())
        jax.block_until_ready(self.state)
        with self._watch:
            center = self.experiment.test_center(self.state)
            worker = int(np.argmin(self._recent_losses))
            best = self.experiment.test_worker(self.state, worker)
        self._write(
            "test",
            center_error=center.error,
            center_loss=center.loss,
            best_error=best.error,
            best_loss=best.loss,
            best_worker=worker,
            bytes_sent=self._bytes_sent(lj.diagnostics(self.state.opt_state)),
        )
        self._screen.tested(center.error)
        return center.error, best.error

    def _save(self) -> bool:
        """Begins to write a checkpoint of this step; whether that went well so far."""
        if self.step == self._saved_step:
            return True
        self._saved_step = self.step
        recent = [x if np.isfinite(x) else None for x in self._recent_losses.tolist()]
        with self._watch:
            notes = {
                "seconds": self._watch.seconds,
                "recent_losses": recent,
                "workers": dataclasses.asdict(self.config.workers),
                "bytes_sent": self._bytes_sent(lj.diagnostics(self.state.opt_state)),
            }
            return self._checkpoints.save(self.step, self.state, notes)

    def _report(self, report: Report | None) -> None:
        """Writes and shows what an interval of steps did."""
        if report is None:
            return
        steps, finite = len(report.losses), np.isfinite(report.losses)
        began = self._reported_at
        self._reported_at = self._watch.seconds
        # The first interval includes the compilation: its pace would mislead.
        pace = None if began is None else steps / (self._reported_at - began)
        with np.errstate(all="ignore"):
            losses = np.where(finite, report.losses, 0).sum(0) / finite.sum(0)
            loss = np.where(finite, report.losses, 0).sum() / finite.sum()
        self._recent_losses = np.where(np.isfinite(losses), losses, np.inf)
        self._watch_for_nonfinite(report, finite)
        self._write(
            "train",
            report.step,
            loss=float(loss),
            losses=losses.tolist(),
            steps_per_second=pace,
            consensus_distance=report.consensus_distance,
            waiting=int(report.waiting.sum()),
            **self._totals(report.levels),
        )
        for step, levels in report.elections:
            for level in levels:
                if step % level.period == 0 and level.leader is not None:
                    self._write("leaders", step, **self._leaders(level))
        self._screen.progress(report.step, float(loss), pace)

    def _watch_for_nonfinite(self, report: Report, finite: np.ndarray) -> None:
        """Counts the steps in a row without any finite loss, and warns."""
        for anybody in np.any(finite, axis=1).tolist():
            self._nonfinite_steps = 0 if anybody else self._nonfinite_steps + 1
        bad = np.flatnonzero(~finite.all(axis=0))
        if self._nonfinite_steps:
            self._screen.warn(
                f"no worker has had a finite loss for {self._nonfinite_steps} steps (up to "
                f"step {report.step}): nobody is pulled, and training stops after "
                f"{self.config.stop_after_nonfinite} such steps"
            )
        elif bad.size:
            self._screen.warn(
                f"the loss of worker {', '.join(map(str, bad))} was not finite at some of "
                f"the steps up to {report.step}; such a worker is healed at the next pull"
            )

    def _leaders(self, level: lj.Diagnostics) -> dict[str, Any]:
        """Who led at a pull (one worker per node, or one of all), and everybody's score."""
        leader, score = np.asarray(level.leader), np.asarray(level.score)
        scores = {"scores": score.tolist()}
        if level.axes == "local":
            nodes, locals = self.config.workers.nodes, self.config.workers.locals
            of_nodes = leader[::locals] + np.arange(nodes) * locals
            return {"level": "node", "leaders": of_nodes.tolist(), **scores}
        return {"level": "all", "leaders": [int(leader[0])], **scores}

    def _bytes_sent(self, levels: tuple[lj.Diagnostics, ...]) -> int:
        """Bytes that each worker has sent, over all levels."""
        return self._bytes_before + _bytes_sent(levels)

    def _totals(self, levels: tuple[lj.Diagnostics, ...]) -> dict[str, int]:
        """Bytes sent per worker and workers healed, over all levels."""
        if not levels:
            return {}
        healed = int(sum(np.sum(level.healed) for level in levels))
        return {"bytes_sent": self._bytes_sent(levels), "healed": healed}

    def _write(self, kind: str, step: int | None = None, **values: Any) -> None:
        if self._records is not None:
            step = self.step if step is None else step
            self._records.write(kind, step, self._watch.seconds, **values)

    def _end(self, result: Result) -> None:
        """Writes the last line and the figures, and says how the run ended."""
        self._write(
            "end",
            center_error=result.center_error,
            best_error=result.best_error,
            stopped_by=getattr(result.stopped_by, "name", result.stopped_by) or "",
        )
        if self._records is not None:
            try:
                draw(self.folder)
            except OSError as error:
                self._warn(f"the figures can not be written: {error}")
        self._screen.say(_last_line(result, self.config))


def resume_command(config: Config, folder: pathlib.Path) -> str:
    """The command that goes on with a run."""
    return f"python -m train {config.name} --run-dir {folder} --resume"


def _last_line(result: Result, config: Config) -> str:
    seconds = f"{result.seconds:.1f} s of training"
    if result.stopped_by is None:
        return (
            f"test error {result.center_error:.2f} % (center), {result.best_error:.2f} % "
            f"(best worker) after {result.step} steps and {seconds}; everything is in "
            f"{result.folder}"
        )
    resume = resume_command(config, result.folder)
    if result.stopped_by == "nonfinite":
        return (
            f"stopped at step {result.step} after {seconds}: no worker had a finite loss "
            f"for {config.stop_after_nonfinite} steps. A smaller learning rate may help. "
            f"The state is saved; to go on all the same: {resume}"
        )
    state = "saved" if result.saved else "NOT saved, an earlier checkpoint may be there"
    return f"stopped at step {result.step} after {seconds}, {state}; to go on: {resume}"


def _bytes_sent(levels: tuple[lj.Diagnostics, ...]) -> int:
    """Bytes that each worker would have sent among these workers, over all levels."""
    return sum(level.bytes_sent for level in levels)


def _versions() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "lsgd_jax": lj.__version__,
        "device": jax.devices()[0].device_kind,
    }
