"""One run in several processes: how they find one another, and how they part.

`join` is called once, before jax uses a device. Slurm, Open MPI before version 5,
Kubernetes and Cloud TPU are left to jax's own detection; what is decided here is whether
several processes were started at all, so that nobody gets N runs by accident.
"""

import contextlib
import glob
import importlib.util
import json
import os
import re
import signal
import socket
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax

import lsgd_jax as lj
from train.cluster import key_value_store as coordination
from train.cluster.heartbeat import Watch
from train.config import FREE_PER_PROCESS, Config, DistributedConfig, fields


ALONE = "`--distributed.cluster none` trains in this process alone"


class Started(NamedTuple):
    """How a cluster has started this process.

    Attributes:
      by: who did.
      arguments: for `jax.distributed.initialize`; what is missing jax finds out.
      local_rank, local_size: which of the host's processes this is, of how many; None
        where a process has its host's devices for itself.
    """

    by: str
    arguments: dict[str, Any]
    local_rank: int | None = None
    local_size: int | None = None


_watch: Watch | None = None  # over this process, if it is one of several


def join(config: Config) -> None:
    """Joins the processes that were started together with this one, if there are any.

    From then on the loss of one ends all, see `train.cluster.heartbeat`, unless it is to be survived,
    see `train.run.recovery`.

    Raises:
      ValueError: it can not be known who the others are, the port is taken, or the others
        were started with other options. If they do not come in time, the process ends with
        a line that says so.
    """
    global _watch
    options = config.distributed
    started = find_out(options, os.environ)
    if started is None:
        return
    where = started.arguments.get("coordinator_address", f"the address {started.by} gives")
    watch = Watch(
        f"the processes did not come together within {options.start_timeout} s through "
        f"{where}; have all been started, and can all reach it? {ALONE}"
    )
    gpus = local_device_ids(options.gpus, started, os.environ)
    # Its handler of SIGTERM would swallow the signal; see `train.cluster.signals`.
    jax.config.update("jax_enable_preemption_service", False)
    if options.survive:
        _make_losses_survivable(options.heartbeat_timeout)
    try:
        _check_port_is_free(started.arguments)
        with _without_proxies(), _ended_by_ctrl_c():
            jax.distributed.initialize(
                **started.arguments,
                local_device_ids=gpus,
                initialization_timeout=options.start_timeout,
                heartbeat_timeout_seconds=options.heartbeat_timeout,
            )
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"started by {started.by}, but {reason}; {ALONE}") from error
    watch.begin(options.heartbeat_timeout, options.survive)
    _watch = watch
    _check_agreement(config, len(watch.hosts))


def _make_losses_survivable(timeout: int) -> None:
    """Has collectives with a lost process fail, and jax not end the others because of it.

    By themselves they wait: for half an hour on CPUs, for ever on GPUs.
    """
    flags = (
        f"--xla_cpu_collective_timeout_seconds={timeout}",
        "--xla_gpu_nccl_terminate_on_error=false",
        "--xla_gpu_nccl_async_execution=true",
        "--xla_gpu_nccl_blocking_communicators=false",
    )
    os.environ["XLA_FLAGS"] = " ".join([*flags, os.environ.get("XLA_FLAGS", "")])
    os.environ["XLA_PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE"] = "1"
    jax.config.update("jax_enable_recoverability", True)


def _check_port_is_free(arguments: Mapping[str, Any]) -> None:
    """Raises OSError if the others could not find process 0 where they are to look for it.

    Asked for before jax is, which may die of it (SIGSEGV, jax 0.10.2).
    """
    address = arguments.get("coordinator_address")
    if address is None or arguments.get("process_id") != 0:
        return
    everywhere = f"[::]:{address.rpartition(':')[2]}"  # where jax listens by itself
    listens = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", everywhere)
    host, _, port = listens.rpartition(":")
    host = "" if host == "[::]" else host.strip("[]")
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(kind) as trial:
        # As servers do: connections that were closed a moment ago take no port.
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, int(port)))
        except OSError as error:
            reason = f"nothing can listen at {address}: {error.strerror}"
            raise OSError(f"{reason}; is the port taken?") from error


