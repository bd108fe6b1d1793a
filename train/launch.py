"""python -m train.launch: one run in several processes on this machine.

    python -m train.launch --processes 2 --devices-per-process 4 -- digits --steps 100

starts `python -m train digits --steps 100` twice as one run. Output of the processes is
shown with a prefix ([0], [1], ...). Each process gets GPUs of its own if there are any, and
emulated CPU devices otherwise. `--module train.accept` runs another command in place of the
trainer.

Ctrl-C and SIGTERM are passed on: the run saves and ends, after SIGTERM with status 75.
Ctrl-Z pauses all processes. If one process fails, the others are stopped. The exit status
is that of the failed process, or 128 plus the number of the signal that ended it, and the
last line says how to resume.

`--restart 5` is for runs that go on without a lost process (`--min-workers`). A process
other than process 0 that fails no longer stops the others. It is started again after a
second, with the same command line, up to five times in all; from then on the others go on
without it. The run ends with process 0, and has its exit status. Runs of other kinds
restart with the trainer's `--ray.processes`.
"""

import argparse
import contextlib
import ctypes
import glob
import json
import os
import pathlib
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from train.process.exit_status import DELIBERATE, RESUME, SIGNALED, WRONG_USAGE
from train.process.messages import NOTHING_LOST, meant, plain, to_resume
from train.process.names import commands


LAUNCHER = "LSGD_JAX_LAUNCHER"  # variable that holds this command, up to --
TOLD = "LSGD_JAX_TOLD"  # variable that names the file in which a run says how to resume it
PR_SET_PDEATHSIG = 1  # of Linux's prctl
PASSED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
OF_OTHERS = (RESUME, -signal.SIGABRT)  # statuses of processes that miss another one
AGAIN_S = 1.0  # from a failure until a process is started again
LOOK_S = 0.05  # between two looks at the processes


def child() -> NoReturn:
    """Runs a module in this process, which dies with its parent.

    The command line is PARENT MODULE ARGUMENTS, where PARENT is a process id.
    """
    _, parent, module, *arguments = sys.argv
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # Ray blocks some in its threads
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(parent):
            sys.exit(SIGNALED + signal.SIGKILL)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit()


def heeded(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """The signals that this process does not ignore, as nohup makes it ignore SIGHUP."""
    return [number for number in numbers if signal.getsignal(number) != signal.SIG_IGN]


def start(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], **options: Any
) -> subprocess.Popen[str]:
    """Starts a process that runs a module and dies with this one.

    Args:
      module: the module.
      arguments: its command line.
      environment: its environment variables.
      options: options of `subprocess.Popen`.

    Returns:
      The process. Its standard output and standard error go to `stdout`.
    """
    starter = [sys.executable, "-c", "from train.launch import child; child()"]
    return subprocess.Popen(
        [*starter, str(os.getpid()), module, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
        **options,
    )


def free_port() -> int:
    """Returns a free port of this host."""
    with socket.socket() as free:
        free.bind(("", 0))
        return free.getsockname()[1]


def rendezvous_options(coordinator: str, processes: int, process_id: int) -> list[str]:
    """The options by which a process meets the others."""
    each = {"coordinator": coordinator, "num-processes": processes, "gpus": "all"}
    each["process-id"] = process_id
    return [f"--distributed.{name}={value}" for name, value in each.items()]


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """The numbers of the NVIDIA GPUs that jax may use on this host.

    >>> visible_gpus({"CUDA_VISIBLE_DEVICES": "2,3"})
    ['2', '3']
    """
    if environ.get("JAX_PLATFORMS") == "cpu":
        return []
    installed = range(len(glob.glob("/proc/driver/nvidia/gpus/*")))
    visible = environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, installed)))
    return [name for name in visible.split(",") if name not in ("", "-1")]


def environments(
    processes: int, devices: int | None, environ: Mapping[str, str]
) -> list[dict[str, str]]:
    """The environment of each process, which gives it devices of its own.

    Raises:
      ValueError: there are GPUs, but too few.

    >>> each = environments(2, 2, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    >>> [one["CUDA_VISIBLE_DEVICES"] for one in each]
    ['4,5', '6,7']
    """
    gpus = visible_gpus(environ)
    share = devices or 1
    if gpus and len(gpus) < processes * share:
        raise ValueError(
            f"{processes} processes with {share} GPU{'s' * (share > 1)} each need "
            f"{processes * share}, and there are {len(gpus)}; JAX_PLATFORMS=cpu uses none"
        )
    common = dict(environ) | {"PYTHONUNBUFFERED": "1"}
    if devices is not None:
        common["JAX_NUM_CPU_DEVICES"] = str(devices)
    if not gpus:
        return [common] * processes
    mine = [gpus[i * share : (i + 1) * share] for i in range(processes)]
    return [common | {"CUDA_VISIBLE_DEVICES": ",".join(ids)} for ids in mine]


