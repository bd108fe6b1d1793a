"""Retracing the steps to a checkpoint."""

import jax
import numpy as np
from landscapes import but

from paper.landscape import trajectory
from paper.landscape.plane import Plane, flat


def retraced(saved, most=100):
    """Returns the steps, the trajectory on a plane along two parameters, and the output."""
    lines = []
    origin = flat(jax.tree.map(lambda x: x[0], saved.state.params))
    basis = np.eye(2, origin.size, dtype=np.float32)
    steps = trajectory.steps_to_retrace(saved, most, lines.append)
    paths = trajectory.retraced(saved, steps, Plane(origin, basis), lines.append)
    return steps, paths, lines


def test_the_first_checkpoint_is_retraced_from_the_start_of_training(saved):
    first = but(saved, step=6, state=saved.state_at(6))
    steps, paths, lines = retraced(first)
    assert steps == range(6) and paths.shape == (7, 4, 3)
    assert not any("warning" in line for line in lines)
    # All workers start at one point.
    assert np.ptp(paths[0], axis=0).max() == 0 and np.ptp(paths[-1]) > 0


def test_a_trajectory_that_misses_the_checkpoint_is_reported(saved, monkeypatch):
    advance = trajectory.advance
    monkeypatch.setattr(
        trajectory, "advance", lambda e, state, step: advance(e, state, step + 1)
    )
    _, _, lines = retraced(saved)
    (line,) = [line for line in lines if "warning" in line]
    assert "does not end at the checkpoint" in line


def test_a_long_trajectory_is_left_out_with_a_message(saved):
    steps, paths, lines = retraced(saved, most=5)
    assert len(steps) == len(paths) == 0
    (line,) = lines
    assert line.startswith("the trajectory from step 6 to 12 is left out (6 steps")
    assert line.endswith("--path-steps 6 retraces it")
    assert retraced(saved, most=0)[2] == []
