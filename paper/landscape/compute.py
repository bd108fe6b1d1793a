"""The landscape of a run: the plane, marked points, the trajectory, the losses."""

from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from paper.landscape import plane
from paper.landscape.loss import Map, measured
from paper.landscape.points import ALONG, CENTER, Points, role_of
from paper.landscape.saved_run import SavedRun
from paper.landscape.trajectory import projection, retraced, steps_to_retrace


FAR = 10  # times the median distance: farther points do not widen the figure

Places = dict[str, np.ndarray]


class Mark(NamedTuple):
    """A marked point: its name, [a, b, distance from the plane], the loss there."""

    name: str
    place: np.ndarray
    loss: float


class PullSteps(NamedTuple):
    """The exchanges of one kind on the trajectory: a name, and the steps they follow."""

    name: str
    steps: np.ndarray


class Landscape(NamedTuple):
    """The contents of the figure.

    Attributes:
      title, xlabel, ylabel: names of the points that the plane goes through.
      worker: the worker in the middle.
      xs, ys: coordinates of the grid, [G].
      maps: losses over training images and, if asked for, over test images.
      marks: the marked points, the worker first.
      positions: [a, b, distance from the plane] of all workers, [W, 3].
      steps: steps of the trajectory, [T + 1]; the last is the checkpoint's.
      paths: positions after these steps, [T + 1, W, 3]; T is 0 without a trajectory.
      pulls: the exchanges on the trajectory.
    """

    title: str
    xlabel: str
    ylabel: str
    worker: int
    xs: np.ndarray
    ys: np.ndarray
    maps: list[Map]
    marks: list[Mark]
    positions: np.ndarray
    steps: np.ndarray
    paths: np.ndarray
    pulls: list[PullSteps]


def compute_landscape(run: SavedRun, options: Any, say: Callable[[str], None]) -> Landscape:
    """Chooses the plane, retraces the trajectory and measures the losses.

    Raises:
      ValueError: the worker does not exist, or its parameters are not finite.
    """
    points = Points(run, options.worker)
    steps = steps_to_retrace(run, options.path_steps, say)
    here = points.of(points.worker)
    exact, taken = plane.through(here, points.candidates())
    on = plane.Plane(here, exact.basis.astype(here.dtype))

    workers = run.experiment.workers
    positions = workers.fetch(projection(workers, on)(run.state.params))
    paths = retraced(run, steps, on, say)
    marks = marks_of(points, on, taken)
    low, high = frame_of(
        np.concatenate([np.stack(list(marks.values())), positions]),
        paths[:, points.worker],
        np.stack(list(taken.values())),
        options.margin,
    )
    xs, ys = np.linspace(low, high, options.grid).T
    grid = np.stack(np.meshgrid(xs, ys), axis=-1).reshape(-1, 2)
    places = np.concatenate([grid, np.stack(list(marks.values()))[:, :2]])

    names = ["train", "test"] if options.test else ["train"]
    maps = [measured(run, on, places, name, options.images, say) for name in names]

    def square(values):
        return values[: len(grid)].reshape(len(ys), len(xs))

    marks_losses = maps[0].loss[len(grid) :]
    first, second = (
        f"{'' if name.startswith(ALONG) else 'towards '}{name}" for name in taken
    )
    return Landscape(
        title=title_of(run, points, taken),
        xlabel=f"distance of parameters, {first}",
        ylabel=f"at right angles, {second}",
        worker=points.worker,
        xs=xs,
        ys=ys,
        maps=[m._replace(loss=square(m.loss), error=square(m.error)) for m in maps],
        marks=[Mark(*mark, loss) for mark, loss in zip(marks.items(), marks_losses)],
        positions=positions,
        steps=np.arange(run.step - len(steps), run.step + 1),
        paths=paths,
        pulls=pulls_of(points, run, steps),
    )


def marks_of(points: Points, on: plane.Plane, taken: Places) -> Places:
    """Returns [a, b, distance] of every marked point by its name, the worker first."""

    def where(point):
        return np.asarray(plane.coordinates(on, point))

    shown = [points.worker, *(worker for _, worker in points.roles)]
    marks = {points.name(worker): where(points.of(worker)) for worker in shown}
    center = where(points.center)
    if np.linalg.norm(center) > plane.SAME_POINT * np.linalg.norm(on.origin):
        marks[CENTER] = center
    for name, place in taken.items():
        if not name.startswith(ALONG):
            marks.setdefault(name, np.append(place, 0.0))
    return marks


def frame_of(
    positions: np.ndarray, path: np.ndarray, taken: np.ndarray, margin: float
) -> tuple[np.ndarray, np.ndarray]:
    """Returns two corners of a square around marks and workers [n, 3] and the path [T, 3].

    Outliers are left out, and every side is extended by margin · side. If all places are
    the same, the points [2, 2] that the plane goes through set the width.
    """
    places = np.concatenate([_near(positions), _near(path)])[:, :2]
    if not np.ptp(places, axis=0).any():
        places = np.concatenate([places, taken, -taken])
    low = places.min(axis=0)
    high = places.max(axis=0)
    half = (high - low).max() * (0.5 + margin)
    return (low + high) / 2 - half, (low + high) / 2 + half


def _near(places: np.ndarray) -> np.ndarray:
    """Returns the places without outliers and without those that are not finite."""
    lengths = np.linalg.norm(places[:, :2], axis=1)
    known = lengths[np.isfinite(lengths)]
    return places[lengths <= FAR * np.median(known)] if known.size else places[:0]


def title_of(run: SavedRun, points: Points, taken: Places) -> str:
    """Returns the title: the run, and the points that the plane goes through."""
    config = run.config
    through = [points.name(points.worker)]
    through += [name for name in taken if not name.startswith(ALONG)]
    along = [name.removeprefix(ALONG) for name in taken if name.startswith(ALONG)]
    plane_ = f"the plane through {_joined(through)}"
    plane_ += f", along {_joined(along)}" if along else ""
    return f"{config.name}, {config.method.name}, step {run.step}\n{plane_}"


def _joined(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def pulls_of(points: Points, run: SavedRun, steps: range) -> list[PullSteps]:
    """Returns the worker's exchanges of each kind that is not due after every step."""
    grid = run.config.workers
    found = []
    done = range(steps.start + 1, steps.stop + 1)
    for pull in points.pulls:
        if pull.period > 1:
            role = role_of(pull, points.worker, grid.nodes, grid.locals)
            name = "exchange" if pull.leader is None else f"pull to the {role}"
            found.append(
                PullSteps(name, np.array([t for t in done if pull.is_due(t)], int))
            )
    return found


def save(landscape: Landscape, file: BinaryIO, author: str) -> None:
    """Writes the arrays and the author as a NumPy archive."""
    of_maps = {
        f"{each.name}_{what}": getattr(each, what)
        for each in landscape.maps
        for what in ("images", "loss", "error")
    }
    names = "title worker xs ys positions steps paths".split()
    np.savez(
        file,
        made_by=np.bytes_(author),
        mark_names=np.array([mark.name for mark in landscape.marks]),
        mark_places=np.array([mark.place for mark in landscape.marks]),
        mark_losses=np.array([mark.loss for mark in landscape.marks]),
        **of_maps,
        **{name: getattr(landscape, name) for name in names},
    )
