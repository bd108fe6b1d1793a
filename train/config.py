"""The configuration of a run: frozen dataclasses, from which the command line is made."""

import dataclasses
import json
import os
import pathlib
import typing
from collections.abc import Set
from typing import Annotated, Any, Literal

import tyro

import lsgd_jax as lj
from train.config_checks import check
from train.data.vocabulary import Tokens
from train.distributed_config import DistributedConfig as DistributedConfig
from train.ray_config import RayConfig as RayConfig
from train.ray_config import check_pace
from train.task import methods
from train.task.batch_statistics import Policy
from train.task.methods import METHODS, Method, find
from train.task.optimizers import OptimizerConfig
from train.task.transformer_config import TransformerConfig
from train.workers_config import WorkersConfig as WorkersConfig


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The data that the workers learn from."""

    # The data set: `digits` comes with scikit-learn, `text` is that of --data.files, the
    # others need --data.dir.
    name: Literal["digits", "cifar10", "imagenet", "text"] = "digits"
    # Folder (or .tar.gz) with the official files of the data set; for imagenet one with
    # train/CLASS/*.JPEG and val/CLASS/*.JPEG.
    dir: str | None = None
    # Files of text, of which the last tenth is for validation; by default the source of
    # Python's standard library (text).
    files: tuple[str, ...] = ()
    # What a text is made of: characters, for which it must be UTF-8, or bytes (text).
    tokens: Tokens = "characters"
    # The most tokens that are seen at once (text).
    context: int = 64
    # Accept binary data files of the right size whose checksum differs.
    accept_other_files: bool = False
    # Give each worker its own part of the training data instead of all of them.
    shard: bool = False
    # Side of the squares that images are cropped to, at random for training (cifar10,
    # imagenet), and that imagenet's are scaled to.
    crop: int = 28
    # Width of the black border put around training images before the crop (cifar10).
    padding: int = 0
    # Threads of each process that read images from files (imagenet); by default one per
    # CPU core.
    reader_threads: int | None = None
    # Batches to read ahead of the training step (imagenet).
    read_ahead: int = 2


FLOAT32_MAX = 3.4028235e38

METHOD_HELP = f"""Choose another method with --method NAME: {", ".join(METHODS)}."""


@dataclasses.dataclass(frozen=True)
class Config:
    """One experiment."""

    # The run's name, with which the name of its folder begins; by default the experiment's.
    name: str
    # The network.
    model: Literal[
        "digits-cnn", "digits-bn", "cnn7", "resnet20", "vgg16", "resnet50", "transformer"
    ]
    # The data.
    data: DataConfig = DataConfig()
    # The network `transformer`.
    transformer: TransformerConfig = TransformerConfig()
    # The grid of workers.
    workers: WorkersConfig = WorkersConfig()
    # Every worker's own optimizer.
    optimizer: OptimizerConfig = OptimizerConfig()
    method: Annotated[Method, tyro.conf.arg(help=METHOD_HELP)] = methods.make("lsgd")
    # Batch statistics: each worker keeps its own; or they are averaged whenever the method
    # communicates; or they are reestimated from training data before each test.
    batch_statistics: Policy = "reestimate"
    # Training steps of every worker.
    steps: int = 1000
    # Images, or windows of text, per worker and step.
    batch_size: int = 32
    # Seed of the starting parameters, the order of the data and all other randomness.
    seed: int = 0
    # Steps between reports in metrics.jsonl and on the screen.
    log_every: int = 16
    # Steps between tests of the center and of the best worker.
    test_every: int = 200
    # Steps between checkpoints.
    checkpoint_every: int = 200
    # Number of checkpoints to keep, the latest ones; besides, the latest one with finite
    # losses is kept.
    keep_checkpoints: int = 3
    # Stop after this many steps in a row without a finite loss on any worker.
    stop_after_nonfinite: int = 100
    # Folder in which new run folders are made.
    runs: str = "runs"
    # The run folder itself; by default a new one, RUNS/NAME-DATE-TIME.
    run_dir: str | None = None
    # Resume from the last checkpoint of --run-dir (by default the newest run of NAME), with
    # its workers or, if --workers names others, with those.
    resume: bool = False
    # The named experiment that the settings began as; '': the name tells.
    experiment: tyro.conf.Suppress[str] = ""
    # The rendezvous of several processes.
    distributed: DistributedConfig = DistributedConfig()
    # The processes of workers that step at their own pace.
    ray: RayConfig = RayConfig()

    def __post_init__(self):
        counts = (
            "steps batch_size log_every test_every checkpoint_every keep_checkpoints "
            "stop_after_nonfinite"
        )
        for name in counts.split():
            lj.checks.check_positive_int(name, getattr(self, name))
        each = self.workers.devices_each
        rule = f"a multiple of {each}, the devices of a worker (workers.inside)"
        check(self.batch_size % each == 0, "batch_size", rule, self)
        for name in ("crop", "read_ahead", "context"):
            lj.checks.check_positive_int(f"data.{name}", getattr(self.data, name))
        if self.data.reader_threads is not None:
            lj.checks.check_positive_int("data.reader_threads", self.data.reader_threads)
        warmup = self.optimizer.warmup_steps
        if self.optimizer.schedule == "cosine" and warmup >= self.steps:
            raise ValueError(
                "`optimizer.warmup_steps` must be less than the steps of the run, got "
                f"optimizer.warmup_steps={warmup}, steps={self.steps}"
            )
        data = self.data
        check(data.padding >= 0, "data.padding", "at least 0", data)
        _check_text(self)
        check_pace(self)
        fits = data.name != "cifar10" or data.crop <= 32
        check(fits, "data.crop", "at most 32 with cifar10", data)
        check(
            self.name not in ("", ".", "..") and "/" not in self.name,
            "name",
            "a name for a folder",
            self,
        )
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"`seed` must be in [0, 2**32), got seed={self.seed}")
        for name, value in fields(self).items():
            for x in value if isinstance(value, tuple) else (value,):
                if type(x) is float and not abs(x) <= FLOAT32_MAX:
                    raise ValueError(
                        f"`{name}` must be finite as a float32, got {name}={value}"
                    )
                if type(x) is int and abs(x) >= 2**31 and name != "seed":
                    raise ValueError(
                        f"`{name}` must be less than 2**31, got {name}={value}"
                    )


# Of the run folders written now. 1, which is not noted: those of lsgd_jax 0.1.0.
FORMAT = 2

DISTRIBUTED = {f"distributed.{x.name}" for x in dataclasses.fields(DistributedConfig)}
RAY = {f"ray.{x.name}" for x in dataclasses.fields(RayConfig)}

# What may differ from process to process.
FREE_PER_PROCESS = {"data.dir", "data.files", *DISTRIBUTED}

# What may change when a run is resumed: how long it is, what it reports and where, and its
# workers (see train.run.resharding).
WORKERS = frozenset({"workers.nodes", "workers.locals", "workers.inside"})
FREE_ON_RESUME = {
    *WORKERS,
    *FREE_PER_PROCESS,
    *DISTRIBUTED,
    *RAY,
    "steps",
    "log_every",
    "test_every",
    "checkpoint_every",
    "keep_checkpoints",
    "stop_after_nonfinite",
    "runs",
    "run_dir",
    "resume",
    "experiment",
    "data.accept_other_files",
    "data.reader_threads",
    "data.read_ahead",
}


def differences(old: Config, new: Config, free: Set[str] = FREE_ON_RESUME) -> list[str]:
    """What makes the new configuration another experiment, the `free` fields aside.

    >>> old = Config(name="a", model="cnn7")
    >>> differences(old, dataclasses.replace(old, seed=1, steps=7))
    ['seed: the run has 0, the command says 1']
    """
    if "cosine" in (old.optimizer.schedule, new.optimizer.schedule):
        free = free - {"steps"}  # the learning rate of every step depends on it
    before, after = fields(old), fields(new)
    both = before.keys() & after.keys() - free
    return [
        f"{field}: the run has {before[field]!r}, the command says {after[field]!r}"
        for field in sorted(both)
        if before[field] != after[field]
    ]


def fields(config: Config) -> dict[str, Any]:
    """All settings by their full names.

    >>> fields(Config(name="a", model="cnn7"))["workers.nodes"]
    2
    """
    return _flat(_to_dict(config))


def write(config: Config, path: os.PathLike) -> None:
    """Writes the configuration as JSON to a new file."""
    with open(path, "x") as file:
        json.dump({"format": FORMAT} | _to_dict(config), file, indent=2)
        file.write("\n")


def _rename(values: dict[str, Any]) -> None:
    """Brings the names of earlier runs up to date."""
    values.pop("distributed", None)  # is not part of a run
    ray = values.get("ray") or {}
    if "grace" in ray:
        ray["timeout"] = ray.pop("grace")
    if (wire := ray.pop("wire", "float32")) != "float32":
        values["method"]["wire"] = wire


def read(path: os.PathLike) -> Config:
    """Reads what `write` wrote.

    Raises:
      ValueError: no such file, it does not hold a configuration, or the run is of a
        version whose checkpoints hold another state.
    """
    try:
        values = json.loads(pathlib.Path(path).read_text())
        found = values.pop("format", 1)
        _rename(values)
        config = _build(Config, values) if found == FORMAT else None
    except (OSError, TypeError, KeyError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} holds no configuration of a run: {error}") from error
    if config is None:
        raise ValueError(
            f"{path} is of a run in format {found}, whose checkpoints hold another "
            f"training state than those of lsgd_jax {lj.__version__} (format {FORMAT}): it "
            "can only be read by the version that wrote it"
        )
    return config


def _to_dict(config: Config) -> dict[str, Any]:
    """The configuration as nested dicts, the method's name among its options."""
    values = dataclasses.asdict(config)
    return values | {"method": {"name": config.method.name, **values["method"]}}