def any_runs(children: Sequence[subprocess.Popen[str]]) -> bool:
    """Whether a process has not ended."""
    return any([child.poll() is None for child in children])


def end(children: Sequence[subprocess.Popen[str]]) -> None:
    """Kills the processes that have not ended."""
    for child in children:
        child.kill()
        child.wait()


def wait_for_all(children: Sequence[subprocess.Popen[str]], seconds: float) -> None:
    """Blocks until all processes have ended, or the time is over."""
    deadline = time.monotonic() + seconds
    while any_runs(children) and time.monotonic() < deadline:
        time.sleep(LOOK_S)


def how_ended(number: int, code: int) -> str:
    """Says how a process ended.

    >>> how_ended(2, 7), how_ended(2, -9)
    ('process 2 ended with status 7', 'process 2 was ended by SIGKILL')
    """
    if code >= 0:
        return f"process {number} ended with status {code}"
    return f"process {number} was ended by {signal.Signals(-code).name}"


def wait(
    children: Sequence[subprocess.Popen[str]],
    grace: float,
    passed: Sequence[int] = (),
) -> tuple[int, str]:
    """Blocks until all processes have ended.

    Args:
      children: the processes.
      grace: seconds after a failure until the others are killed.
      passed: the signals that were passed on so far. After one, the status of a run that
        was saved is no failure.

    Returns:
      The status of the process that failed, and a line about it unless its own last line
      says how to go on.
    """

    def has_failed(child: subprocess.Popen[str]) -> bool:
        return bool(child.returncode) and not (passed and child.returncode == RESUME)

    while any_runs(children) and not any(map(has_failed, children)):
        time.sleep(LOOK_S)
    wait_for_all(children, grace)
    failed = [child for child in children if has_failed(child)]
    end(children)
    if not failed:
        return max(child.returncode for child in children), ""
    # A process that ends because another one failed may be the first to end. It may also
    # take the loss of a killed process for an error of its own.
    causes = [child for child in failed if child.returncode not in OF_OTHERS] or failed

    def is_own(code):
        return code > 0 or code in OF_OTHERS

    cause = min(causes, key=lambda child: is_own(child.returncode))
    code = cause.returncode
    if code in DELIBERATE:
        return code, ""
    status = code if code > 0 else SIGNALED - code
    return status, how_ended(children.index(cause), code)


class Restarts:
    """Starts processes other than process 0 again when they fail.

    Args:
      children: the processes in the order of their numbers. A process that is started
        again takes the place of the one before.
      start: starts the process of a number.
      most: how many times, in all.
    """

    def __init__(
        self,
        children: list[subprocess.Popen[str]],
        start: Callable[[int], subprocess.Popen[str]],
        most: int,
    ):
        self._children = children
        self._start = start
        self._most = most
        self._restarted: list[int] = []
        self._given_up: set[int] = set()
        self._failed_at: dict[int, float] = {}

    def look(self) -> None:
        """Starts the processes again that failed a second ago."""
        now = time.monotonic()
        for number, child in enumerate(self._children):
            has_failed = number > 0 and bool(child.poll())
            if not has_failed or number in self._given_up:
                continue
            if now - self._failed_at.setdefault(number, now) >= AGAIN_S:
                del self._failed_at[number]
                self._follow(number, child.returncode)

    def _follow(self, number: int, code: int) -> None:
        if len(self._restarted) < self._most:
            self._restarted.append(number)
            then = f"started again ({len(self._restarted)} of {self._most})"
            self._children[number] = self._start(number)
        else:
            self._given_up.add(number)
            then = "the others go on without it"
        with contextlib.suppress(OSError):
            print(f"{how_ended(number, code)}; {then}", file=sys.stderr, flush=True)

    def cannot_help(self) -> bool:
        """Whether the command line is wrong, in a process that was started once."""
        return any(
            child.poll() == WRONG_USAGE and number not in self._restarted
            for number, child in enumerate(self._children)
        )


def wait_for_first(
    children: Sequence[subprocess.Popen[str]],
    restarts: Restarts,
    grace: float,
    passed: Sequence[int] = (),
) -> tuple[int, str]:
    """Blocks until process 0 has ended, and so the run.

    Args:
      children, grace, passed: see `wait`.
      restarts: starts the other processes again, until a signal was passed on.

    Returns:
      See `wait`.
    """
    first = children[0]
    while first.poll() is None and not restarts.cannot_help():
        if not passed:
            restarts.look()
        time.sleep(LOOK_S)
    if first.poll() is None or (first.returncode in OF_OTHERS and not passed):
        return wait(children, grace)  # because of another process
    wait_for_all(children, grace)
    end(children)
    return wait([first], grace, passed)


