"""The configuration of a run: frozen dataclasses, from which the command line is made.

`Config` checks itself. A setting has a full name, such as `optimizer.momentum`, on the
command line, in messages and in the tables of this file.
"""

import dataclasses
import importlib.util
import json
import math
import operator
import os
import pathlib
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Set
from typing import Annotated, Any, Literal

import tyro

import lsgd_jax as lj
from train.data.text import Tokens
from train.proposals import meant
from train.task import methods
from train.task.batch_statistics import Policy
from train.task.methods import METHODS, Method, find


Data = Literal["digits", "cifar10", "imagenet", "text"]
Model = Literal[
    "digits-cnn", "digits-bn", "cnn7", "resnet20", "vgg16", "resnet50", "transformer"
]
Optimizer = Literal["sgd", "adamw", "lion", "muon", "lars"]
Schedule = Literal["constant", "drops", "cosine"]


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The data that the workers learn from."""

    # The data set: `digits` comes with scikit-learn, `text` is that of --data.files, the
    # others need --data.dir.
    name: Data = "digits"
    # Folder with the official cifar-10-batches-bin (cifar10); for imagenet one with
    # train/CLASS/*.JPEG and val/CLASS/*.JPEG.
    dir: str | None = None
    # Files of text, of which the last tenth is for validation; by default the source of
    # Python's standard library (text).
    files: tuple[str, ...] = ()
    # What a text is made of: characters, for which it must be UTF-8, or bytes (text).
    tokens: Tokens = "characters"
    # The most tokens that are seen at once (text).
    context: int = 64
    # Accept binary data files of the right size whose checksum differs (cifar10).
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


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """The network `transformer`, which predicts the next token of a text."""

    # Number of blocks, each an attention and a perceptron.
    layers: int = 4
    # Attention heads of each block; must divide the width.
    heads: int = 4
    # Size of the vectors that stand for tokens.
    width: int = 128
    # How it knows where a token stands: vectors are rotated by their position, or one that
    # is learned for each position is added.
    positions: Literal["rotary", "learned"] = "rotary"
    # What it computes in; parameters, logits and the loss are float32.
    dtype: Literal["float32", "bfloat16"] = "float32"


@dataclasses.dataclass(frozen=True)
class WorkersConfig:
    """The grid of workers. A run may be resumed with another one (see --resume)."""

    # Number of nodes (groups of workers with a fast interconnect).
    nodes: int = 2
    # Number of workers in each node.
    locals: int = 4
    # Devices of each worker, as mesh axes NAME=SIZE (such as fsdp=4): its parameters, its
    # optimizer's state and its batches are sharded over all of them.
    inside: tuple[str, ...] = ()

    @property
    def axes(self) -> dict[str, int]:
        """The axes inside a worker and their sizes.

        >>> WorkersConfig(inside=("fsdp=2", "model=4")).axes
        {'fsdp': 2, 'model': 4}
        """
        pairs = (axis.split("=") for axis in self.inside)
        return {name: int(size) for name, size in pairs}

    @property
    def devices_each(self) -> int:
        """How many devices a worker has."""
        return math.prod(self.axes.values())

    @property
    def devices(self) -> int:
        """How many devices there are for one of them per worker, or per part of one."""
        return self.nodes * self.locals * self.devices_each


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Every worker's own optimizer."""

    # The optimizer: muon is for matrices, and adamw for embeddings and whatever else is in
    # the model; lars is for large batches (with --method allreduce).
    name: Optimizer = "sgd"
    # Learning rate, at its highest if there is a schedule.
    learning_rate: float = 0.1
    # Momentum coefficient, in [0, 1): of sgd and lars, by default 0, and of muon, by
    # default 0.95.
    momentum: float | None = None
    # Nesterov's momentum instead of the classical one: sgd and lars. Muon always has it.
    nesterov: bool = False
    # Decay rates of the two moments, in [0, 1): of adamw and of muon's adamw, by default
    # (0.9, 0.999), and of lion, by default (0.9, 0.99).
    betas: tuple[float, float] | None = None
    # What is added to the root of the second moment: adamw, muon.
    eps: float = 1e-8
    # Weight decay: of sgd and lars an L2 penalty, added to the gradient; of adamw, lion and
    # muon decoupled from it, multiplied by the learning rate only.
    weight_decay: float = 0.0
    # What weight decay is for: all parameters, or matrices and convolutions (of muon: what
    # is not adamw's), without biases, the scales of norms and embeddings.
    decay_of: Literal["all", "matrices"] = "all"
    # Gradients of a larger norm, over all parameters of a worker, are scaled down to it.
    clip: float | None = None
    # How the learning rate changes after the warm-up: not at all, by drops at the steps
    # named by --optimizer.drop-at, or along a cosine that ends at the last step.
    schedule: Schedule = "constant"
    # Steps over which the learning rate rises linearly to its full value.
    warmup_steps: int = 0
    # Steps after which the learning rate is multiplied by --optimizer.drop-factor.
    drop_at: tuple[int, ...] = ()
    # What the learning rate is multiplied by at each of --optimizer.drop-at.
    drop_factor: float = 0.1
    # Where the cosine ends, in [0, 1], as a part of the learning rate.
    final_fraction: float = 0.0


