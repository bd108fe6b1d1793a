"""Lock step on Ray Train: Ray places the processes of a run and starts them again.

Each worker of Ray Train runs the trainer as a child process, because Ray Train calls its
function in a thread, where no signal handler can be set. If a process or a host is lost,
Ray Train starts the group anew with what is there, and the run goes on from its checkpoint.
"""

import contextlib
import dataclasses
import math
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import ray
import ray.train
from ray.exceptions import RayError
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.api.config import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxConfig, JaxTrainer

import lsgd_jax as lj
from train.cluster.exit_status import INTERRUPTED, LOST, STOPPED, SUCCESS, WRONG_USAGE
from train.config import Config
from train.launch import PASSED, free_port, rendezvous_options, start


ROOT = pathlib.Path(__file__).parents[2]  # from which the workers import `train`
LOOK_S = 0.5  # between two looks at a child, and at what is to be shown
ELASTIC_S = 60.0  # within which a group must have started where fewer would do
DELIBERATE = (SUCCESS, STOPPED, WRONG_USAGE, INTERRUPTED)  # these call for no restart


@dataclasses.dataclass(frozen=True)
class Job:
    """The command that the processes run, as each of them needs it.

    Attributes:
      arguments: of the trainer.
      begun: the file that is there once the run has begun, in the run folder.
      told: the run's metrics, a file.
      devices: emulated CPU devices of each process; None: as the trainer chooses.
      nodes_each: nodes of workers in each process where their number may change, or None.
      uses_gpus: whether a process has GPUs.
      progress_timeout: seconds without new metrics after which a process is ended.
      cwd: the folder that relative paths refer to.
    """

    arguments: tuple[str, ...]
    begun: pathlib.Path
    told: pathlib.Path
    devices: int | None
    nodes_each: int | None
    uses_gpus: bool
    progress_timeout: float
    cwd: str

    def command(self, coordinator: str, size: int, rank: int) -> list[str]:
        """The arguments of one of `size` processes; a run that has begun is resumed."""
        more = ["--run-dir", str(self.begun.parent)]
        if self.begun.exists():
            more.append("--resume")
        if self.nodes_each is not None:
            more += ["--workers.nodes", str(self.nodes_each * size)]
        return [*self.arguments, *more, *rendezvous_options(coordinator, size, rank)]

    def environment(self) -> dict[str, str]:
        """The environment of a process."""
        found = os.environ | {"PYTHONUNBUFFERED": "1"}
        if self.devices is not None:
            found["JAX_NUM_CPU_DEVICES"] = str(self.devices)
        if not self.uses_gpus:
            found.setdefault("JAX_PLATFORMS", "cpu")
        return found


class Board:
    """An actor beside the driver: what is to be shown, to be stopped, and how it ended."""

    def __init__(self):
        self._lines: list[str] = []
        self._asked = 0
        self._status: int | None = None

    def say(self, line: str) -> None:
        """Has the driver show a line."""
        self._lines.append(line)

    def take(self) -> list[str]:
        """The lines that are to be shown, once."""
        taken, self._lines = self._lines, []
        return taken

    def ask(self, number: int) -> None:
        """Asks all processes to stop, by this signal."""
        self._asked = self._asked or number

    def asked(self) -> int:
        """The signal by which all are asked to stop, or 0."""
        return self._asked

    def end(self, status: int) -> None:
        """Notes how the run has ended: by the highest status of its processes."""
        self._status = max(status, self._status or 0)

    def status(self) -> int | None:
        """The status with which the run has ended; None: it has not."""
        return self._status


def work(given: dict[str, Any]) -> None:
    """One process of the group, as Ray Train calls it; raises if it has to start again."""
    job, board = given["job"], given["board"]
    context = ray.train.get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    mine = f"{ray.util.get_node_ip_address()}:{free_port()}"
    coordinator = broadcast_from_rank_zero(mine)
    if ray.get(board.asked.remote()):
        return
    arguments = job.command(coordinator, size, rank)
    child = start("train", arguments, job.environment(), cwd=job.cwd)
    reader = threading.Thread(target=_pass_on, args=(child, rank, board), daemon=True)
    reader.start()
    asked = _watch(child, job, board, is_main=rank == 0)
    reader.join()
    if child.returncode in DELIBERATE:
        ray.get(board.end.remote(child.returncode))
    elif not asked and ray.get(board.status.remote()) is None:
        line = f"process {rank} ended with status {child.returncode}"
        if child.returncode not in (LOST, -signal.SIGABRT):  # not because of another one
            ray.get(board.say.remote(f"warning: {line}; the processes start again"))
        raise RuntimeError(line)


def _pass_on(child: subprocess.Popen[str], rank: int, board: Any) -> None:
    """Has the driver show what a process prints."""
    for line in child.stdout or ():
        board.say.remote(f"[{rank}] {line.rstrip()}" if rank else line.rstrip())


