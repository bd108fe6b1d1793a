"""Retraces the trajectory of the workers to a checkpoint, which the seed determines."""

import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

import lsgd_jax as lj
from paper.landscape.plane import Plane, coordinates
from paper.landscape.saved_run import SavedRun
from train.metrics.progress import Progress
from train.run.stopwatch import Pace
from train.task.experiment import Experiment
from train.task.state import TrainState


def advance(
    experiment: Experiment, state: TrainState, step: int
) -> tuple[TrainState, Array]:
    """Takes step `step`, counted from 0, and returns the new state and the losses."""
    return experiment.advance(state, step)


def projection(workers: lj.Workers, plane: Plane) -> Callable[[Any], Any]:
    """Returns a function params [W, ...] -> [a, b, distance from the plane], [W, 3]."""
    shared = workers.share(plane)
    of_all = workers.map(lambda x, p: coordinates(p.value, ravel_pytree(x)[0]))
    return lambda params: of_all(params, shared)


def steps_to_retrace(run: SavedRun, most: int, say: Callable[[str], None]) -> range:
    """Returns the steps since the previous checkpoint, counted from 0.

    The range is empty if there are more than `most`, and a line says so.
    """
    steps = range(run.step_before() if most else run.step, run.step)
    pace = run.pace()
    count = len(steps)
    cost = f"{count} steps" + (f", {count / pace:.0f} s at the run's pace" if pace else "")
    path = f"the trajectory from step {steps.start} to {steps.stop}"
    if count > most:
        say(f"{path} is left out ({cost}); --path-steps {count} retraces it")
        return range(run.step, run.step)
    if steps:
        say(f"retracing {path} ({cost}); --path-steps 0 leaves it out")
    return steps


def retraced(
    run: SavedRun, steps: range, plane: Plane, say: Callable[[str], None]
) -> np.ndarray:
    """Repeats steps of training and returns the workers' positions.

    Args:
      run: the run.
      steps: the steps to take, counted from 0.
      plane: a plane.
      say: called with a warning if the last step does not lead to the checkpoint.

    Returns:
      [a, b, distance] of all workers before and after every step, [T + 1, W, 3].
    """
    experiment = run.experiment
    workers = run.experiment.workers
    if not steps:
        return np.zeros([0, workers.num_workers, 3])
    look = projection(workers, plane)
    state = run.state_at(steps.start)
    seen = [look(state.params)]
    backlog = experiment.backlog()
    pace = Pace(at_least=0)
    with Progress(steps.stop, steps.start) as progress:
        for step in steps:
            state, loss = advance(experiment, state, step)
            backlog.add(loss)
            seen.append(look(state.params))
            progress.show(step + 1, None, pace(step, time.monotonic()))
        found = workers.fetch(seen)
        there = workers.fetch(look(run.state.params))

    def equal(x, y):
        return bool(jnp.array_equal(x, y, equal_nan=True))

    if not all(jax.tree.leaves(jax.tree.map(equal, state.params, run.state.params))):
        gap = np.linalg.norm(found[-1] - there, axis=1).max()
        say(
            "warning: the retraced trajectory does not end at the checkpoint (it is up to "
            f"{gap:.2g} away); software, devices or data may differ from those of the run"
        )
    return np.stack(found)
