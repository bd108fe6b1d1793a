"""The workers' trajectory to a checkpoint, retraced: the seed determines everything."""

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


Look = Callable[[Any], Any]


def advance(
    experiment: Experiment, state: TrainState, step: int
) -> tuple[TrainState, Array]:
    """One training step of all workers (steps count from 0): the new state, the losses."""
    return experiment.step(state, experiment.data, experiment.batch(step))


@jax.jit
def same(params: Any, others: Any) -> Array:
    """Whether two trees are equal to the bit: a bool scalar."""
    equal = lambda x, y: jnp.array_equal(x, y, equal_nan=True)
    return jnp.stack(jax.tree.leaves(jax.tree.map(equal, params, others))).all()


def projection(workers: lj.Workers, plane: Plane) -> Look:
    """params [W, ...] -> each worker's [a, b, distance from the plane], [W, 3]."""
    shared = workers.share(plane)
    of_all = workers.map(lambda x, p: coordinates(p.value, ravel_pytree(x)[0]))
    return lambda params: of_all(params, shared)


def steps_to_retrace(run: SavedRun, most: int, say: Callable[[str], None]) -> range:
    """The steps from the checkpoint before to this one, counted from 0.

    There are none if they are more than `most`, which `say` is told.
    """
    steps = range(run.step_before() if most else run.step, run.step)
    pace, count = run.pace(), len(steps)
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
    """Takes steps of training again and looks where all workers stand.

    Args:
      run: the run.
      steps: the steps to take, counted from 0.
      plane: a plane.
      say: called with a line if the last step does not lead to the run's checkpoint.

    Returns:
      [a, b, distance] of all workers before and after every step, [T + 1, W, 3].
    """
    experiment, workers = run.experiment, run.experiment.workers
    if not steps:
        return np.zeros([0, workers.num_workers, 3])
    look, state = projection(workers, plane), run.state_at(steps.start)
    seen, backlog, pace = [look(state.params)], experiment.backlog(), Pace(at_least=0)
    with Progress(steps.stop, steps.start) as progress:
        for step in steps:
            state, loss = advance(experiment, state, step)
            backlog.add(loss)
            seen.append(look(state.params))
            progress.show(step + 1, None, pace(step, time.monotonic()))
        found, there = workers.fetch(seen), workers.fetch(look(run.state.params))
    if not same(state.params, run.state.params):
        gap = np.linalg.norm(found[-1] - there, axis=1).max()
        say(
            "warning: the retraced trajectory does not end where the checkpoint is (up "
            f"to {gap:.2g} away): other software, devices or data than the run's?"
        )
    return np.stack(found)