def _watch(child: subprocess.Popen[str], job: Job, board: Any, is_main: bool) -> int:
    """Waits for the end of a process; the signal that it was asked to stop by, or 0."""
    began, asked = time.time(), 0
    while child.poll() is None:
        time.sleep(LOOK_S)
        if not asked and (asked := ray.get(board.asked.remote())):
            child.send_signal(asked)
        silent = time.time() - max(began, _written(job.told))
        if is_main and silent > job.progress_timeout:
            line = f"no progress for {silent:.0f} s (--ray.progress-timeout)"
            ray.get(board.say.remote(f"warning: {line}; the processes start again"))
            child.kill()
            child.wait()
    return asked


def _written(path: pathlib.Path) -> float:
    """When a file was last written; 0 if there is none."""
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def run(
    config: Config, arguments: Sequence[str], begun: pathlib.Path, told: pathlib.Path
) -> int:
    """Trains in lock step in processes that Ray Train starts; the exit status.

    Args:
      config: the run's.
      arguments: the command line that it was made of.
      begun, told: as of `Job`.
    """
    options, nodes = config.ray, config.workers.nodes
    assert options.processes is not None
    job = Job(
        tuple(arguments),
        begun,
        told,
        options.devices_per_process,
        None if options.min_processes is None else nodes // options.processes,
        options.gpus_per_worker > 0,
        options.progress_timeout,
        os.getcwd(),
    )
    # Ray Train may wait for a host whose loss is not known yet before it takes fewer.
    patience = min(options.start_timeout, math.inf if job.nodes_each is None else ELASTIC_S)
    os.environ |= {
        "RAY_CHDIR_TO_TRIAL_DIR": "0",
        "RAY_TRAIN_METRICS_ENABLED": "0",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(patience),
    }
    engine = lj.asynchronous.ray_engine
    placed = engine.Options(
        address=options.address,
        num_cpus=options.cpus_per_worker,
        num_gpus=options.gpus_per_worker,
    )
    try:
        with engine.cluster(placed, options.processes), _storage(begun.parent) as storage:
            return _follow(_trainer(config, storage), job)
    except (RuntimeError, RayError) as error:
        print(f"error: {error}", file=sys.stderr)
        return LOST


@contextlib.contextmanager
def _storage(folder: pathlib.Path) -> Iterator[str]:
    """A folder for Ray Train's own notes, beside the run folder, which all hosts see."""
    path = folder.with_name(f".{folder.name}.ray")
    try:
        yield str(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _trainer(config: Config, storage: str) -> Any:
    """Job and board -> a trainer of Ray Train."""
    options = config.ray
    processes, least = options.processes or 1, options.min_processes
    resources = {"CPU": options.cpus_per_worker, "GPU": options.gpus_per_worker}
    scaling = ScalingConfig(
        num_workers=processes if least is None else (least, processes),
        use_gpu=options.gpus_per_worker > 0,
        resources_per_worker={name: count for name, count in resources.items() if count},
    )
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    run_config = RunConfig(
        name="train",
        storage_path=storage,
        failure_config=FailureConfig(max_failures=options.max_failures),
        worker_runtime_env={
            "env_vars": {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        },
    )
    return lambda job, board: JaxTrainer(
        work,
        train_loop_config={"job": job, "board": board},
        jax_config=JaxConfig(),  # the children call jax.distributed
        scaling_config=scaling,
        run_config=run_config,
    )


def _follow(trainer: Any, job: Job) -> int:
    """Shows what the processes print, passes signals on to them; the exit status."""
    here = ray.get_runtime_context().get_node_id()
    near = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(here, soft=False)
    actor: Any = ray.remote(Board)
    board = actor.options(num_cpus=0, scheduling_strategy=near).remote()
    failures: list[Exception] = []

    def fit() -> None:
        try:
            trainer(job, board).fit()
        except Exception as error:  # Ray Train has given up
            failures.append(error)

    def ask(number: int, frame: object) -> None:
        board.ask.remote(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second one interrupts

    kept = {number: signal.signal(number, ask) for number in PASSED}
    fitting = threading.Thread(target=fit, daemon=True)  # Ray Train takes SIGINT elsewhere
    fitting.start()
    try:
        while fitting.is_alive():
            fitting.join(LOOK_S)
            _show(board)
        _show(board)
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
    status = ray.get(board.status.remote())
    if status is not None:
        return status
    reason = " ".join(str(failures[0]).split())[:300] if failures else "asked to stop early"
    print(f"error: the run has not ended: {reason}", file=sys.stderr)
    return LOST if failures else STOPPED


def _show(board: Any) -> None:
    for line in ray.get(board.take.remote()):
        print(line, flush=True)
