"""Ray in the process of the driver: the cluster, its errors, signals."""

import dataclasses
import logging
import math
import os
import pathlib
import shutil
import signal
import socket
import threading
import time
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy


OWNER = "lsgd_jax.pid"  # in the folder of a session: the process that started it
END = 30.0  # seconds within which Ray's processes must end
EVERY = 1.0  # seconds between two looks at Ray's processes
SILENCE = 30.0  # seconds without the head of a cluster; Ray ends this process after 60


@dataclasses.dataclass(frozen=True)
class ClusterOptions:
    """Where the workers run, and how long they wait for each other.

    Attributes:
      address: of the cluster to join, such as "auto" or "10.0.0.1:6379". Defaults to a
        cluster on this machine that ends with the run, or to one that this process uses
        already.
      namespace: of the actors' names.
      num_cpus: per worker, as Ray counts them, for placement only.
      num_gpus: per worker; workers share a GPU if this is a fraction, and use the CPU if it
        is 0. A worker of several GPUs sees all of them as its jax devices, for an `island`.
        On the CPU an island's `make_training` calls `lsgd_jax.emulate_devices` first.
      object_store: bytes of the object store of a cluster that is started here. Defaults to
        Ray's choice.
      timeout: seconds that a worker waits for another one.
      start: seconds within which all workers must have been placed and started, and for
        which they wait for each other to begin.
      stall: seconds after which a worker that takes no step is started again; must be more
        than the time to compile the first step.
      vain: the run ends when a worker is lost this many times in a row before a new step.
      env: environment variables of the workers, such as XLA_FLAGS or JAX_NUM_CPU_DEVICES.
        With JAX_COMPILATION_CACHE_DIR a worker that is started again does not compile its
        step anew.
      log: whether the output of workers and of Ray is also written here.
    """

    address: str | None = None
    namespace: str | None = None
    num_cpus: float = 1
    num_gpus: float = 0
    object_store: int | None = None
    timeout: float = 10.0
    start: float = 300.0
    stall: float = 300.0
    vain: int = 3
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    log: bool = False

    def __post_init__(self):
        for name in ("timeout", "start", "stall"):
            limit = getattr(self, name)
            if not limit > 0:
                raise ValueError(f"`{name}` must be positive, got {name}={limit}")


def environment(num_gpus: float) -> dict[str, str]:
    """Returns the environment variables of a worker on the CPU, or on a share of a GPU."""
    if num_gpus == 0:
        return {"JAX_PLATFORMS": "cpu"}
    return {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if num_gpus % 1 else {}


def beside(kind: type, **options: Any) -> Any:
    """Returns a class of actors that run on the CPU of this process's node."""
    here = ray.get_runtime_context().get_node_id()
    remote: Any = ray.remote(kind)
    return remote.options(
        num_cpus=0,
        runtime_env={"env_vars": environment(0)},
        scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=True),
        **options,
    )


class Health:
    """The health of the processes of Ray without which this process cannot go on.

    Ray ends this process a minute after its head was lost, in its own words.

    Attributes:
      node: the node of Ray that this process belongs to, or None.
      processes: those that this process has started.
      is_lost: whether one of them was found to have failed.
    """

    def __init__(self):
        self.node: Any = getattr(ray._private.worker, "_global_node", None)
        started = getattr(self.node, "all_processes", {}).values()
        self.processes = [each.process for kind in started for each in kind]
        self._answered = self._asked = time.monotonic()
        self.is_lost = False

    def check(self) -> None:
        """Raises RuntimeError if Ray has failed."""
        reason = self._failure()
        if reason:
            self.is_lost = True
            raise RuntimeError(f"Ray has failed: {reason}")

    def give_up(self) -> None:
        """Kills Ray's processes, for which `shutdown` would wait, and their children."""
        self.is_lost = True
        psutil = ray._private.utils.psutil  # Ray brings it along
        for process in self.processes:
            with suppress(psutil.NoSuchProcess):
                children = psutil.Process(process.pid).children(recursive=True)
                process.kill()
                for child in children:
                    child.kill()

    def wait(self, refs: list[Any], timeout: float) -> list[Any]:
        """Returns those of the calls that have ended, once all have or after the timeout.

        Raises:
          RuntimeError: Ray has failed.
        """
        until = time.monotonic() + timeout
        while True:
            self.check()
            left = until - time.monotonic()
            ready, missing = ray.wait(
                refs, num_returns=len(refs), timeout=max(min(left, EVERY), 0)
            )
            if not missing or left <= 0:
                return ready

    def _failure(self) -> str:
        if self.node is None:
            return ""
        for name in ("gcs_server", "raylet"):
            for started in self.node.all_processes.get(name, ()):
                status = started.process.poll()
                if status is not None:
                    return f"its process {name} has ended with status {status}"
        return "" if self.node.all_processes else self._failure_of_joined()

    def _failure_of_joined(self) -> str:
        """Asks the head of a cluster that other commands have started."""
        now = time.monotonic()
        if now - self._asked < EVERY:
            return ""
        self._asked = now
        host, _, port = self.node.gcs_address.rpartition(":")
        with suppress(OSError), socket.create_connection((host.strip("[]"), port), EVERY):
            self._answered = now
        silent = now - self._answered
        address = f"its head at {self.node.gcs_address}"
        return "" if silent < SILENCE else f"{address} cannot be reached for {silent:.0f} s"


