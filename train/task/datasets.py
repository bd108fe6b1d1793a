"""The data set that a configuration names, and whether the network fits it."""

from train.config import Config
from train.data import cifar10, digits, imagenet, transforms
from train.data.arrays import Dataset
from train.data.imagenet import ImageFolder
from train.task.models import MODELS


Data = tuple[Dataset | ImageFolder, transforms.Transforms]


def load_dataset(config: Config) -> Data:
    """The data set and what is done to its images.

    Raises:
      ValueError: the data set needs a folder and the configuration names none; DataError:
        files that are missing or wrong.
    """
    if config.data.name == "digits":
        return digits.load(), transforms.digits()
    if config.data.name == "imagenet":
        if config.data.dir is None:
            raise ValueError(
                "`data.dir` must name the folder with train/CLASS/*.JPEG and "
                "val/CLASS/*.JPEG, got data.dir=None"
            )
        folder = imagenet.load(config.data.dir, config.data.crop)
        return folder, transforms.imagenet()
    if config.data.dir is None:
        raise ValueError(
            "`data.dir` must name the folder of the official CIFAR-10 files, "
            "cifar-10-batches-bin, got data.dir=None"
        )
    dataset = cifar10.load(config.data.dir, config.data.accept_other_files)
    return dataset, transforms.cifar10(config.data.crop, config.data.padding)


def check_model_fits(config: Config, shape: tuple[int, ...]) -> None:
    """Raises ValueError if the network is made for images of another size."""
    size = getattr(MODELS[config.model], "image_size", None)
    if size not in (None, shape[1]):
        raise ValueError(
            f"`model` must fit the data: {config.model!r} takes {size} x {size} images, "
            f"{config.data.name!r} has {shape[1]} x {shape[2]}"
        )
