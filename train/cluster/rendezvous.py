"""The rendezvous of the processes of a run, through jax.distributed."""

import contextlib
import errno
import hashlib
import ipaddress
import json
import os
import pathlib
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Generator, Mapping
from typing import Any

import jax

import lsgd_jax as lj
import train
from train.cluster.detection import BY_ITSELF, detect
from train.cluster.devices import local_device_ids, provide
from train.cluster.session import Session, gather, is_of_xla
from train.cluster.started import Started
from train.cluster.words import Words
from train.config.schema import FREE_PER_PROCESS, Config, fields
from train.process import numerics
from train.process.exit_status import RESUME, WRONG_USAGE
from train.process.messages import one_line, plain


JAX_LATER_S = 30  # jax gives up so much later than this module, by aborting the process
CHANGES = 16  # CPU devices beside each one that trains; messages of new members take others
OF_A_START = {"run_dir", "runs", "resume"}  # settings of a process that starts again
RETRY_S = 60.0  # Kubernetes may publish a host's name only after it has started the host


def join(config: Config) -> Session:
    """Joins the processes that were started together with this one, if there are any.

    Must be called before jax uses a device; afterwards the process has its devices. From
    then on, the failure of one process ends all of them.

    Raises:
      ConnectionError: the processes of Ray could not meet. They may at another address.
      ValueError: nothing says how to reach the other processes, the coordinator's address
        is wrong or taken, the name of this host is, or there are no devices.
    """
    options = config.distributed
    started = detect(options, os.environ)
    may_lose = config.min_workers is not None
    if started is None:
        if may_lose:
            raise ValueError(
                "`min_workers` must be left out in a single process, got "
                f"min_workers={config.min_workers}; {BY_ITSELF}"
            )
        provide(config.workers.devices)
        return Session()
    if may_lose:
        jax.config.update("jax_enable_recoverability", True)
        # Its handler of SIGTERM would stop all processes.
        jax.config.update("jax_enable_preemption_service", False)
    gpus = local_device_ids(options.gpus, started, os.environ)
    _check_own_name(is_reached=False)
    try:
        _check_address(started.arguments)
        _claim(started.arguments)
        with _without_proxies(), _ended_by_ctrl_c(), _ended_if_late(config, started):
            jax.distributed.initialize(
                **started.arguments,
                coordinator_bind_address=_on_loopback(started.arguments),
                local_device_ids=gpus,
                initialization_timeout=options.start_timeout + JAX_LATER_S,
                heartbeat_timeout_seconds=options.heartbeat_timeout,
            )
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        reason = one_line(error)
        if config.ray.processes is not None and isinstance(error, OSError | RuntimeError):
            # The port was free when it was chosen, before the processes were started.
            raise ConnectionError(f"the processes could not meet: {reason}") from error
        raise ValueError(f"started by {started.by}, but {reason}; {BY_ITSELF}") from error
    # `jax.process_count()` would create the devices, whose number must be set before. A
    # process on CPUs that does not know it has one device.
    devices = config.workers.devices
    processes = started.arguments.get("num_processes", devices)
    if may_lose:
        provide(processes, processes, CHANGES)  # each trains on one device
        words = Words(jax.process_index(), patience=options.start_timeout)
        session = Session(jax.process_index(), [socket.gethostname()], words)
    else:
        provide(devices, processes, int(config.may_send_beside))
        session = Session(jax.process_index(), ["?"] * jax.process_count())
    with session.ended_by_errors():
        try:
            _check_own_name(is_reached=_has_other_hosts(started.arguments))
            _check_devices()
            if not may_lose:
                session.hosts = gather(socket.gethostname())
            _check_agreement(session, config, started.arguments.get("num_processes"))
        except ValueError as error:
            if is_of_xla(error):
                raise
            session.leave(WRONG_USAGE, str(error))
    return session


def _has_other_hosts(arguments: Mapping[str, Any]) -> bool:
    """Whether CPUs of several hosts, or of containers with their own network, connect."""
    if jax.default_backend() != "cpu" or _on_loopback(arguments) is not None:
        return False
    hosts = {getattr(device, "slice_index", None) for device in jax.devices()}
    return len(hosts) > 1 or not _is_here(arguments.get("coordinator_address"))


def _is_here(address: str | None) -> bool:
    """Whether an address, if it is known, is one of this host."""
    if address is None:
        return True
    with contextlib.suppress(OSError):
        _own_address(address.rpartition(":")[0].strip("[]"))
        return True
    return False


def _check_own_name(is_reached: bool) -> None:
    """Raises ValueError if gloo, which connects CPUs, cannot use the name of this host.

    Args:
      is_reached: whether other hosts must reach this one.
    """
    if "cpu" not in (os.environ.get("JAX_PLATFORMS") or "cpu").split(","):
        return
    name = socket.gethostname()
    try:
        got = _own_address(name)
        if not (is_reached and ipaddress.ip_address(got).is_loopback):
            return
        wanted = "an address that other hosts can reach"
    except OSError as error:
        got = error.strerror
        wanted = "an address of its own (127.0.0.1 if all processes run here)"
    raise ValueError(
        f"the name of this host must resolve to {wanted}, got {name} ({got}); jax connects "
        "CPUs at that address, which /etc/hosts can set"
    )


def _own_address(name: str) -> str:
    """The address at which gloo listens on the host of this name.

    Raises:
      OSError: the name has no address of this host.
    """
    found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    for family, kind, _, _, address in found:
        with contextlib.suppress(OSError), socket.socket(family, kind) as trial:
            trial.bind(address)
            return str(address[0])
    raise OSError(errno.EADDRNOTAVAIL, f"{found[0][4][0]} is not an address of this host")


