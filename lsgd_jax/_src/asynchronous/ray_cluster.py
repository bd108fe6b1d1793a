"""Ray around the runs of one process: its cluster, its errors, its signals."""

import dataclasses
import logging
import math
import os
import shutil
import signal
import subprocess
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray


END = 30.0  # seconds in which Ray's processes end


@dataclasses.dataclass(frozen=True)
class Options:
    """Where the workers run, and for how long one waits for another.

    Attributes:
      address: of the cluster to join, such as "auto" or "10.0.0.1:6379"; None: Ray is
        started on this machine and ended with the run, unless it is running in this
        process already.
      namespace: of the actors' names.
      num_cpus: per worker, as Ray counts them: for placement only.
      num_gpus: per worker; a fraction: several share one. Without, workers use the CPU.
      object_store: bytes for what travels; None: Ray's choice. Of a Ray that is started.
      timeout: seconds that a worker waits for another one.
      start: seconds within which all workers must have been placed and started, and in
        which they wait for each other to begin.
      stall: seconds after which a worker that takes no step is started again; more than it
        takes to compile the first one.
      vain: how many times in a row a worker may be lost before it has taken a step.
      env: environment variables of the workers, such as XLA_FLAGS.
      log: whether what the workers and Ray write is written here, too.
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
            if not (limit := getattr(self, name)) > 0:
                raise ValueError(f"`{name}` must be positive, got {name}={limit}")


def environment(num_gpus: float) -> dict[str, str]:
    """The environment of a worker's process: CPUs only, or a share of a GPU."""
    if num_gpus == 0:
        return {"JAX_PLATFORMS": "cpu"}
    return {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if num_gpus % 1 else {}


@contextmanager
def cluster(options: Options, workers: int) -> Iterator[None]:
    """Ray as it runs in this process, joined, or started and ended; for any runs inside.

    workers: how many there is to be room for.
    """
    if ray.is_initialized():
        yield
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
            # JAX warns of forks; these start another program at once.
            warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)
            if options.address is not None:
                ray.init(address=options.address, **shared)
            else:
                with _loopback():
                    ray.init(address="local", **local, **shared)
    except Exception as error:  # Ray raises plain ones, too
        raise RuntimeError(advice(options.address, error)) from error
    processes, session = _processes(), _session() if options.address is None else None
    try:
        yield
    finally:
        ray.shutdown()
        for process in processes:  # Ray ends them, but does not wait for their end
            process.wait(END)
        if session is not None:
            shutil.rmtree(session, ignore_errors=True)


def advice(address: str | None, error: Exception) -> str:
    """One line: why Ray is not there, and what to try."""
    reason = " ".join(str(error).split())[:300] or type(error).__name__
    if "AuthToken" in reason or "auth" in type(error).__name__.lower():
        return (
            "the cluster of Ray refuses this process's token: set RAY_AUTH_MODE=token and "
            "copy ~/.ray/auth_token to every host, or set RAY_AUTH_MODE=disabled on all of "
            f"them ({reason})"
        )
    if address is not None:
        return f"no cluster of Ray answers at {address}: try `ray status` there ({reason})"
    return (
        "Ray did not start on this machine: look for processes of an earlier run (`ray "
        f"stop` ends them), for memory and for room in /tmp and /dev/shm ({reason})"
    )


def _session() -> str | None:
    """The folder of logs and sockets that Ray has made for this run."""
    node = getattr(ray._private.worker, "_global_node", None)
    return None if node is None else node.get_session_dir_path()


def _processes() -> list[subprocess.Popen]:
    """The processes that Ray has started on this machine."""
    node = getattr(ray._private.worker, "_global_node", None)
    started = getattr(node, "all_processes", {}).values()
    return [information.process for kind in started for information in kind]


@contextmanager
def _loopback() -> Iterator[None]:
    """Has Ray listen on 127.0.0.1 only; otherwise it replaces that by another address."""
    constants: Any = ray._private.ray_constants
    kept = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = kept


@contextmanager
def signals(before: Mapping[int, Any]) -> Iterator[threading.Event]:
    """Set by SIGINT and SIGTERM where nothing but Python or Ray handles them.

    before: the handlers as they were before Ray was started, which sets its own.
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
    """The handlers of SIGINT and SIGTERM; {} outside the main thread, which sets them."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
