"""Loads the data set of a configuration, and checks that the network fits it."""

from train.config.schema import Config
from train.data import (
    cifar10,
    digits,
    imagenet,
    own_arrays,
    text,
    transforms,
    translation,
)
from train.data.arrays import Dataset
from train.data.imagenet import ImageFolder
from train.task.models import MODELS


Data = (
    tuple[Dataset | ImageFolder, transforms.Transforms]
    | text.Text
    | translation.Translation
)
Vocabulary = text.Vocabulary | translation.Subwords

VOCABULARIES = {"text": text.Vocabulary, "translation": translation.Subwords}

FOLDERS = {
    "cifar10": "of the official CIFAR-10 files, cifar-10-batches-bin",
    "imagenet": "with train/CLASS/*.JPEG and val/CLASS/*.JPEG",
}


def load_dataset(config: Config) -> Data:
    """Loads images and their transforms, a text, or sentences and their translations.

    Arrays of any shape count as images.

    Raises:
      ValueError: the configuration lacks the folder of the data set.
      DataError: files are missing or wrong.
    """
    options = config.data
    if options.name == "text":
        return text.load(options.files, options.tokens)
    if options.name == "translation":
        return translation.load(
            options.source, options.target, options.subwords, options.context
        )
    if options.name == "digits":
        return digits.load(), transforms_of(config)
    if options.name == "arrays":
        if not options.arrays:
            raise ValueError(f"`data.arrays` must name {own_arrays.EXPECTED}, got none")
        return own_arrays.load(options.arrays), transforms_of(config)
    if options.dir is None:
        folder = FOLDERS[options.name]
        raise ValueError(f"`data.dir` must name the folder {folder}, got data.dir=None")
    if options.name == "imagenet":
        return imagenet.load(options.dir, options.crop), transforms_of(config)
    dataset = cifar10.load(options.dir, options.accept_other_files)
    return dataset, transforms_of(config)


def class_names(config: Config, data: Dataset | ImageFolder) -> list[str]:
    """The names of the classes of images, in the order of their labels."""
    if isinstance(data, ImageFolder):
        return list(data.train.classes)
    if config.data.name == "cifar10":
        return list(cifar10.CLASSES)
    return list(map(str, range(data.num_classes)))


def image_shape(config: Config) -> tuple[int, int, int]:
    """The shape [H, W, C] of the images that `transforms_of` takes. Not of arrays."""
    sides = {"digits": 8, "cifar10": 32, "imagenet": config.data.crop}
    side = sides[config.data.name]
    return side, side, 1 if config.data.name == "digits" else 3


def transforms_of(config: Config) -> transforms.Transforms:
    """The transforms of images, which do not need the data."""
    options = config.data
    if options.name == "cifar10":
        return transforms.cifar10(options.crop, options.padding)
    made = {
        "digits": transforms.digits,
        "imagenet": transforms.imagenet,
        "arrays": transforms.arrays,
    }
    return made[options.name]()


def check_model_fits(config: Config, shape: tuple[int, ...]) -> None:
    """Raises ValueError if the network needs images, or images of another size."""
    network = MODELS[config.model]
    if len(shape) != 4 and not getattr(network, "takes_any_shape", False):
        raise ValueError(
            f"`model` must fit the data: {config.model!r} takes images [H, W, C], "
            f"{config.data.name!r} has inputs of shape {list(shape[1:])}; use --model mlp"
        )
    size = getattr(network, "image_size", None)
    if size not in (None, shape[1]):
        raise ValueError(
            f"`model` must fit the data: {config.model!r} takes {size} x {size} images, "
            f"{config.data.name!r} has {shape[1]} x {shape[2]}"
        )
