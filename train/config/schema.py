"""The settings of a run: frozen dataclasses, from which tyro makes the command line.

A setting has a full name, such as `optimizer.momentum`, on the command line, in messages
and in the table `SETTINGS`. Its type carries the conditions on its value, which `Config`
checks. `train.config.settings` reads, writes, compares and changes configurations.
"""

import dataclasses
import math
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, NamedTuple

import tyro

from train.config import methods
from train.config.methods import METHODS, MethodConfig, find
from train.data.text import Tokens


class Condition(NamedTuple):
    """A condition on the value of a setting. None always meets it.

    Attributes:
      text: completes the sentence "the setting must be".
      holds: whether a value meets the condition.
    """

    text: str
    holds: Callable[[Any], bool]


class Only(NamedTuple):
    """Values of another setting without which a setting has no effect.

    Attributes:
      choice: the full name of the other setting.
      values: its values that need the setting. With others it must be left out.
    """

    choice: str
    values: tuple[str, ...]

    def applies(self, chosen: Any) -> bool:
        """Whether the setting has an effect with this value of the other one."""
        if self.choice == "method.name":  # a method of the user is not listed
            return find(chosen).is_asynchronous is find(self.values[0]).is_asynchronous
        return chosen in self.values


def _are_axes(inside: tuple[str, ...]) -> bool:
    pairs = [axis.partition("=") for axis in inside]
    names = {name for name, _, _ in pairs}
    sizes = all(size.isdecimal() and int(size) > 0 for _, _, size in pairs)
    return sizes and all(map(str.isidentifier, names)) and len(names) == len(pairs)


def _is_name(text: str) -> bool:
    is_plain = text.isprintable() and "/" not in text
    is_own = text not in ("", ".", "..")
    return is_own and is_plain and len(text.encode()) <= LONGEST_NAME


def _is_project(text: str) -> bool:
    parts = text.split("/")
    return all(parts) and len(parts) <= 2


def _is_address(text: str) -> bool:
    host, _, port = text.rpartition(":")
    return host != "" and port.isdecimal() and 0 < int(port) < 2**16


def _ascend(steps: tuple[int, ...]) -> bool:
    return all(before < step for before, step in zip((0, *steps), steps))


LONGEST_NAME = 200  # bytes; file systems take 255, and a date follows it

COUNT = Condition("a positive int", lambda x: type(x) is int and x > 0)
NAME = Condition(f"a name for a folder, of at most {LONGEST_NAME} bytes", _is_name)
NOT_EMPTY = Condition("a path, not empty", bool)
POSITIVE = Condition("positive and finite", lambda x: 0 < x < math.inf)
NOT_NEGATIVE = Condition("at least 0 and finite", lambda x: 0 <= x < math.inf)
BELOW_ONE = Condition("in [0, 1)", lambda x: 0 <= x < 1)
SEED = Condition("in [0, 2**32)", lambda x: 0 <= x < 2**32)
SHARE = Condition(
    "a fraction of one, or a whole number",
    lambda x: 0 <= x < 1 or x >= 1 and x % 1 == 0,
)
Count = Annotated[int, COUNT]
Positive = Annotated[float, POSITIVE]

# Notes for settings that may change when a run is resumed (for its workers see
# train.run.resharding), and for settings that may also differ from process to process.
FREE = "free on resume"
LOCAL = "free on resume and per process"
PATH = "a path, which may begin with ~"

CIFAR10, IMAGENET, ARRAYS, TEXT, TRANSLATION = (
    Only("data.name", (x,))
    for x in ("cifar10", "imagenet", "arrays", "text", "translation")
)
FILES = Only("data.name", ("cifar10", "imagenet"))
BATCH_NORM = Only("model", ("digits-bn", "resnet20", "vgg16", "resnet50"))
DROPS = Only("optimizer.schedule", ("drops",))
LOCK_STEP, ASYNCHRONOUS = (
    Only("method.name", tuple(x for x in METHODS if METHODS[x].is_asynchronous is engine))
    for engine in (False, True)
)


def _optimizers(*names: str) -> Only:
    return Only("optimizer.name", names)


