"""Lock step on Ray Train, which places the processes of a run and restarts them.

Each worker of Ray Train runs the trainer as a child process, because Ray Train calls its
function in a thread, where no signal handler can be set. If a process or a host fails, Ray
Train restarts the group on the remaining hosts, and the run resumes from its checkpoint.
"""

import contextlib
import dataclasses
import os
import pathlib
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Generator, Sequence
from typing import Any

import ray
import ray.train
from ray.exceptions import RayError
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.api.config import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.jax import JaxConfig, JaxTrainer

import lsgd_jax as lj
from train.config.schema import Config, RayConfig
from train.launch import OF_OTHERS, PASSED, free_port, heeded, rendezvous_options, start
from train.process.exit_status import DELIBERATE, RESUME, STOPPED
from train.process.messages import one_line


ROOT = pathlib.Path(__file__).parents[2]  # the folder from which workers import `train`
LOOK_S = 0.5  # interval at which children and messages are polled
ELASTIC_S = 60.0  # timeout for starting a group if fewer processes would do
ANSWER_S = 60.0  # timeout of the board
LONGEST = 500  # characters of an error, which may say what to try
SETTLE_S = 5.0  # within which processes that a loss has ended all end


@dataclasses.dataclass(frozen=True)
class Job:
    """The command that the processes run.

    Attributes:
      arguments: the arguments of the trainer.
      config_file: config.json in the run folder, which exists once the run has begun.
      metrics_file: metrics.jsonl in the run folder, which changes while the run progresses.
      nodes: nodes of workers if all processes run.
      options: the options `--ray.*`.
      cwd: the folder that relative paths refer to.
    """

    arguments: tuple[str, ...]
    config_file: pathlib.Path
    metrics_file: pathlib.Path
    nodes: int
    options: RayConfig
    cwd: str

    def command(self, coordinator: str, size: int, rank: int) -> list[str]:
        """The arguments of one of `size` processes. A run that has begun is resumed."""
        more = ["--run-dir", str(self.config_file.parent)]
        if self.config_file.exists():
            more.append("--resume")
        if self.options.min_processes is not None:  # each process keeps its share of nodes
            share = self.nodes // (self.options.processes or 1)
            more += ["--workers.nodes", str(share * size)]
        return [*self.arguments, *more, *rendezvous_options(coordinator, size, rank)]

    def environment(self) -> dict[str, str]:
        """The environment of a process."""
        found = os.environ | {"PYTHONUNBUFFERED": "1"}
        if self.options.devices_per_process is not None:
            found["JAX_NUM_CPU_DEVICES"] = str(self.options.devices_per_process)
        if not self.options.gpus_per_worker:
            found.setdefault("JAX_PLATFORMS", "cpu")
        return found


class Board:
    """An actor beside the driver: lines to show, the request to stop, the exit status."""

    def __init__(self):
        self._lines: list[str] = []
        self._asked = 0
        self._status: int | None = None
        self._left: set[int] = set()
        self._is_explained = True

    def say(self, line: str) -> None:
        """Adds a line for the driver to show."""
        self._lines.append(line)

    def begin(self, size: int) -> None:
        """Notes that a group of processes starts."""
        self.explain("Ray has lost or replaced a process or a host")
        self._left = set(range(size))
        self._is_explained = False

    def explain(self, reason: str) -> None:
        """Says why the group is restarted, unless another process has said so."""
        if not self._is_explained:
            self._is_explained = True
            self.say(f"warning: {reason}; the processes are restarted")

    def miss(self, rank: int) -> None:
        """Notes that a process has ended because it misses another one."""
        self._left.discard(rank)

    def explain_by_silence(self) -> None:
        """Names the processes that have not ended although the others miss them."""
        silent = " and ".join(f"process {rank}" for rank in sorted(self._left))
        if silent:
            self.explain(f"{silent} no longer answered")

    def take(self) -> list[str]:
        """Returns the lines to show, and forgets them."""
        taken = self._lines
        self._lines = []
        return taken

    def ask(self, number: int) -> None:
        """Requests all processes to stop, by a signal. The first request counts."""
        self._asked = self._asked or number

    def asked(self) -> int:
        """Returns the signal by which all processes must stop, or 0."""
        return self._asked

    def end(self, status: int) -> None:
        """Records the exit status of a process. The highest one counts."""
        self._status = max(status, self._status or 0)

    def status(self) -> int | None:
        """Returns the exit status of the run, or None while it runs."""
        return self._status


def work(given: dict[str, Any]) -> None:
    """Runs one process of the group, in a thread of Ray Train. Raises to be restarted."""
    job = given["job"]
    board = given["board"]
    context = ray.train.get_context()
    rank = context.get_world_rank()
    size = context.get_world_size()
    if rank == 0:
        ray.get(board.begin.remote(size))
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
    is_saved = asked and child.returncode == RESUME
    if is_saved or child.returncode in DELIBERATE:  # not restarted
        ray.get(board.end.remote(child.returncode))
    elif not asked and ray.get(board.status.remote()) is None:
        line = f"process {rank} ended with status {child.returncode}"
        if child.returncode in OF_OTHERS:
            ray.get(board.miss.remote(rank))
            time.sleep(SETTLE_S)
            ray.get(board.explain_by_silence.remote())
        else:
            ray.get(board.explain.remote(line))
        raise RuntimeError(line)


def _pass_on(child: subprocess.Popen[str], rank: int, board: Any) -> None:
    """Passes the output of a process on to the driver."""
    for line in child.stdout or ():
        board.say.remote(f"[{rank}] {line.rstrip()}" if rank else line.rstrip())


