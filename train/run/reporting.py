"""Reports of a run in progress: metrics, tests, the screen, and warnings."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

import lsgd_jax as lj
from train.metrics import measures, traffic
from train.metrics.buffer import Election, Interval
from train.process.messages import counted
from train.run.open import Run
from train.run.result import Tested


IN_A_ROW = 2  # dropped exchanges after which workers are said to train alone


def report(run: Run, interval: Interval | None) -> None:
    """Writes and shows an interval, and warns of failures; does nothing for None."""
    if interval is None:
        return
    # Of the steps with a gradient, of which an interval may have none.
    computed = np.delete(interval.losses, interval.skipped, axis=0)
    losses = _mean_of_finite(computed, axis=0)
    loss = float(_mean_of_finite(computed)) if len(computed) else None
    _warn_of_nonfinite(run, interval.step, np.isfinite(computed))
    _warn_of_restored(run, interval)
    _warn_of_dropped(run, interval)
    _warn_of_alone(run, interval)
    _warn_of_differing(run, interval)
    pace = run.pace(interval.done, run.stopwatch.seconds)
    run.write(
        "train",
        interval.step,
        loss=loss,
        losses=losses.tolist(),
        steps_per_second=pace,
        step_losses=_mean_of_finite(interval.losses, axis=1).tolist(),
        consensus_distance=interval.consensus_distance,
        exchange=interval.exchange,
        waiting=int(interval.waiting.sum()),
        differed=interval.differed,
        **waited_for_exchanges(run),
        **living(run),
        **totals(interval.diagnostics),
    )
    write_leaders(run, interval.elections)
    note_saved(run)
    run.progress.show(interval.step, loss, pace)


def living(run: Run) -> dict[str, int]:
    """The number of workers that live; says which processes were lost and came in.

    Nothing where no process may be lost.
    """
    crew = run.experiment.crew
    if crew is None:
        return {}
    while crew.news:
        verdict = crew.news.pop(0)
        (step,) = verdict.place["counts"] or [run.step]
        lost = list(verdict.lost)
        came = list(verdict.newcomers)
        run.write("processes", step, lives=list(verdict.members), lost=lost, came=came)
        for process in lost:
            run.progress.say(f"process {process} was lost at step {step}")
        for process in came:
            run.progress.say(f"process {process} came in at step {step}")
    live = crew.num_workers
    workers = run.experiment.all_workers.num_workers
    run.progress.workers(f"{live} of {workers} workers", ())
    return {"workers_live": live}


def waited_for_exchanges(run: Run) -> dict[str, float]:
    """The seconds of this session in which training waited for messages beside the steps.

    Of the main process. Nothing where no messages travel beside.
    """
    waited = run.experiment.waited
    return {} if waited is None else {"exchange_wait_s": round(waited, 3)}


def note_saved(run: Run) -> None:
    """Writes an event when the first checkpoint is there, see `check_checkpoints`."""
    if "saved" not in run.metrics.latest:
        if run.checkpoints.latest() is not None:
            run.write("saved")


def _mean_of_finite(losses: np.ndarray, axis: int | None = None) -> np.ndarray:
    """The mean of the finite losses; nan if there is none."""
    finite = np.isfinite(losses)
    with np.errstate(all="ignore"):
        return np.where(finite, losses, 0).sum(axis) / finite.sum(axis)


def write_leaders(run: Run, elections: Sequence[Election]) -> None:
    """Writes the leader of each election."""
    for step, diagnostics in elections:
        for pull in diagnostics:
            if pull.leader is not None and pull.is_due(step):
                run.write("leaders", step, **leaders(pull, run.experiment.workers.nodes))


def run_test(run: Run) -> Tested:
    """Tests the center and the best worker, and writes the results.

    The training state is not changed.

    Raises:
      StopRequested: the run was asked to stop during the test.
    """
    check = run.stop_signals.check
    report(run, run.buffer.flush())
    run.buffer.read_losses(run.step)
    jax.block_until_ready(run.experiment.settled(run.state))
    with run.stopwatch.paused():
        center = run.experiment.test(run.find_center(check), check)
        worker = run.buffer.recent.best
        best = run.experiment.test_worker(run.state, worker, check)
        sent = run.experiment.bytes_sent(run.state)
    trained = run.buffer.recent.average[worker]
    losses = [center["loss"], best["loss"], trained]
    tested = Tested(center, best, bool(np.isfinite(losses).all()))
    run.last_test = run.step, tested
    run.write("test", **tested.values(), best_worker=worker, bytes_sent=sent)
    run.progress.tested(measures.text(center, name=True))
    return tested


def _warn_of_nonfinite(run: Run, step: int, finite: np.ndarray) -> None:
    bad = np.flatnonzero(~finite.all(axis=0))
    steps = run.buffer.recent.nonfinite_steps
    if steps:
        run.progress.warn(
            f"no worker has had a finite loss for {counted(steps, 'step')}: nothing is "
            "exchanged, and training stops after "
            f"{counted(run.config.stop_after_nonfinite, 'such step')}"
        )
    elif bad.size:
        run.progress.warn(
            f"the loss of worker {_joined(bad)} was not finite at some of the steps up "
            f"to {step}; such a worker is restored at the next exchange"
        )


def _warn_of_restored(run: Run, interval: Interval) -> None:
    restored = np.flatnonzero(interval.restored)
    if restored.size:
        how = "left out of a mean" if run.config.method.first else "restored"
        run.progress.warn(
            f"worker {_joined(restored)} was not finite and was {how} at an exchange "
            f"(seen up to step {interval.step})"
        )


def _warn_of_dropped(run: Run, interval: Interval) -> None:
    dropped = np.flatnonzero(interval.dropped)
    if dropped.size:
        run.progress.warn(
            "the target of an exchange was not finite, because finite parameters are too "
            f"large: worker {_joined(dropped)} stayed where it was (seen up to step "
            f"{interval.step})"
        )


def _warn_of_alone(run: Run, interval: Interval) -> None:
    """Warns of workers for which two exchanges or more in a row were dropped."""
    for number, pull in enumerate(interval.diagnostics, 1):
        if pull.dropped_in_a_row is None:
            continue
        in_a_row = np.asarray(pull.dropped_in_a_row)
        alone = np.flatnonzero(in_a_row >= IN_A_ROW)
        if not alone.size:
            continue
        count = int(in_a_row.max())
        run.progress.warn(
            f"worker {_joined(alone)} trains alone: the last {count} exchanges of pull "
            f"{number} (every {pull.period} steps, over {' and '.join(pull.axes)}) were "
            f"dropped, for about {count * pull.period} steps up to step {interval.step}; "
            "see docs/faults.md"
        )


def _warn_of_differing(run: Run, interval: Interval) -> None:
    for worker, leaf in interval.differed:
        run.progress.warn(
            f"worker {worker} differed from the others in {leaf}; it took their value "
            f"(seen up to step {interval.step})"
        )


def leaders(pull: lj.Diagnostics, nodes: int) -> dict[str, Any]:
    """The leaders of a pull (one per node, or one of all) and the scores of all workers."""
    leader = np.asarray(pull.leader)
    score = np.asarray(pull.score)
    if pull.axes == ("local",):
        grid = leader.reshape(nodes, -1)
        chosen = grid[:, 0] + np.arange(nodes) * grid.shape[1]
        return {"level": "node", "leaders": chosen.tolist(), "scores": score.tolist()}
    return {"level": "all", "leaders": [int(leader[0])], "scores": score.tolist()}


def totals(diagnostics: tuple[lj.Diagnostics, ...]) -> dict[str, Any]:
    """Bytes sent by each worker, workers restored, targets dropped, and schedules, summed
    over the pulls."""
    if not diagnostics:
        return {}
    restored = sum(int(np.sum(pull.restored)) for pull in diagnostics)
    dropped = (pull.dropped for pull in diagnostics if pull.dropped is not None)
    return {
        "bytes_sent": sum(pull.bytes_sent for pull in diagnostics),
        "restored": restored,
        "dropped": sum(int(np.sum(each)) for each in dropped),
        "pulls": traffic.schedules(diagnostics),
    }


def _joined(workers: np.ndarray) -> str:
    return ", ".join(map(str, workers.tolist()))