def leave(status: int, line: str) -> int:
    """Says why there is no going on, and ends the process if it is one of several.

    One that simply went would wait for the others to come to their end, and they for it.

    Returns:
      The exit status, if the process is alone.
    """
    if _watch is not None:
        _watch.leave(status, line)
    print(line if status == 130 else f"error: {line}", file=sys.stderr)
    return status


def names(processes: Iterable[int]) -> str:
    """Processes of the run as messages name them."""
    return "" if _watch is None else _watch.names(processes)


def where() -> str:
    """How far this process is and how to go on, as messages say it."""
    return "" if _watch is None else _watch.where()


def tell_where(where: Callable[[], str]) -> None:
    """Sets what a last line adds if a process is lost: how far it is, how to go on."""
    if _watch is not None:
        _watch.where = where


def _check_agreement(config: Config, came: int) -> None:
    """Raises ValueError unless all processes, of whom so many came, are to do the same."""
    count = len(coordination.members())
    if came != count:
        raise ValueError(
            f"`distributed.num_processes` must be the same for all, got {count} in process "
            f"{coordination.process_id()}, but {came} came together"
        )
    mine = {"jax": jax.__version__, "lsgd_jax": lj.__version__} | fields(config)
    mine = {name: x for name, x in mine.items() if name not in FREE_PER_PROCESS}
    everybodys = [json.loads(text) for text in coordination.gather(json.dumps(mine))]
    for process, theirs in enumerate(everybodys):
        for name, value in everybodys[0].items():
            if theirs.get(name) != value:
                raise ValueError(
                    f"`{name}` must be the same in all processes, got {value!r} in process "
                    f"0 and {theirs.get(name)!r} in process {process}"
                )


def find_out(config: DistributedConfig, environ: Mapping[str, str]) -> Started | None:
    """Who has started this process together with others; None: nobody, it is alone.

    Raises:
      ValueError: somebody has, but it can not be known how to reach the others.
    """
    if config.cluster == "none":
        return None
    if config.cluster == "mpi4py":
        return Started("MPI", {"cluster_detection_method": "mpi4py"})
    detectors = (_mpi, _slurm, _tpu, _kubernetes)
    found = next(filter(None, (detect(environ) for detect in detectors)), None)
    given = {
        "coordinator_address": config.coordinator or environ.get("JAX_COORDINATOR_ADDRESS"),
        "num_processes": config.num_processes,
        "process_id": config.process_id,
    }
    if found is None:
        if config.coordinator is config.num_processes is config.process_id is None:
            return None
        found = Started("hand", {})
    arguments = found.arguments | {k: v for k, v in given.items() if v is not None}
    missing = [name for name in given if arguments.get(name) is None]
    if not missing:
        arguments["cluster_detection_method"] = "deactivate"
    elif found.by not in JAX_FINDS:
        options = {"coordinator_address": "coordinator"}
        names = [f"--distributed.{options.get(x, x).replace('_', '-')}" for x in missing]
        raise ValueError(
            f"this process was started by {found.by} as one of several, but who the others "
            f"are is not known: add {' and '.join(names)}{HINTS.get(found.by, '')}; {ALONE}"
        )
    return found._replace(arguments=arguments)


# Whom jax can ask for whatever is not given, and what helps with the others.
JAX_FINDS = ("Open MPI 4", "Slurm", "Cloud TPU", "Kubernetes")
HINTS = {
    "MPI": ", or install mpi4py and add --distributed.cluster mpi4py",
    "a Kubernetes Job": ", or install the package kubernetes, so that jax can find out",
}


def _mpi(environ: Mapping[str, str]) -> Started | None:
    """mpirun of Open MPI, or mpiexec of MPICH and its kin."""
    if _int(environ, "OMPI_COMM_WORLD_SIZE") > 1:
        name, local = "OMPI_COMM_WORLD_", ("LOCAL_RANK", "LOCAL_SIZE")
    elif _int(environ, "PMI_SIZE") > 1 and "SLURM_STEP_NODELIST" not in environ:
        name, local = "PMI_", ("LOCAL_RANK", "LOCAL_SIZE")
    else:
        return None
    size, rank = _int(environ, f"{name}SIZE"), _int(environ, f"{name}RANK")
    local_rank, local_size = (environ.get(name + x) for x in local)
    arguments: dict[str, Any] = {"num_processes": size, "process_id": rank}
    by = "Open MPI 4" if "OMPI_MCA_orte_hnp_uri" in environ else "MPI"
    job = environ.get("PMIX_NAMESPACE")
    if by == "MPI" and job and local_size == str(size):
        port = 61440 + zlib.crc32(job.encode()) % 4096
        arguments["coordinator_address"] = f"127.0.0.1:{port}"
    known = local_rank is not None and local_size is not None
    return Started(by, arguments, *map(int, (local_rank, local_size)) if known else ())