def _check_devices() -> None:
    """Raises ValueError unless all processes have the same number of devices."""
    counts = Counter(device.process_index for device in jax.devices())
    for process, count in sorted(counts.items()):
        if count != counts[0]:
            raise ValueError(
                "all processes must have the same number of devices, got "
                f"{counts[0]} in process 0 and {count} in process {process}"
            )


def _check_agreement(session: Session, config: Config, processes: int | None) -> None:
    """Raises ValueError unless all processes have the same settings and software."""
    mine: dict[str, Any] = {"lsgd_jax": lj.__version__}
    mine |= numerics.versions() | numerics.jax_settings()
    mine |= sources() | {"distributed.num_processes": processes}
    own = FREE_PER_PROCESS | (OF_A_START if session.words else set())
    mine |= {name: x for name, x in fields(config).items() if name not in own}
    told = session.compared(json.dumps(mine))
    all_settings = {process: json.loads(text) for process, text in told.items()}
    for process, theirs in all_settings.items():
        for name in all_settings[0] | theirs:
            value = all_settings[0].get(name)
            other = theirs.get(name)
            if other != value:
                raise ValueError(
                    f"`{name}` must be the same in all processes, got {value!r} in process "
                    f"0 and {other!r} in process {process}"
                )


def sources() -> dict[str, str]:
    """Hashes of the source files of `lsgd_jax` and `train`, by their paths."""
    hashes = {}
    for package in (lj, train):
        folder = pathlib.Path(package.__path__[0])
        for path in sorted(folder.rglob("*.py")):
            name = path.relative_to(folder.parent).as_posix()
            hashes[name] = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    return hashes


def _check_address(arguments: Mapping[str, Any]) -> None:
    """Raises OSError if the coordinator cannot be found, or cannot listen at its port.

    In the first case jax would wait until its timeout. In the second it may crash
    (SIGSEGV, jax 0.10.2).
    """
    given = arguments.get("coordinator_address")
    if given is None:
        return
    host, _, port = given.rpartition(":")
    _resolve(host.strip("[]"))
    if arguments.get("process_id") != 0:
        return
    try:
        with socket.socket() as trial:
            # Connections that were closed a moment ago must not block the port.
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind(("", int(port)))
    except OSError as error:
        raise OSError(
            f"nothing can listen at {given}: {error.strerror}; is the port taken by "
            "another run?"
        ) from error


def _on_loopback(arguments: Mapping[str, Any]) -> str | None:
    """The coordinator's address if it is on loopback, to listen there only.

    jax listens on all interfaces by default.

    >>> _on_loopback({"coordinator_address": "127.0.0.1:1234"})
    '127.0.0.1:1234'
    >>> _on_loopback({"coordinator_address": "node-3:1234"}) is None
    True
    """
    given = arguments.get("coordinator_address") or ""
    host = given.rpartition(":")[0].strip("[]")
    return given if host in ("localhost", "::1") or host.startswith("127.") else None


def _claim(arguments: Mapping[str, Any]) -> None:
    """Reserves the number of this process on this host until it ends; Linux only.

    jax's coordinator would treat a second process with a number as the first one,
    restarted, and end all processes.

    Raises:
      OSError: another process of this host has this number.
    """
    given = arguments.get("coordinator_address")
    process_id = arguments.get("process_id")
    if given is None or process_id is None or not hasattr(socket, "AF_UNIX"):
        return
    with socket.socket(socket.AF_UNIX) as claim:
        try:
            claim.bind(f"\0lsgd_jax/{given}/{process_id}")  # an abstract name, not a file
        except FileNotFoundError:  # not on Linux
            return
        except OSError as error:
            raise OSError(
                f"another process of this host is number {process_id} at {given} already: "
                "does each process have a --distributed.process-id of its own, or does "
                "another run use this port?"
            ) from error
        claim.detach()


def _resolve(host: str) -> None:
    patience = RETRY_S if "KUBERNETES_SERVICE_HOST" in os.environ else 0.0
    deadline = time.monotonic() + patience
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except OSError as error:
            if time.monotonic() >= deadline:
                reason = f"the host name {host} cannot be resolved here ({error.strerror})"
                raise OSError(f"{reason}; is --distributed.coordinator right?") from error
        time.sleep(0.5)


@contextlib.contextmanager
def _without_proxies() -> Generator[None]:
    """Hides web proxies, through which gRPC cannot reach the coordinator and hangs."""
    proxies = {k: v for k, v in os.environ.items() if k.lower().endswith("_proxy")}
    for name in proxies:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ |= proxies


@contextlib.contextmanager
def _ended_by_ctrl_c() -> Generator[None]:
    """Lets Ctrl-C end the process, because Python would handle it only after the wait."""
    handler = signal.getsignal(signal.SIGINT)
    if handler != signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


@contextlib.contextmanager
def _ended_if_late(config: Config, started: Started) -> Generator[None]:
    """Exits with one line if the other processes do not arrive in time."""
    seconds = config.distributed.start_timeout
    where = started.arguments.get("coordinator_address", "the coordinator")

    def end() -> None:
        line = (
            f"not all processes have met at {where} within {seconds} s "
            "(--distributed.start-timeout): were all of them started, and can this host "
            "reach that address?"
        )
        print(f"error: {plain(line)}", file=sys.stderr, flush=True)
        os._exit(RESUME)

    timer = threading.Timer(seconds, end)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