Data = Literal["digits", "cifar10", "imagenet", "arrays", "text", "translation"]
Model = Literal[
    "mlp",
    "digits-cnn",
    "digits-bn",
    "cnn7",
    "resnet20",
    "vgg16",
    "resnet50",
    "transformer",
    "encoder-decoder",
]
Optimizer = Literal["sgd", "adamw", "lion", "muon", "lars"]
Schedule = Literal["constant", "drops", "cosine", "inverse-sqrt"]
Statistics = Literal["keep", "average", "reestimate"]  # see `task.batch_statistics`

# The network for each data set that is not of images.
NETWORKS = {"text": "transformer", "translation": "encoder-decoder"}


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """The data that the workers learn from."""

    # The data set. `digits` comes with scikit-learn, `text` reads --data.files,
    # `translation` reads --data.source and --data.target, `arrays` reads --data.arrays, and
    # the others need --data.dir.
    name: Data = "digits"
    # Folder of the data: the official cifar-10-batches-bin (cifar10), or a folder with
    # train/CLASS/*.JPEG and val/CLASS/*.JPEG, or images of other kinds (imagenet).
    dir: Annotated[str | None, PATH, FILES, LOCAL] = None
    # Inputs and labels: an .npz file with x_train, y_train, x_test and y_test, or with x
    # and y; or two .npy files, inputs and labels (arrays).
    arrays: Annotated[tuple[str, ...], PATH, ARRAYS, LOCAL] = ()
    # Text files to learn, joined; the last tenth, at most 262,144 tokens, is for
    # validation. Defaults to the source of Python's standard library (text).
    files: Annotated[tuple[str, ...], PATH, TEXT, LOCAL] = ()
    # Tokens of a text: the characters of a UTF-8 file, or bytes (text).
    tokens: Annotated[Tokens, TEXT] = "characters"
    # Files of sentences to translate, one sentence a line; the last tenth, at most 1,000
    # sentences, is for validation (translation).
    source: Annotated[tuple[str, ...], PATH, TRANSLATION, LOCAL] = ()
    # Files of their translations, line by line (translation).
    target: Annotated[tuple[str, ...], PATH, TRANSLATION, LOCAL] = ()
    # Maximum number of subwords, which both languages share (translation).
    subwords: Annotated[Count, TRANSLATION] = 1000
    # Maximum number of tokens that the model sees at once (text), or of a sentence with its
    # end. Longer training sentences are left out (translation).
    context: Annotated[Count, Only("data.name", tuple(NETWORKS))] = 64
    # Accept binary files of the right size whose checksum differs (cifar10).
    accept_other_files: Annotated[bool, CIFAR10, FREE] = False
    # Give each worker its own part of the training data instead of all of it.
    shard: bool = False
    # Side of the square crops, which are random in training (cifar10, imagenet). Images of
    # imagenet are scaled to this size.
    crop: Annotated[Count, FILES] = 28
    # Width of the black border that is added to training images before the crop (cifar10).
    padding: Annotated[int, NOT_NEGATIVE, CIFAR10] = 0
    # Threads per process that read image files. Defaults to one per CPU core (imagenet).
    reader_threads: Annotated[int | None, COUNT, IMAGENET, FREE] = None
    # Number of batches to read ahead of the training step (imagenet).
    read_ahead: Annotated[Count, IMAGENET, FREE] = 2


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """The networks `transformer` (text) and `encoder-decoder` (translation)."""

    # Number of blocks, each with an attention layer and a perceptron. An encoder and its
    # decoder have this number each.
    layers: Count = 4
    # Attention heads per block; twice this number must divide the width.
    heads: Count = 4
    # Size of the embedding vectors.
    width: Count = 128
    # Encoding of positions: rotary (RoPE), or a learned vector per position.
    positions: Literal["rotary", "learned"] = "rotary"
    # Type of the activations. Parameters, logits and the loss are float32.
    dtype: Literal["float32", "bfloat16"] = "float32"