def how_to_continue(told: str) -> str:
    """Names the command that continues a run, which has told it unless it had not begun."""
    if not told:
        return NOTHING_LOST
    command, config_file = json.loads(told)
    return to_resume(command, pathlib.Path(config_file))


def show(index: int, child: subprocess.Popen[str]) -> None:
    """Shows the output of a process. Without a reader the run goes on."""
    with child.stdout as lines:  # type: ignore
        for line in lines:
            with contextlib.suppress(OSError):
                sys.stdout.write(f"[{index}] {line.rstrip()}\n")
                sys.stdout.flush()


class Parser(argparse.ArgumentParser):
    """Raises errors instead of printing them. tyro would have to import jax."""

    def error(self, message: str) -> NoReturn:
        is_unknown = message.startswith("unrecognized")
        raise ValueError(message + "; the trainer's arguments come after --" * is_unknown)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parses the launcher's options, and the arguments of the program after --.

    Raises:
      ValueError: an option is unknown or missing, or a number is too small.
    """
    keep_lines = argparse.RawDescriptionHelpFormatter
    program = "python -m train.launch"
    parser = Parser(program, None, __doc__, formatter_class=keep_lines, allow_abbrev=False)
    add = parser.add_argument
    add("--processes", type=int, required=True, help="number of processes")
    add("--devices-per-process", type=int, help="GPUs, or emulated CPU devices, of each")
    add("--module", default="train", help="command that each process runs (train)")
    add("--grace", type=int, default=5, help="seconds to end after another one failed (5)")
    add("--restart", type=int, help="times to start processes again, all but process 0")
    add("arguments", nargs="*", help="arguments of the command, after --")
    options = parser.parse_args(arguments)
    if options.module not in commands():
        near = meant(options.module, commands())
        raise ValueError(
            f"`module` must be one of {', '.join(commands())}, got {options.module}{near}"
        )
    least_values = {"processes": 1, "devices_per_process": 1, "grace": 0, "restart": 0}
    for name, least in least_values.items():
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"`{name}` must be at least {least}, got {name}={value}")
    return options


def run(
    options: argparse.Namespace, environments: Sequence[Mapping[str, str]], module: str
) -> tuple[int, str]:
    """Runs a module in several processes, shows their output, and passes signals on.

    Args:
      options: see `parse`.
      environments: the environment of each process.
      module: the module.

    Returns:
      See `wait`.
    """
    coordinator = f"127.0.0.1:{free_port()}"
    children: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []
    passed: list[int] = []

    def start_one(number: int) -> subprocess.Popen[str]:
        meeting = rendezvous_options(coordinator, options.processes, number)
        line = [*options.arguments, *meeting]
        # In a process group of its own, Ctrl-C reaches it only through `pass_on`.
        child = start(module, line, environments[number], process_group=0)
        readers.append(threading.Thread(target=show, args=[number, child], daemon=True))
        readers[-1].start()
        return child

    def send(number: int) -> None:
        for child in children:
            child.send_signal(number)

    def pass_on(number: int, _: object) -> None:
        passed.append(number)
        send(number)

    def pause(number: int, _: object) -> None:
        send(signal.SIGSTOP)
        os.kill(os.getpid(), signal.SIGSTOP)  # returns after SIGCONT
        send(signal.SIGCONT)

    for number in heeded(PASSED):
        signal.signal(number, pass_on)
    for number in heeded([signal.SIGTSTP]):
        signal.signal(number, pause)
    for number in range(options.processes):
        children.append(start_one(number))
    if options.restart is None:
        result = wait(children, options.grace, passed)
    else:
        restarts = Restarts(children, start_one, options.restart)
        result = wait_for_first(children, restarts, options.grace, passed)
    for reader in readers:
        reader.join(options.grace)
    return result


def main(arguments: Sequence[str], module: str | None = None) -> int:
    """Launches a run.

    Args:
      arguments: the command line.
      module: the module to run in each process. Defaults to that of `--module`.

    Returns:
      The exit status of the run, or 2 (wrong usage).
    """
    try:
        options = parse(arguments)
        count = options.processes
        devices = options.devices_per_process
        given = environments(count, devices, os.environ)
    except ValueError as error:
        print(f"error: {plain(str(error))}", file=sys.stderr)
        return WRONG_USAGE
    again = ["python", "-m", "train.launch", "--processes", str(count)]
    again += [] if devices is None else ["--devices-per-process", str(devices)]
    again += [] if options.restart is None else ["--restart", str(options.restart)]
    with tempfile.NamedTemporaryFile() as told:
        mine = {LAUNCHER: shlex.join([*again, "--"]), TOLD: told.name}
        module = module or options.module
        status, reason = run(options, [one | mine for one in given], module)
        if reason:
            again = how_to_continue(told.read().decode())
            print(f"error: {plain(reason)}; {plain(again)}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