@dataclasses.dataclass(frozen=True)
class DistributedConfig:
    """The rendezvous of several processes, on one host or many. Not part of a run."""

    # Who has started the processes: `auto` finds out whether Open MPI, Slurm, a Kubernetes
    # Job or a Cloud TPU has; `mpi4py` asks any MPI; `none` trains in this process only.
    cluster: Literal["auto", "mpi4py", "none"] = "auto"
    # HOST:PORT where process 0 waits for the others, if the cluster does not say so.
    coordinator: str | None = None
    # Number of processes, if the cluster does not say so.
    num_processes: int | None = None
    # Which of them this one is, from 0, if the cluster does not say so.
    process_id: int | None = None
    # GPUs of a process: all that it sees, or one by its rank on the host; `auto` takes one
    # if it sees several and the cluster has started several processes on the host.
    gpus: Literal["auto", "one", "all"] = "auto"
    # Seconds to wait until all processes are there.
    start_timeout: int = 300
    # Seconds without a heartbeat after which a process counts as lost.
    heartbeat_timeout: int = 30


@dataclasses.dataclass(frozen=True)
class RayConfig:
    """Ray: asynchronous workers, or processes in lock step (`--ray.processes`)."""

    # Processes of a run in lock step, which Ray Train starts, and starts again after a
    # failure; by default there is this process only.
    processes: int | None = None
    # Emulated CPU devices of each of these processes; by default its share of the workers.
    devices_per_process: int | None = None
    # With fewer processes than `processes`, but so many, the run goes on with fewer nodes.
    min_processes: int | None = None
    # How many times the processes are started again.
    max_failures: int = 3
    # Seconds without new metrics after which the processes are started again.
    progress_timeout: float = 1800.0
    # The cluster to join: HOST:PORT, or `auto` for the one that this host is in; by default
    # Ray is started on this machine and ended with the run.
    address: str | None = None
    # CPUs of each worker or process, as Ray counts them to place the workers.
    cpus_per_worker: float = 1.0
    # GPUs of each worker or process; a fraction: several workers share one. 0: they use
    # the CPU.
    gpus_per_worker: float = 0.0
    # Seconds that a worker waits for another one before it goes on without it.
    timeout: float = 10.0
    # Seconds within which all must have been started.
    start_timeout: float = 300.0
    # Seconds after which a worker that takes no step is started again; more than it takes
    # to compile the first one.
    stall_timeout: float = 300.0
    # GiB of shared memory for what travels, where Ray is started by the run; by default a
    # share of the memory that Ray chooses.
    object_store: float | None = None


METHOD_HELP = (
    f"Choose another method with --method NAME: {', '.join(METHODS)}. Schedules, functions "
    "and objects are for Python; options are numbers and names."
)


