"""The configuration of a run: frozen dataclasses, from which the command line is made."""

import dataclasses
import json
import os
import pathlib
import typing
from typing import Any, Literal

from lsgd_jax.checks import check_positive_int
from train.methods import Lsgd, Method, find
from train.statistics import Policy


@dataclasses.dataclass(frozen=True)
class WorkersConfig:
    """The grid of workers."""

    # Number of nodes (groups of close-by workers).
    nodes: int = 2
    # Number of workers in each node.
    locals: int = 4


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What the workers learn from."""

    # The data set: `digits` comes with scikit-learn, `cifar10` needs --data.dir.
    name: Literal["digits", "cifar10"] = "digits"
    # Folder (or .tar.gz) with the official files of the data set.
    dir: str | None = None
    # Take binary data files of the right size although their checksum differs.
    accept_other_files: bool = False
    # Give each worker a part of the training images of its own instead of all of them.
    shard: bool = False


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Every worker's own optimizer."""

    # SGD, or LARS for large batches (with --method allreduce).
    name: Literal["sgd", "lars"] = "sgd"
    # Learning rate.
    learning_rate: float = 0.1
    # Momentum coefficient, in [0, 1).
    momentum: float = 0.0
    # Nesterov's momentum instead of the classical one.
    nesterov: bool = False
    # L2 penalty added to the gradient, per unit of weight.
    weight_decay: float = 0.0


@dataclasses.dataclass(frozen=True)
class Config:
    """One experiment."""

    # The experiment's name, which also begins the name of its run folder.
    name: str
    # The network.
    model: Literal["digits-cnn", "digits-bn", "cnn7"]
    # The data.
    data: DataConfig = DataConfig()
    # The grid of workers.
    workers: WorkersConfig = WorkersConfig()
    # Every worker's own optimizer.
    optimizer: OptimizerConfig = OptimizerConfig()
    # The method. Choose another one with --method NAME: lsgd, easgd, downpour, local-sgd,
    # post-local-sgd, slowmo, diloco, parle, dpsgd, sgp, osgp, adpsgd, pairwise, gosgd,
    # wagma, allreduce, coordinate-median, licm, cge, or alone (nothing is exchanged).
    method: Method = Lsgd()
    # Batch statistics: each worker keeps its own; or they are averaged at each
    # communication; or reestimated from training data before each test.
    batch_statistics: Policy = "reestimate"
    # Training steps of every worker.
    steps: int = 1000
    # Images per worker and step.
    batch_size: int = 32
    # Seed of the starting parameters, the order of the data and all other randomness.
    seed: int = 0
    # Steps between lines in metrics.jsonl (and on the screen).
    log_every: int = 16
    # Steps between tests of the centre and of the best worker.
    test_every: int = 200
    # Steps between checkpoints.
    checkpoint_every: int = 200
    # Number of checkpoints to keep, the latest ones.
    keep_checkpoints: int = 3
    # Stop after so many steps in a row at which no worker had a finite loss.
    stop_after_nonfinite: int = 100
    # Folder in which new run folders are made.
    runs: str = "runs"
    # The run folder itself; by default a new one, RUNS/NAME-DATE-TIME.
    run_dir: str | None = None
    # Go on from the last checkpoint of --run-dir (by default the newest run of NAME).
    resume: bool = False

    def __post_init__(self):
        counts = (
            "steps batch_size log_every test_every checkpoint_every keep_checkpoints "
            "stop_after_nonfinite"
        )
        for name in counts.split():
            check_positive_int(name, getattr(self, name))
        check_positive_int("workers.nodes", self.workers.nodes)
        check_positive_int("workers.locals", self.workers.locals)
        optimizer = self.optimizer
        _check(
            optimizer.learning_rate > 0, "optimizer.learning_rate", "positive", optimizer
        )
        _check(0 <= optimizer.momentum < 1, "optimizer.momentum", "in [0, 1)", optimizer)
        _check(
            optimizer.weight_decay >= 0, "optimizer.weight_decay", "at least 0", optimizer
        )
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"`seed` must be in [0, 2**32), got seed={self.seed}")


# What may change when a run is resumed: how long it goes on and what it reports.
FREE_ON_RESUME = {
    "steps",
    "log_every",
    "test_every",
    "checkpoint_every",
    "keep_checkpoints",
    "stop_after_nonfinite",
    "runs",
    "run_dir",
    "resume",
    "data.dir",
    "data.accept_other_files",
}


def differences(old: Config, new: Config) -> list[str]:
    """What makes the new configuration another experiment, as 'field: old -> new'.

    >>> old = Config(name="a", model="cnn7")
    >>> differences(old, dataclasses.replace(old, seed=1, steps=7))
    ['seed: the run has 0, the command says 1']
    """
    before, after = _flat(_to_dict(old)), _flat(_to_dict(new))
    both = before.keys() & after.keys() - FREE_ON_RESUME
    return [
        f"{field}: the run has {before[field]!r}, the command says {after[field]!r}"
        for field in sorted(both)
        if before[field] != after[field]
    ]


def write(config: Config, path: os.PathLike) -> None:
    """Writes the configuration as JSON to a new file."""
    with open(path, "x") as file:
        json.dump(_to_dict(config), file, indent=2)
        file.write("\n")


def read(path: os.PathLike) -> Config:
    """Reads what `write` wrote.

    Raises:
      ValueError: no such file, or it does not hold a configuration.
    """
    try:
        return _build(Config, json.loads(pathlib.Path(path).read_text()))
    except (OSError, TypeError, KeyError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} holds no configuration of a run: {error}") from error


def _to_dict(config: Config) -> dict[str, Any]:
    """The configuration as nested dicts, the method's name among its options."""
    values = dataclasses.asdict(config)
    return values | {"method": {"name": config.method.name, **values["method"]}}


def _build(cls: type, values: dict[str, Any]) -> Any:
    """The dataclass `cls` with the values, nested dataclasses included."""
    if cls is Method:
        cls = find(values.pop("name"))
    hints = typing.get_type_hints(cls)
    nested = {
        name: _build(hints[name], value) if dataclasses.is_dataclass(hints[name]) else value
        for name, value in values.items()
    }
    return cls(**nested)


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat


def _check(holds: bool, name: str, rule: str, group: Any) -> None:
    if not holds:
        value = getattr(group, name.split(".")[-1])
        raise ValueError(f"`{name}` must be {rule}, got {name}={value}")