def _slurm(environ: Mapping[str, str]) -> Started | None:
    """A step of srun. The batch script itself is no step, and is one process."""
    names = "JOB_ID STEP_NODELIST NTASKS PROCID LOCALID"
    if any(f"SLURM_{name}" not in environ for name in names.split()):
        return None
    if _int(environ, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") <= 1:
        return None
    each = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    node = _int(environ, "SLURM_NODEID")
    counts = tasks_per_node(each)
    local_size = counts[node] if node < len(counts) else None
    return Started("Slurm", {}, _int(environ, "SLURM_LOCALID"), local_size)


def tasks_per_node(text: str) -> list[int]:
    """What Slurm writes as, say, 4(x2),3.

    >>> tasks_per_node("4(x2),3")
    [4, 4, 3]
    """
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in found for _ in range(int(times or 1))]


def _tpu(environ: Mapping[str, str]) -> Started | None:
    """A Cloud TPU slice of several hosts, or several slices."""
    hosts = environ.get("TPU_PROCESS_ADDRESSES", environ.get("TPU_WORKER_HOSTNAMES", ""))
    several = "," in hosts or _int(environ, "MEGASCALE_NUM_SLICES") > 1
    # Where the environment says nothing jax asks the metadata server; a host that is alone
    # joins itself, which does no harm.
    unsaid = not hosts and "TPU_SKIP_MDS_QUERY" not in environ and _has_tpu()
    return Started("Cloud TPU", {}) if several or unsaid else None


def _has_tpu() -> bool:
    chips = glob.glob("/dev/accel[0-9]*") + glob.glob("/dev/vfio/[0-9]*")
    return bool(chips) and _is_installed("libtpu")


def _kubernetes(environ: Mapping[str, str]) -> Started | None:
    """A pod of an indexed Job; how many there are only the cluster's API knows."""
    if not {"KUBERNETES_SERVICE_HOST", "JOB_COMPLETION_INDEX"} <= environ.keys():
        return None
    index = {"process_id": _int(environ, "JOB_COMPLETION_INDEX")}
    by = "Kubernetes" if _is_installed("kubernetes") else "a Kubernetes Job"
    return Started(by, index)


def local_device_ids(
    gpus: str, started: Started, environ: Mapping[str, str]
) -> list[int] | None:
    """The GPUs of this process; [] for all, None to leave it to jax.

    Raises:
      ValueError: one is asked for, and it is not known which.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES", environ.get("ROCR_VISIBLE_DEVICES"))
    shared = started.local_size != 1 and (visible is None or "," in visible)
    if gpus == "one" or (gpus == "auto" and shared):
        if started.local_rank is not None:
            return [started.local_rank]
        if started.arguments.get("cluster_detection_method") == "mpi4py":
            return None
    if gpus == "one":
        raise ValueError(
            "`distributed.gpus` must be all if a process is not told its rank on the host "
            f"(by {started.by}), got distributed.gpus=one; set CUDA_VISIBLE_DEVICES"
        )
    return []


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _int(environ: Mapping[str, str], *names: str) -> int:
    """The first of the variables that is a number, or 0."""
    values = (environ.get(name, "") for name in names)
    return next((int(value) for value in values if value.isdecimal()), 0)


@contextlib.contextmanager
def _without_proxies() -> Iterator[None]:
    """A proxy for the web is no way to the coordinator; gRPC would take it and hang."""
    proxies = {k: v for k, v in os.environ.items() if k.lower().endswith("_proxy")}
    for name in proxies:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ |= proxies


@contextlib.contextmanager
def _ended_by_ctrl_c() -> Iterator[None]:
    """Python would notice a Ctrl-C only after waiting for the others; nothing is lost."""
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