@dataclasses.dataclass(frozen=True)
class Config:
    """One experiment."""

    # The run's name, with which the name of its folder begins; by default the experiment's.
    name: str
    # The network.
    model: Model
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
        values = fields(self)
        check_values(values)
        check_together(self, values)
        check_engine(self, values)


POSITIVE_INT = "a positive int", lambda x: type(x) is int and x > 0
POSITIVE = "positive and finite", lambda x: 0 < x < math.inf
NOT_NEGATIVE = "at least 0 and finite", lambda x: 0 <= x < math.inf
COUNTS = (
    "steps batch_size log_every test_every checkpoint_every keep_checkpoints "
    "stop_after_nonfinite workers.nodes workers.locals data.context data.crop "
    "data.reader_threads data.read_ahead transformer.layers transformer.heads "
    "transformer.width distributed.num_processes distributed.start_timeout "
    "distributed.heartbeat_timeout ray.processes ray.devices_per_process ray.min_processes"
)


def _are_axes(inside: tuple[str, ...]) -> bool:
    pairs = [axis.partition("=") for axis in inside]
    names = {name for name, _, _ in pairs}
    sizes = all(size.isdecimal() and int(size) > 0 for _, _, size in pairs)
    return sizes and all(map(str.isidentifier, names)) and len(names) == len(pairs)


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return host != "" and port.isdecimal() and 0 < int(port) < 2**16


SHARE = (
    "a fraction of one, or a whole number",
    lambda x: 0 <= x < 1 or x >= 1 and x % 1 == 0,
)


# What a setting must be if it is not None.
RULES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    **dict.fromkeys(COUNTS.split(), POSITIVE_INT),
    "name": ("a name for a folder", lambda x: x not in ("", ".", "..") and "/" not in x),
    "seed": ("in [0, 2**32)", lambda x: 0 <= x < 2**32),
    "workers.inside": ("different names with sizes, such as fsdp=4", _are_axes),
    "data.padding": NOT_NEGATIVE,
    "optimizer.learning_rate": POSITIVE,
    "optimizer.momentum": ("in [0, 1)", lambda x: 0 <= x < 1),
    "optimizer.betas": ("in [0, 1)", lambda x: all(0 <= beta < 1 for beta in x)),
    "optimizer.eps": POSITIVE,
    "optimizer.weight_decay": NOT_NEGATIVE,
    "optimizer.clip": POSITIVE,
    "optimizer.warmup_steps": NOT_NEGATIVE,
    "optimizer.drop_at": (
        "positive and ascending",
        lambda x: all(before < at for before, at in zip((0, *x), x)),
    ),
    "optimizer.drop_factor": POSITIVE,
    "optimizer.final_fraction": ("in [0, 1]", lambda x: 0 <= x <= 1),
    "distributed.coordinator": ("HOST:PORT", _is_address),
    "ray.max_failures": NOT_NEGATIVE,
    "ray.progress_timeout": POSITIVE,
    "ray.address": ("HOST:PORT or auto", lambda x: x == "auto" or _is_address(x)),
    "ray.cpus_per_worker": SHARE,
    "ray.gpus_per_worker": SHARE,
    "ray.timeout": POSITIVE,
    "ray.start_timeout": POSITIVE,
    "ray.stall_timeout": POSITIVE,
    # Ray refuses less than 75 MiB.
    "ray.object_store": ("at least 0.08, in GiB", lambda x: 0.08 <= x < math.inf),
}

