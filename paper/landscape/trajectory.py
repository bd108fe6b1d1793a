"""The workers' trajectory to a checkpoint, retraced: the seed determines everything."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

import lsgd_jax as lj
from paper.landscape.plane import Plane, coordinates, flat
from paper.landscape.saved_run import SavedRun
from train.metrics.progress import Pace, Progress
from train.task.experiment import Experiment
from train.task.state import TrainState


STEPS_AHEAD = 16  # in flight at once
SNAPSHOTS = 16  # of the trajectory, to find its principal directions

Look = Callable[[Any], Any]


def advance(
    experiment: Experiment, state: TrainState, step: int
) -> tuple[TrainState, Array]:
    """One training step of all workers (steps count from 0): the new state, the losses."""
    return experiment.step(state, experiment.data, experiment.batch(step))


def retrace(
    experiment: Experiment, state: TrainState, steps: range, look: Look, every: int = 1
) -> tuple[list[Any], TrainState]:
    """Takes steps of training again and looks at the parameters after them.

    Args:
      experiment: the run's.
      state: the state before the first step; its buffers are used up.
      steps: the steps to take, counted from 0.
      look: params [W, ...] -> arrays; called at the start and after every `every`-th step.

    Returns:
      What `look` saw, on the host, and the state after the last step.
    """
    seen, losses, pace = [look(state.params)], [], Pace()
    with Progress(steps.stop, steps.start) as progress:
        for done, step in enumerate(steps, 1):
            state, loss = advance(experiment, state, step)
            losses.append(loss)
            if done % every == 0:
                seen.append(look(state.params))
            if done % STEPS_AHEAD == 0 and done > STEPS_AHEAD:
                # The loss of a step that is over: the devices wait for nothing.
                loss = float(np.mean(experiment.workers.fetch(losses[-STEPS_AHEAD])))
                progress.show(step + 1, loss, pace(done))
        return experiment.workers.fetch(seen), state


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


class Trajectory:
    """The trajectory of all workers from the checkpoint before to this one.

    Args:
      run: the run.
      most: how many steps to retrace at most; a longer trajectory is left out.
      say: called with lines about what is done.

    Attributes:
      steps: the steps to retrace, counted from 0; an empty range if there are none.
    """

    def __init__(self, run: SavedRun, most: int, say: Callable[[str], None]):
        self._run, self._say = run, say
        self.steps = range(run.step_before() if most else run.step, run.step)
        if not self.steps:
            return
        pace = run.pace()
        cost = f"{len(self.steps)} steps"
        cost += f", {len(self.steps) / pace:.0f} s at the run's own pace" if pace else ""
        path = f"the trajectory from step {self.steps.start} to {self.steps.stop}"
        if len(self.steps) > most:
            say(f"{path} is left out ({cost}); --path-steps {len(self.steps)} retraces it")
            self.steps = range(0)
        else:
            say(f"retracing {path} ({cost}); --path-steps 0 leaves it out")

    def snapshots(self, worker: int) -> np.ndarray | None:
        """The worker's parameters at some of the steps, [n, P]; None if there are none."""
        if not self.steps:
            return None
        self._say("the points span no plane: retracing once for main directions")
        look = lambda params: jax.tree.map(lambda x: x[worker], params)
        seen, _ = self._retrace(look, every=-(-len(self.steps) // SNAPSHOTS))
        return np.stack([flat(params) for params in seen])

    def on(self, plane: Plane) -> np.ndarray:
        """[a, b, distance] of all workers before and after every step, [T + 1, W, 3]."""
        workers, now = self._run.experiment.workers, self._run.state.params
        if not self.steps:
            return np.zeros([0, workers.num_workers, 3])
        project = projection(workers, plane)
        seen, end = self._retrace(project)
        if not same(end.params, now):
            gap = np.linalg.norm(seen[-1] - workers.fetch(project(now)), axis=1).max()
            self._say(
                "warning: the retraced trajectory does not end where the checkpoint is (up "
                f"to {gap:.2g} away): other software, devices or data than the run's?"
            )
        return np.stack(seen)

    def _retrace(self, look: Look, every: int = 1) -> tuple[list[Any], TrainState]:
        start = self._run.state_at(self.steps.start)
        return retrace(self._run.experiment, start, self.steps, look, every)
