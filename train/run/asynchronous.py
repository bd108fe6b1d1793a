"""The training of asynchronous workers, which train in other processes.

`train.run.loop` begins and finishes the run, as it does for workers in lock step.
"""

import contextlib
import functools
import pathlib
import signal
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

import lsgd_jax as lj
from train.cluster.session import WorkersLost
from train.config.schema import Config
from train.metrics.buffer import Interval
from train.run import resharding
from train.run.checkpoints import read, steps_in
from train.run.folder import CHECKPOINTS
from train.run.open import Run
from train.run.reporting import report
from train.run.result import NONFINITE
from train.run.saving import test_and_save
from train.task.asynchronous import AsynchronousExperiment, Own, State, of_worker


GIB = 2**30
SILENCE = 3.0  # timeouts without a step after which a worker is named


def take_steps(run: Run) -> signal.Signals | str | None:
    """Runs the workers to the last step. Returns the reason to stop early, or None."""
    config = run.config
    experiment = run.experiment
    assert isinstance(experiment, AsynchronousExperiment)
    follower = Follower(run, experiment)
    options = config.ray
    chosen = engine()
    store = options.object_store
    states = experiment.apart(run.state) if run.step else None
    run.stopwatch.pauses = False
    with warnings.catch_warnings():
        # Ray starts its processes by fork and exec, which is safe despite jax's threads.
        warnings.filterwarnings("ignore", message=r".*fork\(\)")
        try:
            outcome = chosen.run(
                functools.partial(of_worker, config),
                experiment.method,
                config.workers.nodes,
                config.workers.locals,
                config.steps,
                options=chosen.ClusterOptions(
                    address=options.address,
                    num_cpus=options.cpus_per_worker,
                    num_gpus=options.gpus_per_worker,
                    object_store=None if store is None else int(store * GIB),
                    timeout=options.timeout,
                    start=options.start_timeout,
                    stall=options.stall_timeout,
                ),
                states=states,
                restore=functools.partial(from_checkpoint, config, run.folder.absolute()),
                on_status=follower,
            )
        except (RuntimeError, TimeoutError, OSError) as error:
            raise WorkersLost(str(error)) from error
    run.stopwatch.pauses = True
    follower.end(outcome.states, outcome.status)
    return follower.stopped_by


def from_checkpoint(config: Config, folder: pathlib.Path, index: int) -> State | None:
    """Returns a worker's state in the latest checkpoint, for when all workers were lost.

    The checkpoint may be of other workers, because a run may have been resumed with another
    grid since.

    Args:
      config: the configuration of the run.
      folder: the run folder.
      index: the number of the worker.

    Returns:
      None if there is no checkpoint, or the folder cannot be read from this host.
    """
    checkpoints = folder / CHECKPOINTS
    for step in reversed(steps_in(checkpoints)):
        with contextlib.suppress(OSError, ValueError):  # damaged
            experiment = AsynchronousExperiment(config)
            fresh: Any = experiment.init()
            this = functools.partial(read, checkpoints, step)
            restored: Any = resharding.restore(this, fresh, experiment.workers)
            return experiment.apart(restored.state)[index]
    return None


def engine() -> Any:
    """Returns the engine that runs the workers."""
    return lj.asynchronous.ray_engine