# Settings that belong to some choices of another one. They are left out with the others.
BELONGS = {
    "optimizer.name": {
        "optimizer.momentum": ("sgd", "muon", "lars"),
        "optimizer.nesterov": ("sgd", "lars"),
        "optimizer.betas": ("adamw", "lion", "muon"),
        "optimizer.eps": ("adamw", "muon"),
    },
    "optimizer.schedule": {
        "optimizer.drop_at": ("drops",),
        "optimizer.drop_factor": ("drops",),
        "optimizer.final_fraction": ("cosine",),
    },
    "data.name": {
        "data.dir": ("cifar10", "imagenet"),
        "data.files": ("text",),
        "data.tokens": ("text",),
        "data.context": ("text",),
        "data.accept_other_files": ("cifar10",),
        "data.crop": ("cifar10", "imagenet"),
        "data.padding": ("cifar10",),
        "data.reader_threads": ("imagenet",),
        "data.read_ahead": ("imagenet",),
    },
    "model": {
        f"transformer.{field.name}": ("transformer",)
        for field in dataclasses.fields(TransformerConfig)
    },
}

DISTRIBUTED = {f"distributed.{x.name}" for x in dataclasses.fields(DistributedConfig)}
RAY = {f"ray.{x.name}" for x in dataclasses.fields(RayConfig)}

# Options of Ray that are for lock step only, and for asynchronous workers only.
RAY_IN_LOCK_STEP = {
    "ray.processes",
    "ray.devices_per_process",
    "ray.min_processes",
    "ray.max_failures",
    "ray.progress_timeout",
}
RAY_ASYNCHRONOUS = {"ray.timeout", "ray.stall_timeout", "ray.object_store"}

# The learning rate of an optimizer that is chosen without one: those of other optimizers
# are of another order.
USUAL_RATES = {"sgd": 0.1, "adamw": 1e-3, "lion": 1e-4, "muon": 1e-2, "lars": 10.0}

FLOAT32_MAX = 3.4028235e38
MOST_WORKERS = 2**16  # to place many more takes jax longer than any run


def check_values(values: Mapping[str, Any]) -> None:
    """Raises ValueError for a setting that is not possible, or of no use."""
    is_text = (values["data.name"] == "text", values["model"] == "transformer")
    if is_text[0] != is_text[1]:
        _refuse("model", "transformer with data.name=text, and only there", values)
    for choice, table in BELONGS.items():
        others = [name for name, owners in table.items() if values[choice] not in owners]
        _check_left_out(others, f"with {choice}={values[choice]}", values)
    for name, (rule, holds) in RULES.items():
        if values[name] is not None and not holds(values[name]):
            _refuse(name, rule, values)
    for name, value in values.items():
        for x in value if isinstance(value, tuple) else (value,):
            if type(x) is float and not abs(x) <= FLOAT32_MAX:
                _refuse(name, "finite as a float32", values)
            if type(x) is int and abs(x) >= 2**31 and name != "seed":
                _refuse(name, "less than 2**31", values)


def _check_left_out(names: Iterable[str], why: str, values: Mapping[str, Any]) -> None:
    for name in names:
        if values[name] != _default(name):
            _refuse(name, f"left out {why}", values)


def _default(name: str) -> Any:
    return operator.attrgetter(name)(Config)


def _check(holds: bool, name: str, rule: str, values: Mapping[str, Any]) -> None:
    if not holds:
        _refuse(name, rule, values)


def _refuse(name: str, rule: str, values: Mapping[str, Any]) -> typing.NoReturn:
    raise ValueError(f"`{name}` must be {rule}, got {name}={values[name]}")


def check_together(config: Config, values: Mapping[str, Any]) -> None:
    """Raises ValueError for settings that do not go together."""
    grid, net, warmup = config.workers, config.transformer, config.optimizer.warmup_steps
    if grid.nodes * grid.locals > MOST_WORKERS:
        raise ValueError(
            f"`workers.nodes` times `workers.locals` must be at most {MOST_WORKERS:,}, "
            f"got {grid.nodes} x {grid.locals}"
        )
    each = grid.devices_each
    rule = f"a multiple of {each}, the devices of a worker (workers.inside)"
    _check(config.batch_size % each == 0, "batch_size", rule, values)
    rule = f"divisible by twice the heads (transformer.heads={net.heads})"
    _check(net.width % (2 * net.heads) == 0, "transformer.width", rule, values)
    rule = f"more than the warm-up (optimizer.warmup_steps={warmup})"
    fits = config.optimizer.schedule != "cosine" or warmup < config.steps
    _check(fits, "steps", rule, values)
    fits = config.data.name != "cifar10" or config.data.crop <= 32
    _check(fits, "data.crop", "at most 32 with cifar10", values)