def _watch(child: subprocess.Popen[str], job: Job, board: Any, is_main: bool) -> int:
    """Waits for a process to end. Returns the signal that requested it to stop, or 0."""
    progress = ProgressFile(job.metrics_file)
    asked = 0
    while child.poll() is None:
        time.sleep(LOOK_S)
        if not asked:
            asked = ray.get(board.asked.remote())
            if asked:
                child.send_signal(asked)
        silent = progress.silence()
        if is_main and silent > job.options.progress_timeout:
            line = f"no progress for {silent:.0f} s (--ray.progress-timeout)"
            ray.get(board.explain.remote(line))
            child.kill()
            child.wait()
    return asked


class ProgressFile:
    """The progress of a run, seen in a file that changes with it.

    A file server has a clock of its own, so only changes of its times count.
    """

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._seen = _written(path)
        self._changed = time.monotonic()

    def silence(self) -> float:
        """Returns the seconds since a change was last seen."""
        now = time.monotonic()
        written = _written(self._path)
        if written != self._seen:
            self._seen = written
            self._changed = now
        return now - self._changed


def _written(path: pathlib.Path) -> tuple[int, int] | None:
    """The time at which a file was last written and its size, or None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


def run(
    config: Config,
    arguments: Sequence[str],
    config_file: pathlib.Path,
    metrics_file: pathlib.Path,
) -> tuple[int, str]:
    """Trains in lock step in processes that Ray Train starts.

    Args:
      config: the configuration of the run.
      arguments: the command line from which it was made.
      config_file, metrics_file: see `Job`.

    Returns:
      The exit status, and the reason why the processes have not ended by themselves, or ''.
    """
    options = config.ray
    nodes = config.workers.nodes
    job = Job(
        arguments=tuple(arguments),
        config_file=config_file,
        metrics_file=metrics_file,
        nodes=nodes,
        options=options,
        cwd=os.getcwd(),
    )
    patience = options.start_timeout
    if options.min_processes is not None:
        # Ray Train may wait for a failed host before it settles for fewer processes.
        patience = min(patience, ELASTIC_S)
    os.environ |= {
        "RAY_CHDIR_TO_TRIAL_DIR": "0",
        "RAY_TRAIN_METRICS_ENABLED": "0",
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": str(patience),
    }
    engine = lj.asynchronous.ray_engine
    placed = engine.ClusterOptions(
        address=options.address,
        num_cpus=options.cpus_per_worker,
        num_gpus=options.gpus_per_worker,
    )
    try:
        with (
            engine.cluster(placed, options.processes or 1) as health,
            _storage(config_file.parent) as storage,
        ):
            return _follow(job, storage, health)
    except (RuntimeError, RayError) as error:
        return RESUME, one_line(error, LONGEST)


@contextlib.contextmanager
def _storage(folder: pathlib.Path) -> Generator[str]:
    """A folder for Ray Train's own files, beside the run folder, where all hosts see it."""
    path = folder.with_name(f".{folder.name}.ray")
    try:
        yield str(path)
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _trainer(job: Job, board: Any, storage: str) -> JaxTrainer:
    """The trainer of Ray Train, which starts the processes."""
    options = job.options
    processes = options.processes or 1
    least = options.min_processes
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
    return JaxTrainer(
        work,
        train_loop_config={"job": job, "board": board},
        jax_config=JaxConfig(),  # the child processes call jax.distributed
        scaling_config=scaling,
        run_config=run_config,
    )


def _follow(job: Job, storage: str, health: Any) -> tuple[int, str]:
    """Shows the output of the processes and passes signals on.

    Returns:
      See `run`.

    Raises:
      RuntimeError, RayError: Ray has failed, or the board's process has.
    """
    here = ray.get_runtime_context().get_node_id()
    near = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(here, soft=False)
    actor: Any = ray.remote(Board)
    restarted = {"max_restarts": -1, "max_task_retries": -1}
    board = actor.options(num_cpus=0, scheduling_strategy=near, **restarted).remote()
    failures: list[Exception] = []
    asked: list[int] = []

    def fit() -> None:
        try:
            _trainer(job, board, storage).fit()
        except Exception as error:  # Ray Train has given up
            failures.append(error)

    def ask(number: int, frame: object) -> None:
        asked.append(number)
        board.ask.remote(signal.SIGINT if number == signal.SIGINT else signal.SIGTERM)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second one interrupts

    kept = {number: signal.signal(number, ask) for number in heeded(PASSED)}
    # Ray Train handles SIGINT itself if it runs in the main thread.
    fitting = threading.Thread(target=fit, daemon=True)
    fitting.start()
    try:
        while fitting.is_alive():
            fitting.join(LOOK_S)
            _show(board, health)
        _show(board, health)
        status = _of(board.status, health)
    except BaseException:
        # Ray would end this process if the thread used it after its end.
        health.give_up()
        fitting.join(SETTLE_S)
        raise
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
    if status is not None:
        return status, ""
    if not failures:
        is_interrupted = signal.SIGINT in asked[:1]
        reason = "the run was stopped while its processes were started"
        return STOPPED if is_interrupted else RESUME, reason
    return RESUME, f"the run has not ended: {one_line(failures[0], LONGEST)}"


def _show(board: Any, health: Any) -> None:
    for line in _of(board.take, health):
        print(line, flush=True)


def _of(method: Any, health: Any) -> Any:
    """Calls a method of the board."""
    asked = method.remote()
    health.wait([asked], ANSWER_S)
    return ray.get(asked, timeout=0)