class Follower:
    """Reports, tests and saves while workers train, and asks them to stop.

    Args:
      run: the run.
      experiment: its experiment.

    Attributes:
      stopped_by: the reason to stop early, or None.
    """

    def __init__(self, run: Run, experiment: AsynchronousExperiment):
        self._run = run
        self._experiment = experiment
        self._counts = [state["count"] for state in experiment.apart(run.state)]
        self._sent = experiment.sent(run.state)
        self._states: list[State | None] = [None] * len(self._counts)
        self._reported = run.step
        self._present = set(range(len(self._counts)))
        self._missing: set[int] = set()
        self._stepped = {i: (0, time.monotonic()) for i in self._present}  # steps, when
        self._silent: set[int] = set()
        self._has_stepped = False
        self._distance = np.nan
        self.stopped_by: signal.Signals | str | None = None

    def __call__(self, status: lj.asynchronous.Status, remote: Any) -> None:
        """Handles the status of all workers. `remote` is asked for their states."""
        run = self._run
        config = run.config
        before = run.step
        self._count(status)
        if run.step > before:
            self._end_the_start()
        self._tell_of_losses(status, remote)
        self._tell_of_silence(status, remote)
        intervals = config.test_every, config.checkpoint_every
        is_due = any([run.passed(every, before) for every in intervals])
        known = is_due and self._collect(status, remote)
        if run.passed(config.log_every, self._reported):
            self._report(status)
        if known:
            test_and_save(run, before)
        self._stop_if_asked(remote)

    def _end_the_start(self) -> None:
        """Begins to count seconds of training, once processes are started and compiled."""
        if not self._has_stepped:
            self._has_stepped = True
            self._run.stopwatch.start()

    def end(self, states: list[State], status: lj.asynchronous.Status) -> None:
        """Takes the final states of the workers."""
        self._end_the_start()
        status = status._replace(present=sorted(self._present))  # all have left
        # A worker that hung and was killed keeps the state that it last answered.
        self._states = [new or old for new, old in zip(states, self._states)]
        self._count(status)
        if self.stopped_by is None:
            self._run.step = self._run.config.steps
        if any(state is not None for state in self._states):
            self._stack(status)
        elif self.stopped_by is not None:
            self._run.step = int(self._run.state.step.value)
        self._report(status)

    def _count(self, status: lj.asynchronous.Status) -> None:
        """Updates the step counts. A worker that was just restarted reports a lower one.

        All reports are lower only after the loss of all workers, which continue from a
        checkpoint.
        """
        steps = [status.reports[i].steps for i in range(len(self._counts))]
        are_lower = [new < old for new, old in zip(steps, self._counts)]
        most = [max(new, old) for new, old in zip(steps, self._counts)]
        self._counts = steps if all(are_lower) and any(steps) else most
        mean = sum(self._counts) // len(self._counts)
        self._run.step = max(self._run.step, min(mean, self._run.config.steps))

    # Reports

    def _report(self, status: lj.asynchronous.Status) -> None:
        run = self._run
        counts = self._counts
        steps = run.step - self._reported
        losses = self._losses(status)
        if losses is None or steps <= 0:
            return
        self._reported = run.step
        run.buffer.recent.add([losses] * steps)
        grid = run.config.workers
        run.progress.workers(summary(status, counts), counts)
        distance = self._distance
        self._distance = np.nan
        report(run, Interval(run.step, losses[None], distance, done=run.step))
        run.write("pace", **pace_event(status, counts))
        for values in leader_events(status, grid.nodes, grid.locals):
            run.write("leaders", **values)

    def _losses(self, status: lj.asynchronous.Status) -> np.ndarray | None:
        """The last loss of each worker [W], or None until all have reported one."""
        known = self._run.buffer.recent.average
        reports = [status.reports[i] for i in range(len(known))]
        losses = [known[i] if r.loss is None else r.loss for i, r in enumerate(reports)]
        silent = any(r.loss is None and np.isinf(known[i]) for i, r in enumerate(reports))
        return None if silent else np.asarray(losses, np.float32)

    def _tell_of_losses(self, status: lj.asynchronous.Status, remote: Any) -> None:
        """Reports workers that are down, and workers that are back."""
        progress = self._run.progress
        counts = self._counts
        present = set(status.present) | set(remote.ended)
        missing = self._present - present
        down = missing & self._missing  # one that has just ended is missing only once
        self._missing = missing
        for i in sorted(down):
            progress.warn(f"worker {i} is down at its step {counts[i]}")
        for i in sorted(present - self._present):
            progress.say(f"worker {i} is back")
        self._present = (self._present | present) - down

    def _tell_of_silence(self, status: lj.asynchronous.Status, remote: Any) -> None:
        """Names workers that take no steps while others do."""
        limit = SILENCE * self._run.config.ray.timeout
        now = time.monotonic()
        for i, (steps, _) in self._stepped.items():
            if status.reports[i].steps != steps:
                self._stepped[i] = status.reports[i].steps, now
                self._silent.discard(i)
        latest = max(when for _, when in self._stepped.values())
        begun = {i for i in status.present if status.reports[i].loss is not None}
        for i in sorted(begun - self._silent - set(remote.ended)):
            if latest - self._stepped[i][1] > limit:
                self._silent.add(i)
                self._run.progress.warn(
                    f"worker {i} has taken no step for {limit:.0f} s; it is started again "
                    f"after {self._run.config.ray.stall_timeout:.0f} s"
                )

    # States

    def _collect(self, status: lj.asynchronous.Status, remote: Any) -> bool:
        """Asks all workers for their states. Returns whether any state is known."""
        answers = remote.states(own=True)
        for i in sorted(set(status.present) - set(remote.ended)):
            if answers[i] is None:
                whose = "the best worker's" if self._states[i] is None else "its last known"
                self._run.progress.warn(
                    f"worker {i} does not answer: {whose} state stands for its own"
                )
        self._states = [new or old for new, old in zip(answers, self._states)]
        known = any(state is not None for state in self._states)
        if known:
            self._stack(status)
        return known

    def _stack(self, status: lj.asynchronous.Status) -> None:
        """Stacks the workers' last states; a worker without one gets a copy of the best."""
        scores = {i: status.reports[i].score for i, x in enumerate(self._states) if x}
        best = min(scores, key=lambda i: scores[i])
        source: Any = self._states[best]
        states = [
            state or {**source, "own": Own(i, source["own"].stats)}
            for i, state in enumerate(self._states)
        ]
        if self.stopped_by is not None:
            # Steps that were lost with all workers are not in their states.
            taken = sum(state["count"] for state in states) // len(states)
            # A run is resumed from the checkpoint with the highest step.
            newest = self._run.checkpoints.latest() or 0
            self._run.step = max(min(self._run.step, taken), newest)
        sent = [n + status.reports[i].bytes_sent for i, n in enumerate(self._sent)]
        self._run.state = self._experiment.stacked(states, self._run.step, sent)
        self._distance = float(lj.consensus_distance(self._run.state.params))

    def _stop_if_asked(self, remote: Any) -> None:
        run = self._run
        if self.stopped_by is not None:
            return
        if run.stop_signals.asked():
            self.stopped_by = run.stop_signals.received
        elif run.buffer.recent.nonfinite_steps >= run.config.stop_after_nonfinite:
            self.stopped_by = NONFINITE
        if self.stopped_by is not None:
            remote.stop()