def check_engine(config: Config, values: Mapping[str, Any]) -> None:
    """Raises ValueError for settings that the engine of the method does not have.

    Methods in lock step run in processes of their own, or of Ray Train; others on Ray.
    """
    ray, method = config.ray, config.method
    if method.is_asynchronous:
        names = [*sorted(RAY_IN_LOCK_STEP | DISTRIBUTED), "workers.inside"]
        _check_left_out(names, f"with method.name={method.name}", values)
        rule = f"keep or reestimate with method.name={method.name}"
        _check(config.batch_statistics != "average", "batch_statistics", rule, values)
    else:
        names = sorted(RAY_ASYNCHRONOUS)
        _check_left_out(names, f"with method.name={method.name}", values)
        if ray.processes is None:
            _check_left_out(sorted(RAY), "without ray.processes", values)
        elif ray.min_processes is not None and config.distributed.process_id is None:
            rule = f"at most ray.processes={ray.processes}"
            _check(ray.min_processes <= ray.processes, "ray.min_processes", rule, values)
            rule = f"a multiple of ray.processes={ray.processes} with ray.min_processes"
            fits = config.workers.nodes % ray.processes == 0
            _check(fits, "workers.nodes", rule, values)
    if ray.address is not None:
        _check_left_out(["ray.object_store"], "with ray.address: it has its own", values)
    own, processes = config.distributed, config.distributed.num_processes or 2**31
    fits = own.process_id is None or 0 <= own.process_id < processes
    _check(fits, "distributed.process_id", "in [0, num_processes)", values)


def check_installed(*others: str) -> None:
    """Raises ValueError if Ray, or another package that it needs, is not installed."""
    needed = ("ray", *others)
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            "asynchronous workers and `ray.processes` are processes of Ray, and "
            f'{missing[0]} is not installed: pip install "lsgd_jax[async]"'
        )


# Of the run folders written now. 1, which is not noted: those of lsgd_jax 0.1.0.
FORMAT = 2

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


def began_with(config: Config) -> dict[str, Any]:
    """The settings that stay as they are for the whole of a run, as JSON has them."""
    kept = {name: x for name, x in fields(config).items() if name not in FREE_ON_RESUME}
    del kept["name"]
    return json.loads(json.dumps(kept))


def fields(config: Config) -> dict[str, Any]:
    """All settings by their full names.

    >>> fields(Config(name="a", model="cnn7"))["workers.nodes"]
    2
    """
    return _flat(_to_dict(config))


def switched(config: Config, changes: Mapping[str, Any]) -> Config:
    """The configuration with other settings, by their full names.

    Settings that do not belong to what is chosen now take their defaults. The warm-up
    takes at most half of the steps of a shorter run, unless that run is resumed.

    >>> old = Config("a", "cnn7", optimizer=OptimizerConfig(momentum=0.9, clip=1.0))
    >>> other = switched(old, {"optimizer.name": "adamw"}).optimizer
    >>> other.momentum, other.learning_rate, other.clip
    (None, 0.001, 1.0)
    """
    old = fields(config)
    new = old | dict(changes)
    if new["optimizer.name"] != old["optimizer.name"]:
        new["optimizer.learning_rate"] = USUAL_RATES[new["optimizer.name"]]
    for choice, table in BELONGS.items():
        for name, owners in table.items():
            if new[choice] not in owners:
                new[name] = _default(name)
    if new["steps"] < old["steps"] and not new["resume"]:
        half = new["steps"] // 2
        new["optimizer.warmup_steps"] = min(new["optimizer.warmup_steps"], half)
    of = lambda group, x: {f.name: new[f"{group}.{f.name}"] for f in dataclasses.fields(x)}
    groups: dict[str, Any] = {
        group: dataclasses.replace(before, **of(group, before))
        for group, before in vars(config).items()
        if dataclasses.is_dataclass(before) and group != "method"
    }
    if new["method.name"] != config.method.name:
        groups["method"] = methods.make(new["method.name"])
    own = {name: value for name, value in new.items() if "." not in name}
    return dataclasses.replace(config, **own, **groups)


