"""What a landscape consists of, and the file that holds its arrays."""

from typing import BinaryIO, NamedTuple

import numpy as np


class Map(NamedTuple):
    """Of what and how many images; loss and error in %, [G, G] with a row for each y."""

    name: str
    images: int
    loss: np.ndarray
    error: np.ndarray


class Mark(NamedTuple):
    """A point to be shown: its name, [a, b, distance from the plane], the loss there."""

    name: str
    place: np.ndarray
    loss: float


class Pulls(NamedTuple):
    """What happens to the worker on its trajectory, and after which of the steps."""

    name: str
    steps: np.ndarray


class Landscape(NamedTuple):
    """What is drawn.

    Attributes:
      title, xlabel, ylabel: what the plane goes through.
      worker: whose landscape it is.
      xs, ys: the grid's coordinates, [G].
      maps: of the training images, and perhaps of test images.
      marks: the worker first.
      positions: all workers, as [a, b, distance from the plane], [W, 3].
      steps: the steps of the trajectory, [T + 1]; the last is that of the checkpoint.
      paths: positions after them, [T + 1, W, 3]; T is 0 if there is no trajectory.
      pulls: what happened at which steps.
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
    pulls: list[Pulls]


def save(landscape: Landscape, file: BinaryIO, author: str) -> None:
    """Writes the arrays as a NumPy archive, with the author noted in it."""
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