def pace_event(status: lj.asynchronous.Status, counts: Sequence[int]) -> dict[str, Any]:
    """The values of an event `pace`: the progress of each worker.

    Args:
      status: the status of all workers.
      counts: steps that each worker has taken.
    """
    reports = [status.reports[i] for i in range(len(counts))]

    def column(name):
        return [getattr(report, name) for report in reports]

    return {
        "steps": list(counts),
        "present": status.present,
        "leader": status.leader(range(len(counts))),
        "scores": column("score"),
        "staleness": column("staleness"),
        "largest_staleness": max(column("staleness")),
        "waited": column("waited"),
        "longest_wait": max(column("longest")),
        "sent": column("bytes_sent"),
    }


def leader_events(
    status: lj.asynchronous.Status, nodes: int, locals: int
) -> Iterator[dict[str, Any]]:
    """Yields the values of events `leaders`: the leader of each node, then of all."""
    workers = range(nodes * locals)
    scores = [status.reports[i].score for i in workers]
    of_nodes = [
        status.leader(workers[first : first + locals])
        for first in range(0, len(workers), locals)
    ]
    first = status.leader(workers)
    if nodes > 1 and locals > 1 and None not in of_nodes:
        yield {"level": "node", "leaders": of_nodes, "scores": scores}
    if first is not None:
        yield {"level": "all", "leaders": [first], "scores": scores}


def summary(status: lj.asynchronous.Status, counts: Sequence[int]) -> str:
    """The workers' steps, the leader and the workers that are down, in one phrase.

    >>> Report = lj.asynchronous.WorkerReport
    >>> reports = {
    ...     i: Report(steps, 1.0, score, staleness=2.0)
    ...     for i, (steps, score) in enumerate([(7, 0.5), (9, 0.4), (4, 0.9)])
    ... }
    >>> summary(lj.asynchronous.Status([0, 1], [], 20, 0, reports), [7, 9, 4])
    'workers at 4 to 9, worker 1 leads, staleness 2.0, down: 2'
    """
    workers = range(len(counts))
    parts = [f"workers at {min(counts)} to {max(counts)}"]
    leader = status.leader(workers)
    if leader is not None:
        parts.append(f"worker {leader} leads")
    staleness = max(status.reports[i].staleness for i in workers)
    if staleness:
        parts.append(f"staleness {staleness:.1f}")
    down = [str(i) for i in workers if i not in status.present]
    if down:
        parts.append(f"down: {' '.join(down)}")
    return ", ".join(parts)