def write(config: Config, path: os.PathLike) -> None:
    """Writes the configuration as JSON to a new file, but for how its processes meet."""
    values = _to_dict(config)
    del values["distributed"]
    with open(path, "x") as file:
        json.dump({"format": FORMAT} | values, file, indent=2)
        file.write("\n")


def read(path: os.PathLike) -> Config:
    """Reads what `write` wrote.

    Raises:
      ValueError: no such file, it does not hold a configuration, or the run is of a
        version whose checkpoints hold another state.
    """
    try:
        values = json.loads(pathlib.Path(path).read_text())
        if not isinstance(values, dict):
            raise ValueError("it is no JSON object")
        found = values.pop("format", 1)
        values.pop("distributed", None)  # 0.2.0 wrote it
        config = _build(Config, values) if found == FORMAT else None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} holds no configuration of a run: {error}") from error
    if config is None:
        raise ValueError(
            f"{path} is of a run in format {found}, whose checkpoints hold another "
            f"training state than those of lsgd_jax {lj.__version__} (format {FORMAT}): it "
            "can only be read by the version that wrote it"
        )
    return config


def _build(cls: Any, values: Any, prefix: str = "") -> Any:
    """The dataclass `cls` with values as JSON has them.

    Raises:
      ValueError: a setting, which it names, is unknown, missing or of another type.
    """
    if not isinstance(values, dict):
        got = json.dumps(values)
        raise ValueError(f"`{prefix[:-1]}` must be an object with settings, got {got}")
    if cls is Method:
        values = dict(values)
        cls = find(str(values.pop("name", None)))
    known = {field.name: field for field in dataclasses.fields(cls)}
    hints, made = typing.get_type_hints(cls), {}
    for name, value in values.items():
        if name not in known:
            raise ValueError(
                f"there is no setting {prefix}{name}{meant(name, known, prefix)}"
            )
        made[name] = _restored(hints[name], value, prefix + name)
    for name, field in known.items():
        if field.default is dataclasses.MISSING and name not in values:
            raise ValueError(f"{prefix}{name} is missing")
    return cls(**made)


def _restored(hint: Any, value: Any, name: str) -> Any:
    """A value as it was before JSON, which knows neither dataclasses nor tuples."""
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, f"{name}.")
    value = tuple(value) if isinstance(value, list) else value
    if not _is_of(hint, value):
        kind = hint.__name__ if isinstance(hint, type) else str(hint)
        kind = kind.replace("typing.", "")
        raise ValueError(f"`{name}` must be of type {kind}, got {name}={json.dumps(value)}")
    return value


def _is_of(hint: Any, value: Any) -> bool:
    """Whether a value is of the type of a setting.

    >>> _is_of(float | None, 3), _is_of(tuple[int, ...], (1, "2")), _is_of(int, True)
    (True, False, False)
    """
    parts = typing.get_args(hint)
    match typing.get_origin(hint):
        case typing.Literal:
            return value in parts
        case typing.Union | types.UnionType:
            return any(_is_of(part, value) for part in parts)
        case origin if origin is tuple and isinstance(value, tuple):
            each = parts[:1] * len(value) if parts[-1] is ... else parts
            return len(value) == len(each) and all(map(_is_of, each, value))
    return type(value) in ((int, float) if hint is float else (hint,))


def _to_dict(config: Config) -> dict[str, Any]:
    """The configuration as nested dicts, the method's name among its options."""
    values = dataclasses.asdict(config)
    return values | {"method": {"name": config.method.name, **values["method"]}}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