@dataclasses.dataclass(frozen=True)
class WorkersConfig:
    """The grid of workers. A run may be resumed with another grid (see --resume)."""

    # Number of nodes, which are groups of workers with a fast interconnect.
    nodes: Count = 2
    # Number of workers in each node.
    locals: Count = 4
    # Devices of each worker, as mesh axes NAME=SIZE (for example fsdp=4). The worker's
    # parameters, optimizer state and batches are sharded over all of them.
    inside: Annotated[
        tuple[str, ...],
        Condition("different names with sizes, such as fsdp=4", _are_axes),
    ] = ()

    @property
    def axes(self) -> dict[str, int]:
        """The mesh axes inside a worker and their sizes.

        >>> WorkersConfig(inside=("fsdp=2", "model=4")).axes
        {'fsdp': 2, 'model': 4}
        """
        pairs = (axis.split("=") for axis in self.inside)
        return {name: int(size) for name, size in pairs}

    @property
    def devices_each(self) -> int:
        """The number of devices of a worker."""
        return math.prod(self.axes.values())

    @property
    def devices(self) -> int:
        """The number of devices when no two workers share one."""
        return self.nodes * self.locals * self.devices_each

    def fits(self, places: int) -> bool:
        """Whether so many places can have whole nodes, or equal parts of a node, each.

        >>> WorkersConfig(nodes=2, locals=4).fits(4), WorkersConfig(nodes=3).fits(2)
        (True, False)
        """
        each, rest = divmod(places, self.nodes)
        return self.nodes % places == 0 or (rest == 0 and self.locals % each == 0)


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer of each worker."""

    # The optimizer. muon applies to matrices and uses adamw for all other parameters,
    # embeddings included; lars is for large batches (with --method allreduce).
    name: Optimizer = "sgd"
    # Learning rate; with a schedule, the highest one.
    learning_rate: Positive = 0.1
    # Momentum coefficient, in [0, 1) (sgd, lars: defaults to 0; muon: defaults to 0.95).
    momentum: Annotated[float | None, BELOW_ONE, _optimizers("sgd", "muon", "lars")] = None
    # Use Nesterov momentum instead of classical momentum (sgd, lars). muon always does.
    nesterov: Annotated[bool, _optimizers("sgd", "lars")] = False
    # Decay rates of the two moments, in [0, 1). Defaults to 0.9 and 0.999 (adamw, and the
    # adamw of muon) or 0.9 and 0.99 (lion).
    betas: Annotated[
        tuple[float, float] | None,
        Condition("in [0, 1)", lambda x: all(map(BELOW_ONE.holds, x))),
        _optimizers("adamw", "lion", "muon"),
    ] = None
    # Constant added to the root of the second moment (adamw, muon).
    eps: Annotated[Positive, _optimizers("adamw", "muon")] = 1e-8
    # Weight decay: an L2 penalty that is added to the gradient (sgd, lars), or decoupled
    # from the gradient and multiplied by the learning rate (adamw, lion, muon).
    weight_decay: Annotated[float, NOT_NEGATIVE] = 0.0
    # Parameters that decay: all, or matrices and convolutions only, without biases, norm
    # scales and embeddings (muon: only the parameters that are not left to adamw).
    decay_of: Literal["all", "matrices"] = "all"
    # Maximum norm of a worker's gradient; a longer gradient is scaled down to it.
    clip: Annotated[float | None, POSITIVE] = None
    # Schedule of the learning rate after the warm-up: constant, drops at the steps in
    # --optimizer.drop-at, a cosine that ends at the last step, or inverse-sqrt, which falls
    # with the inverse square root of the step.
    schedule: Schedule = "constant"
    # Number of steps over which the learning rate rises linearly to its full value.
    warmup_steps: Annotated[int, NOT_NEGATIVE] = 0
    # Steps after which the learning rate is multiplied by --optimizer.drop-factor.
    drop_at: Annotated[
        tuple[int, ...], Condition("positive and ascending", _ascend), DROPS
    ] = ()
    # Factor that the learning rate is multiplied by at each step of --optimizer.drop-at.
    drop_factor: Annotated[Positive, DROPS] = 0.1
    # Final value of the cosine, as a fraction of the learning rate, in [0, 1].
    final_fraction: Annotated[
        float,
        Condition("in [0, 1]", lambda x: 0 <= x <= 1),
        Only("optimizer.schedule", ("cosine",)),
    ] = 0.0


@dataclasses.dataclass(frozen=True)
class DistributedConfig:
    """The rendezvous of several processes, on one host or many. Not saved with the run."""

    # The launcher of the processes. `auto` detects Slurm, MPI, torchrun, Kubernetes, a TPU
    # slice and others; `mpi4py` asks any MPI; `none` trains in this process only.
    cluster: Literal["auto", "mpi4py", "none"] = "auto"
    # HOST:PORT of process 0, if it cannot be detected.
    coordinator: Annotated[str | None, Condition("HOST:PORT", _is_address)] = None
    # Number of processes, if it cannot be detected.
    num_processes: Annotated[int | None, COUNT] = None
    # Rank of this process, from 0, if it cannot be detected.
    process_id: int | None = None
    # GPUs of a process: all visible ones, or one by its rank on the host. `auto` takes one
    # if the process sees several and the launcher started several processes on the host.
    gpus: Literal["auto", "one", "all"] = "auto"
    # Seconds to wait until all processes have connected.
    start_timeout: Count = 300
    # Seconds without a heartbeat after which a process counts as lost.
    heartbeat_timeout: Count = 30


@dataclasses.dataclass(frozen=True)
class RayConfig:
    """Ray: asynchronous workers, or processes in lock step (`--ray.processes`)."""

    # Number of processes of a run in lock step. Ray Train starts them, and restarts them
    # after a failure. Defaults to training in this process.
    processes: Annotated[int | None, COUNT, LOCK_STEP] = None
    # Emulated CPU devices per process. Defaults to its share of the workers.
    devices_per_process: Annotated[int | None, COUNT, LOCK_STEP] = None
    # Minimum number of processes. While fewer than --ray.processes are available, but at
    # least this many, the run continues with fewer nodes.
    min_processes: Annotated[int | None, COUNT, LOCK_STEP] = None
    # Maximum number of restarts.
    max_failures: Annotated[int, NOT_NEGATIVE, LOCK_STEP] = 3
    # Seconds without new metrics after which the processes are restarted.
    progress_timeout: Annotated[Positive, LOCK_STEP] = 1800.0
    # Address of the Ray cluster: HOST:PORT, or `auto` for the one that this host belongs
    # to. By default the run starts Ray on this machine and stops it at the end.
    address: Annotated[
        str | None, Condition("HOST:PORT or auto", lambda x: x == "auto" or _is_address(x))
    ] = None
    # CPUs that Ray reserves for each worker or process.
    cpus_per_worker: Annotated[float, SHARE] = 1.0
    # GPUs that Ray reserves for each worker or process. With a fraction, several workers
    # share a GPU; with 0, workers use the CPU. An asynchronous worker of several devices
    # (--workers.inside) needs as many.
    gpus_per_worker: Annotated[float, SHARE] = 0.0
    # Seconds that a worker waits for another worker before it continues without it.
    timeout: Annotated[Positive, ASYNCHRONOUS] = 10.0
    # Seconds within which all workers or processes must have started.
    start_timeout: Positive = 300.0
    # Seconds without a step after which a worker is restarted. It must exceed the time
    # that compiling the first step takes.
    stall_timeout: Annotated[Positive, ASYNCHRONOUS] = 300.0
    # GiB of shared memory for messages, if the run starts Ray. Defaults to a fraction of
    # the memory, which Ray chooses.
    object_store: Annotated[
        float | None,
        # Ray refuses less than 75 MiB.
        Condition("at least 0.08, in GiB", lambda x: 0.08 <= x < math.inf),
        ASYNCHRONOUS,
    ] = None


METHOD_HELP = (
    f"--method NAME selects another method: {', '.join(METHODS)}. Options take numbers and "
    "names; schedules, functions and objects need Python. --method MODULE:FUNCTION selects "
    "your own: FUNCTION returns an lj.Exchange, and its parameters are the options."
)


@dataclasses.dataclass(frozen=True)
class Config:
    """One experiment."""

    # Name of the run, which begins the name of its folder.
    name: Annotated[str, NAME]
    # The network.
    model: Model
    # The data that the workers learn from.
    data: DataConfig = DataConfig()
    # The size of the networks `transformer` and `encoder-decoder`.
    transformer: Annotated[TransformerConfig, Only("model", tuple(NETWORKS.values()))] = (
        TransformerConfig()
    )
    # The grid of workers.
    workers: Annotated[WorkersConfig, FREE] = WorkersConfig()
    # The optimizer of each worker.
    optimizer: OptimizerConfig = OptimizerConfig()
    method: Annotated[MethodConfig, tyro.conf.arg(help=METHOD_HELP)] = methods.make("lsgd")
    # Batch statistics: each worker keeps its own (keep), they are averaged whenever the
    # method communicates, asynchronously before each test and checkpoint (average), or they
    # are reestimated from training data before each test (reestimate).
    batch_statistics: Annotated[Statistics, BATCH_NORM] = "reestimate"
    # Number of training steps of each worker.
    steps: Annotated[Count, FREE] = 1000
    # Share of the target distribution that is uniform over all tokens (translation).
    label_smoothing: Annotated[float, BELOW_ONE, TRANSLATION] = 0.0
    # Images, windows of text or pairs of sentences, per worker and step.
    batch_size: Count = 32
    # Seed of the initial parameters, the order of the data and all other randomness.
    seed: Annotated[int, SEED] = 0
    # Steps between reports in metrics.jsonl and on the screen.
    log_every: Annotated[Count, FREE] = 16
    # Steps between tests of the center and of the best worker.
    test_every: Annotated[Count, FREE] = 200
    # Steps between checkpoints. A test that is the best so far is saved, too.
    checkpoint_every: Annotated[Count, FREE] = 200
    # Number of recent checkpoints to keep, besides the best one and the latest one with
    # finite losses.
    keep_checkpoints: Annotated[Count, FREE] = 3
    # Compile the whole step for each phase of the method (no exchange, an exchange, …), or
    # with no once with conditionals. By default the step is compiled once and each exchange
    # is a small program of its own. Methods that do not allow this (a delay, a rule that
    # reads the parameters before the step) have whole steps: for each phase on
    # accelerators, where a delayed message travels while the gradient is computed.
    static_phases: Annotated[bool | None, FREE, LOCK_STEP] = None
    # Send messages of a method with a delay beside the steps, on CPU devices of their own,
    # while whole steps run. All numbers are those of the same delay inside the step. By
    # default they travel beside where processes lie between the workers (on accelerators:
    # hosts or slices, and with a delay of more than one step), if the settings allow it.
    beside: Annotated[bool | None, FREE, LOCK_STEP] = None
    # Go on without processes that are lost, with at least this many workers, and take back
    # those that start again; messages travel beside the steps. Process 0 must live, and
    # tests. Each process saves and logs its own workers, in a folder below that of process
    # 0. By default a lost process ends the run.
    min_workers: Annotated[int | None, COUNT, FREE, LOCK_STEP] = None
    # Stop after this many consecutive steps without a finite loss on any worker. Steps that
    # compute no gradient (palsgd) do not count.
    stop_after_nonfinite: Annotated[Count, FREE] = 100
    # Project of Weights & Biases, or TEAM/PROJECT, to which the metrics are sent, too. It
    # needs the extra `wandb`.
    wandb: Annotated[
        str | None, Condition("PROJECT or TEAM/PROJECT", _is_project), FREE
    ] = None
    # Project of trackio, on this machine or where its environment variables say, to which
    # the metrics are sent, too. It needs the extra `trackio`.
    trackio: Annotated[str | None, Condition("the name of a project", bool), FREE] = None
    # Folder in which new run folders are created.
    runs: Annotated[str, PATH, NOT_EMPTY, FREE] = "runs"
    # The run folder. Defaults to a new folder, RUNS/NAME-DATE-TIME.
    run_dir: Annotated[str | None, PATH, NOT_EMPTY, FREE] = None
    # Resume from the last checkpoint in --run-dir, by default that of the newest run of
    # NAME. The run keeps its grid unless --workers gives another one.
    resume: Annotated[bool, FREE] = False
    # The named experiment that the settings are based on. Defaults to the name.
    experiment: Annotated[tyro.conf.Suppress[str], FREE] = ""
    # The rendezvous of several processes.
    distributed: Annotated[DistributedConfig, LOCK_STEP, LOCAL] = DistributedConfig()
    # Ray: asynchronous workers, or processes in lock step.
    ray: Annotated[RayConfig, FREE] = RayConfig()

    @property
    def may_send_beside(self) -> bool:
        """Whether messages may travel beside the steps, as far as settings tell.

        >>> late = methods.make("diloco", delay=2)
        >>> Config(name="a", model="cnn7", method=late).may_send_beside
        True
        """
        if self.beside is not None or self.min_workers is not None:
            return self.beside is not False
        is_whole = self.static_phases is not None or self.batch_statistics == "average"
        return bool(getattr(self.method, "delay", 0)) and not is_whole

    def __post_init__(self):
        values = fields(self)
        check_each(values)
        for name, rule, holds in _relations(self):
            if not holds:
                _refuse(name, rule, values)


class Setting(NamedTuple):
    """A setting of a configuration: its type, its default, its `Condition` and `Only`."""

    hint: Any
    default: Any
    notes: tuple[Any, ...]


def settings_of(
    cls: Any, prefix: str = "", notes: tuple[Any, ...] = ()
) -> Iterator[tuple[str, Setting]]:
    """Yields the settings of a dataclass by their full names."""
    hints = typing.get_type_hints(cls, include_extras=True)
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        every = notes
        if typing.get_origin(hint) is Annotated:
            hint, *more = typing.get_args(hint)
            every = *notes, *more
        if dataclasses.is_dataclass(hint):
            yield from settings_of(hint, f"{prefix}{field.name}.", every)
        else:
            yield prefix + field.name, Setting(hint, field.default, every)


SETTINGS = dict(settings_of(Config))  # without those of a method
WORKERS, DISTRIBUTED, RAY = (
    {name for name in SETTINGS if name.startswith(f"{group}.")}
    for group in ("workers", "distributed", "ray")
)
FREE_PER_PROCESS = {x for x in SETTINGS if LOCAL in SETTINGS[x].notes}
FREE_ON_RESUME = FREE_PER_PROCESS | {
    name for name, x in SETTINGS.items() if FREE in x.notes
}

FLOAT32_MAX = 3.4028235e38
FLOAT32_MIN = 1.1754944e-38  # below it, devices compute with 0
MOST_WORKERS = 2**16  # jax needs longer to place many more than any run lasts


def check_each(values: Mapping[str, Any]) -> None:
    """Checks settings one by one.

    Args:
      values: all settings by their full names.

    Raises:
      ValueError: a setting is impossible, or has no effect.
    """
    for data, model in NETWORKS.items():
        if (values["data.name"] == data) != (values["model"] == model):
            _refuse("model", f"{model} with data.name={data}, and only there", values)
    for name, choice in without_effect(values):
        _check_left_out([name], f"with {choice}={values[choice]}", values)
    for name, setting in SETTINGS.items():
        for rule in setting.notes:
            is_rule = isinstance(rule, Condition) and values[name] is not None
            if is_rule and not rule.holds(values[name]):
                _refuse(name, rule.text, values)
    for name, value in values.items():
        numbers = value if isinstance(value, tuple) else (value,)
        for x in numbers:
            if type(x) is float and not abs(x) <= FLOAT32_MAX:
                _refuse(name, "finite as a float32", values)
            if type(x) is float and 0 < abs(x) < FLOAT32_MIN:
                _refuse(name, "above 1.2e-38, below which a float32 is 0", values)
            if type(x) is int and abs(x) >= 2**31 and name != "seed":
                _refuse(name, "less than 2**31", values)


def without_effect(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields (setting, choice) for settings that belong to another value of the choice."""
    for name, setting in SETTINGS.items():
        for note in setting.notes:
            if isinstance(note, Only) and not note.applies(values[note.choice]):
                yield name, note.choice