@contextmanager
def cluster(options: ClusterOptions, workers: int) -> Generator[Health]:
    """Connects this process to a cluster of Ray, or starts one; any runs inside use it.

    workers: number of workers for which a cluster that is started must have room.
    """
    if ray.is_initialized():
        yield Health()
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    shared: dict[str, Any] = {
        "namespace": options.namespace,
        "logging_level": logging.ERROR,
        "log_to_driver": options.log,
    }
    local: dict[str, Any] = {
        "num_cpus": max(os.cpu_count() or 1, math.ceil(workers * options.num_cpus)),
        "object_store_memory": options.object_store,
        "include_dashboard": False,
        "_node_ip_address": "127.0.0.1",
    }
    try:
        with warnings.catch_warnings():
            # JAX warns about forks, but these processes start another program at once.
            warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
            if options.address is not None:
                ray.init(address=options.address, **shared)
            else:
                with _loopback(), _private_token():
                    ray.init(address="local", **local, **shared)
    except Exception as error:  # Ray raises plain exceptions, too
        raise RuntimeError(advice(options.address, error)) from error
    health = Health()
    session = None
    if options.address is None and health.node is not None:
        # The folder of logs and sockets that Ray has made for this run.
        session = pathlib.Path(health.node.get_session_dir_path())
        claim(session)
    try:
        yield health
    finally:
        if health.is_lost:
            health.give_up()
        ray.shutdown()
        for process in health.processes:  # Ray ends them, but does not wait for it
            process.wait(END)
        if session is not None:
            shutil.rmtree(session, ignore_errors=True)


def in_one_line(error: Exception) -> str:
    """Returns the beginning of an error's message, or its name without one.

    Ray indents ids of processes and addresses, which say nothing to a user.
    """
    lines = [line for line in str(error).splitlines() if not line.startswith("\t")]
    return " ".join(" ".join(lines).split())[:300] or type(error).__name__


def advice(address: str | None, error: Exception) -> str:
    """Returns one line that says why Ray cannot be used, and what to try."""
    reason = in_one_line(error)
    if "AuthToken" in reason or "auth" in type(error).__name__.lower():
        return (
            "the Ray cluster refuses this process's token: set RAY_AUTH_MODE=token and "
            "copy ~/.ray/auth_token to every host, or set RAY_AUTH_MODE=disabled on all of "
            f"them ({reason})"
        )
    if address is not None:
        return (
            f"no Ray cluster answers at {address}: try `ray status` there; if it runs, the "
            f"token or RAY_AUTH_MODE of this host may not be the cluster's ({reason})"
        )
    return (
        "Ray did not start on this machine: check for processes of an earlier run (`ray "
        f"stop` ends them), for free memory and for space in /tmp and /dev/shm ({reason})"
    )


def claim(session: pathlib.Path) -> None:
    """Notes in a session's folder whose it is, and removes those of processes that died."""
    for note in session.parent.glob(f"*/{OWNER}"):
        with suppress(OSError, ValueError):
            if not ray._private.utils.psutil.pid_exists(int(note.read_text())):
                shutil.rmtree(note.parent, ignore_errors=True)
    with suppress(OSError):
        (session / OWNER).write_text(str(os.getpid()))


@contextmanager
def _private_token() -> Generator[None]:
    """Makes a token that Ray writes inside readable by this user only."""
    token = pathlib.Path.home() / ".ray" / "auth_token"
    is_new = not token.exists()
    yield
    if is_new and token.exists():
        token.chmod(0o600)


@contextmanager
def _loopback() -> Generator[None]:
    """Makes Ray listen on 127.0.0.1 only; it would otherwise choose another address."""
    constants: Any = ray._private.ray_constants
    kept = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = kept


@contextmanager
def signals(before: Mapping[int, Any]) -> Generator[threading.Event]:
    """An event that SIGINT and SIGTERM set, unless the program handles them itself.

    before: the handlers before Ray was started, because Ray sets its own.
    """
    signaled = threading.Event()

    def note(number: int, frame: Any) -> None:
        if signaled.is_set():
            raise KeyboardInterrupt
        signaled.set()

    for number, handler in before.items():
        module = getattr(handler, "__module__", None) or ""
        ours = handler in (signal.SIG_DFL, signal.default_int_handler)
        signal.signal(number, note if ours or module.startswith("ray.") else handler)
    try:
        yield signaled
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def handlers() -> dict[int, Any]:
    """Returns the handlers of SIGINT and SIGTERM; {} outside of the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