def _build(cls: type, values: dict[str, Any]) -> Any:
    """The dataclass `cls` with the values, nested dataclasses included."""
    if cls is Method:
        cls = find(values.pop("name"))
    hints = typing.get_type_hints(cls)
    return cls(**{name: _restore(hints[name], value) for name, value in values.items()})


def _restore(hint: Any, value: Any) -> Any:
    """A value as it was before JSON, which knows neither dataclasses nor tuples."""
    if dataclasses.is_dataclass(hint):
        return _build(typing.cast(type, hint), value)
    return tuple(value) if isinstance(value, list) else value


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _check_text(config: Config) -> None:
    """Raises ValueError for options of a text beside images, or the reverse."""
    data, is_text = config.data, config.data.name == "text"
    fits = is_text == (config.model == "transformer")
    rule = "transformer with data.name=text, and only there"
    check(fits, "model", rule, config)
    if is_text:
        check(data.dir is None, "data.dir", "left out with data.name=text", data)
        return
    for name, default in (("files", ()), ("tokens", "characters"), ("context", 64)):
        rule = f"left out with data.name={data.name}"
        check(getattr(data, name) == default, f"data.{name}", rule, data)
    default, given = TransformerConfig(), config.transformer
    for field in dataclasses.fields(given):
        holds = getattr(given, field.name) == getattr(default, field.name)
        rule = f"left out with model={config.model}"
        check(holds, f"transformer.{field.name}", rule, given)
