"""The rendezvous of the processes of a run.

`join` is called once, before jax uses a device.
"""

import contextlib
import json
import os
import signal
import socket
import ssl
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax

import lsgd_jax as lj
from train.cluster import address, claim, tls
from train.cluster.detection import BY_ITSELF, find_out
from train.cluster.devices import local_device_ids
from train.cluster.ending import Ending
from train.cluster.exit_status import WRONG_USAGE
from train.cluster.heartbeat import Heartbeat
from train.cluster.key_value_store import JaxStore
from train.cluster.session import PATIENCE_S, Session
from train.config import FREE_PER_PROCESS, Config, fields


def join(config: Config) -> Session:
    """Joins the processes that were started together with this one, if there are any.

    From then on the loss of one ends all, see `train.cluster.heartbeat`, unless it is to be
    survived, see `train.run.recovery`.

    Raises:
      ValueError: it cannot be known who the others are, or the port is taken. If they do
        not come in time, or were started with other options, the process ends with a line
        that says so.
    """
    options = config.distributed
    started = find_out(options, os.environ)
    if started is None:
        return Session.single()
    deadline = time.monotonic() + options.start_timeout
    secure: ssl.SSLContext | None = None
    where = started.arguments.get("coordinator_address", f"the address {started.by} gives")
    ending = Ending(
        f"the processes did not come together within {options.start_timeout} s through "
        f"{where}; have all been started, and can all reach it? {BY_ITSELF}"
    )
    given = started.arguments.get("coordinator_address")
    if given is not None:
        ending.on_abort = lambda: (
            f"the processes did not come together within {options.start_timeout} s through "
            f"{given}: {address.what_answers(given, secure)}; have all been started, each "
            f"with a number of its own, and can all reach it? {BY_ITSELF}"
        )
    gpus = local_device_ids(options.gpus, started, os.environ)
    # Its handler of SIGTERM would swallow the signal; see `train.cluster.signals`.
    jax.config.update("jax_enable_preemption_service", False)
    if options.survive:
        _make_losses_survivable(options.progress_timeout)
    try:
        credentials, secure = tls.credentials(options.tls), tls.context(options.tls)
        if given is not None:
            address.check_name(given, options.start_timeout)
        listening = _listening(started.arguments)
        if given is not None and "process_id" in started.arguments:
            for held in claim.take(given, started.arguments["process_id"]):
                held.detach()  # until the process ends
        if given is not None and not listening:
            address.wait_for_coordinator(given, secure, deadline - time.monotonic())
        with _without_proxies(), _ended_by_ctrl_c():
            jax.distributed.initialize(
                **started.arguments,
                **listening,
                **credentials,
                local_device_ids=gpus,
                initialization_timeout=max(1, round(deadline - time.monotonic())),
                heartbeat_timeout_seconds=options.heartbeat_timeout,
            )
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"started by {started.by}, but {reason}; {BY_ITSELF}") from error
    store = JaxStore()
    session = Session(store, _meet(store))
    session.connections.survive = options.survive
    progress = options.progress_timeout
    session.patience = {None: PATIENCE_S, 0: float("inf")}.get(
        progress, 3.0 * (progress or 0)
    )
    session.heartbeat = Heartbeat(
        session, ending, options.heartbeat_timeout, options.survive, progress
    )
    session.heartbeat.begin()
    try:
        _check_agreement(session, config)
    except ValueError as error:
        session.leave(WRONG_USAGE, str(error))
    return session


def _meet(store: JaxStore) -> list[str]:
    """The hosts of those who came together, however many this process was told there are.

    Raises:
      JaxRuntimeError: they have not all come within 5 minutes.
    """
    store.write("hosts", socket.gethostname())
    store.wait_at_barrier("hosts", 300)
    return [host for _, host in sorted(store.read("hosts").items())]


def _check_agreement(session: Session, config: Config) -> None:
    """Raises ValueError unless all processes that came together are to do the same."""
    count, came = len(session.members), len(session.hosts)
    if came != count:
        raise ValueError(
            f"`distributed.num_processes` must be the same for all, got {count} in process "
            f"{session.process_id}, but {came} came together"
        )
    mine = {"jax": jax.__version__, "lsgd_jax": lj.__version__} | fields(config)
    mine = {name: x for name, x in mine.items() if name not in FREE_PER_PROCESS}
    all_settings = [json.loads(text) for text in session.gather(json.dumps(mine))]
    for process, theirs in enumerate(all_settings):
        for name, value in all_settings[0].items():
            if theirs.get(name) != value:
                raise ValueError(
                    f"`{name}` must be the same in all processes, got {value!r} in process "
                    f"0 and {theirs.get(name)!r} in process {process}"
                )


def _make_losses_survivable(progress_timeout: int | None) -> None:
    """Has collectives with a lost process fail, and jax not end the others because of it.

    By themselves they wait forever on GPUs. On CPUs they wait for half an hour at most, and
    for as long as a process may take (to compile, say) they must; `train.cluster.network`
    has them fail as soon as the heartbeats say that a process is lost.
    """
    seconds = max(1800, 3 * (progress_timeout or 0))
    flags = (
        f"--xla_cpu_collective_timeout_seconds={seconds}",
        "--xla_gpu_nccl_terminate_on_error=false",
        "--xla_gpu_nccl_async_execution=true",
        "--xla_gpu_nccl_blocking_communicators=false",
    )
    os.environ["XLA_FLAGS"] = " ".join([*flags, os.environ.get("XLA_FLAGS", "")])
    os.environ["XLA_PYTHON_CLIENT_ABORT_COLLECTIVES_ON_FAILURE"] = "1"
    jax.config.update("jax_enable_recoverability", True)


def _listening(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Where process 0 is to listen, as an argument for jax; nothing for the others.

    Raises:
      OSError: nothing can listen there. Asked for before jax is, which may die of it
        (SIGSEGV, jax 0.10.2).
    """
    given = arguments.get("coordinator_address")
    if given is None or arguments.get("process_id") != 0:
        return {}
    listens = address.where_to_listen(given)
    host, port = address.split(listens)
    try:
        address.can_listen("" if host == "::" else host, port)
    except OSError as error:
        reason = f"nothing can listen at {given}: {error.strerror}"
        raise OSError(f"{reason}; is the port taken, by another run perhaps?") from error
    return {"coordinator_bind_address": listens}


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
