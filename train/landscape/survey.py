"""From a run to its landscape: the plane, who stands on it, the way, and the measuring."""

import argparse
import itertools
from collections.abc import Callable, Sequence

import jax
import numpy as np

import lsgd_jax as lj
from train.data import imagenet
from train.data.imagenet import ImageFolder
from train.landscape import plane
from train.landscape.loss import batches_of, fitting_chunk, measure_of
from train.landscape.opened import Opened
from train.landscape.picture import Landscape, Map, Mark, Pulls
from train.landscape.points import ALONG, CENTER, Points, role_of
from train.landscape.way import Way, projection
from train.metrics.progress import Pace, Screen


FAR = 10  # times the median distance: such a point of the way does not widen the picture

Places = dict[str, np.ndarray]


def survey(
    opened: Opened, options: argparse.Namespace, say: Callable[[str], None]
) -> Landscape:
    """Lays the plane, walks the way, measures the grid.

    Raises:
      ValueError: no such worker, or its parameters are not finite.
    """
    points, way = Points(opened, options.worker), Way(opened, options.path_steps, say)
    here = points.of(points.worker)
    candidates = itertools.chain(points.places(), points.directions(way.snapshots))
    exact, taken = plane.through(here, candidates)
    on = plane.Plane(here, exact.basis.astype(here.dtype))

    workers = opened.experiment.workers
    standing = workers.fetch(projection(workers, on)(opened.state.params))
    paths = way.on(on)
    marks = marks_of(points, on, taken)
    low, high = frame_of(
        np.concatenate([np.stack(list(marks.values())), standing]),
        paths[:, points.worker],
        np.stack(list(taken.values())),
        options.margin,
    )
    xs, ys = np.linspace(low, high, options.grid).T
    grid = np.stack(np.meshgrid(xs, ys), axis=-1).reshape(-1, 2)
    places = np.concatenate([grid, np.stack(list(marks.values()))[:, :2]])

    measure = Measuring(opened, on, options, say)
    names = ["train", "test"] if options.test else ["train"]
    measured = [measure(name, places) for name in names]
    square = lambda values: values[: len(grid)].reshape(len(ys), len(xs))
    marks_losses = measured[0].loss[len(grid) :]
    first, second = (
        f"{'' if name.startswith(ALONG) else 'towards '}{name}" for name in taken
    )
    return Landscape(
        title=title_of(opened, points, taken),
        xlabel=f"distance of parameters, {first}",
        ylabel=f"at right angles, {second}",
        worker=points.worker,
        xs=xs,
        ys=ys,
        maps=[m._replace(loss=square(m.loss), error=square(m.error)) for m in measured],
        marks=[Mark(*mark, loss) for mark, loss in zip(marks.items(), marks_losses)],
        standing=standing,
        steps=np.arange(opened.step - len(way.steps), opened.step + 1),
        paths=paths,
        pulls=pulls_of(points, opened, way.steps),
    )


def marks_of(points: Points, on: plane.Plane, taken: Places) -> Places:
    """Whom the figure names, the worker first, and where: [a, b, distance]."""
    where = lambda point: np.asarray(plane.coordinates(on, point))
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
    standing: np.ndarray, path: np.ndarray, taken: np.ndarray, margin: float
) -> tuple[np.ndarray, np.ndarray]:
    """The corners of what is shown: everybody [n, 3] and the way [T, 3], runaways left out.

    Where all stand in one point: as far as the points [2, 2] that the plane goes through.
    """
    places = np.concatenate([_near(standing), _near(path)])[:, :2]
    if not np.ptp(places, axis=0).any():
        places = np.concatenate([places, taken, -taken])
    return plane.frame(places, margin)


def _near(places: np.ndarray) -> np.ndarray:
    """Those that are not far out, compared with the others; nan is."""
    lengths = np.linalg.norm(places[:, :2], axis=1)
    known = lengths[np.isfinite(lengths)]
    return places[lengths <= FAR * np.median(known)] if known.size else places[:0]


def title_of(opened: Opened, points: Points, taken: Places) -> str:
    """The run, and what the plane goes through."""
    config = opened.config
    through = [points.name(points.worker)]
    through += [name for name in taken if not name.startswith(ALONG)]
    along = [name.removeprefix(ALONG) for name in taken if name.startswith(ALONG)]
    plane_ = f"the plane through {_joined(through)}"
    plane_ += f", along {_joined(along)}" if along else ""
    return f"{config.name}, {config.method.name}, step {opened.step}\n{plane_}"


def _joined(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if names[1:] else names)


def pulls_of(points: Points, opened: Opened, steps: range) -> list[Pulls]:
    """What the worker went through after which of the steps, if not after all of them."""
    grid, pulls = opened.config.workers, []
    for level in points.levels:
        if level.period > 1:
            role = role_of(level, points.worker, grid.nodes, grid.locals)
            name = "exchange" if level.leader is None else f"pull to the {role}"
            done = np.arange(steps.start + 1, steps.stop + 1)
            pulls.append(Pulls(name, done[done % level.period == 0]))
    return pulls


class Measuring:
    """Measures at places of one plane, every device a part of them."""

    def __init__(
        self,
        opened: Opened,
        on: plane.Plane,
        options: argparse.Namespace,
        say: Callable[[str], None],
    ):
        self._on, self._measure = on, measure_of(opened)
        self._data, self._seed = opened.data[0], opened.config.seed
        self._images, self._chunk, self._say = options.images, options.chunk, say
        self._devices = lj.Workers(1, len(jax.devices()))

    def __call__(self, name: str, places: np.ndarray) -> Map:
        """The loss and the error, [N], at places [N, 2], of 'train' or 'test' images."""
        part = getattr(self._data, name)
        if isinstance(self._data, ImageFolder):
            size = self._data.image_size
            part = imagenet.some(part, self._images, self._seed, size)
        batches = batches_of(part, self._images, self._seed)
        images = sum(len(labels) for _, labels in batches)
        device = self._devices.mesh.devices.flat[0]
        chunk = self._chunk or fitting_chunk(
            self._measure, self._on.origin, batches[0], device
        )
        self._say(f"measuring {len(places)} points over {images} {name} images")
        pace = Pace()
        with Screen(len(places), what="point") as screen:
            show = lambda done: screen.progress(done, None, pace(done))
            sums = plane.evaluate(
                *(self._measure, self._on, places, batches, self._devices, chunk, show)
            )
        return Map(name, images, sums[:, 0] / images, 100 * sums[:, 1] / images)