def _check_left_out(names: Iterable[str], why: str, values: Mapping[str, Any]) -> None:
    for name in names:
        if values[name] != SETTINGS[name].default:
            _refuse(name, f"left out {why}", values)


def _refuse(name: str, rule: str, values: Mapping[str, Any]) -> typing.NoReturn:
    raise ValueError(f"`{name}` must be {rule}, got {name}={values[name]}")


def _relations(config: Config) -> Iterator[tuple[str, str, bool]]:
    """Yields conditions that involve several settings: (setting, rule, whether it holds).

    Raises:
      ValueError: an option of Ray has no effect.
    """
    grid = config.workers
    net = config.transformer
    optimizer = config.optimizer
    most = MOST_WORKERS // grid.locals
    rule = f"at most {most} with workers.locals={grid.locals}"
    yield "workers.nodes", rule, grid.nodes <= most
    each = grid.devices_each
    warmup = optimizer.warmup_steps
    rule = f"a multiple of {each}, the devices of a worker (workers.inside)"
    yield "batch_size", rule, config.batch_size % each == 0
    rule = f"divisible by twice the heads (transformer.heads={net.heads})"
    yield "transformer.width", rule, net.width % (2 * net.heads) == 0
    rule = f"more than the warm-up (optimizer.warmup_steps={warmup})"
    yield "steps", rule, optimizer.schedule != "cosine" or warmup < config.steps
    fits = config.data.name != "cifar10" or config.data.crop <= 32
    yield "data.crop", "at most 32 with cifar10", fits
    both = bool(config.data.source) == bool(config.data.target)
    yield "data.target", "given with data.source, and only then", both

    least = config.min_workers
    is_some = least is None or least <= grid.nodes * grid.locals
    yield "min_workers", "at most the number of workers", is_some
    rule = "left out with --beside False"
    yield "min_workers", rule, least is None or config.beside is not False
    rule = "left out with ray.processes, which Ray restarts"
    yield "min_workers", rule, least is None or config.ray.processes is None

    own = config.distributed
    ray = config.ray
    values = fields(config)
    if {"method.local_period", "method.global_period"} <= values.keys():
        local = values["method.local_period"]
        outer = values["method.global_period"]
        rule = f"at least method.local_period={local}"
        are_fixed = isinstance(local, int) and isinstance(outer, int)
        yield "method.global_period", rule, not are_fixed or local <= outer
    if not config.method.is_asynchronous:
        if ray.processes is None:
            _check_left_out(sorted(RAY), "without ray.processes", values)
        elif own.process_id is None:
            rule = f"a multiple of ray.processes={ray.processes} with ray.min_processes"
            least = ray.processes if ray.min_processes is None else ray.min_processes
            elastic = least < ray.processes
            yield "workers.nodes", rule, not elastic or grid.nodes % ray.processes == 0
            rule = f"at most ray.processes={ray.processes}"
            yield "ray.min_processes", rule, least <= ray.processes
            rule = f"such that ray.processes={ray.processes} share all workers equally"
            shared = grid.nodes * grid.locals % ray.processes == 0
            yield "workers.nodes", rule, shared
    elif each > 1:
        rule = f"0 or {each}, the devices of a worker (workers.inside)"
        yield "ray.gpus_per_worker", rule, ray.gpus_per_worker in (0, each)
    if ray.address is not None:
        why = "with ray.address, whose cluster has its own"
        _check_left_out(["ray.object_store"], why, values)
    fits = own.process_id is None or 0 <= own.process_id < (own.num_processes or 2**31)
    yield "distributed.process_id", "in [0, num_processes)", fits


def fields(config: Config) -> dict[str, Any]:
    """All settings by their full names.

    >>> fields(Config(name="a", model="cnn7"))["workers.nodes"]
    2
    """
    return flat(nested(config))


def nested(config: Config) -> dict[str, Any]:
    """The configuration as nested dicts, with the name of the method among its options."""
    values = dataclasses.asdict(config)
    return values | {"method": {"name": config.method.name, **values["method"]}}


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of nested dicts by their paths; an empty dict is a value.

    Raises:
      ValueError: two values have the same path, as in {"a": {"b": 1}, "a.b": 2}.
    """
    values: dict[str, Any] = {}
    for name, value in tree.items():
        is_group = isinstance(value, dict) and value
        more = flat(value, f"{prefix}{name}.") if is_group else {prefix + name: value}
        twice = values.keys() & more.keys()
        if twice:
            raise ValueError(f"{min(twice)} is given twice")
        values |= more
    return values
