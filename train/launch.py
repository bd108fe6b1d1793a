"""python -m train.launch: one run in several processes on this machine.

    python -m train.launch --processes 2 --devices-per-process 4 -- digits --steps 100

starts `python -m train digits --steps 100` twice as one run. Output of the processes is
shown with a prefix ([0], [1], ...). Each process gets GPUs of its own if there are any, and
emulated CPU devices otherwise. Ctrl-C and SIGTERM are passed on: the run saves and ends. If
one process fails, the others are stopped. The exit status is that of the failed process, or
128 plus the number of the signal that ended it. To restart processes after a failure, use
the trainer's `--ray.processes` instead.
"""

import argparse
import contextlib
import ctypes
import errno
import glob
import os
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from train.cluster.exit_status import LOST, SIGNALED, STOPPED, WRONG_USAGE


LAUNCHER = "LSGD_JAX_LAUNCHER"  # variable that holds this command, up to --
BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"  # variable that jax's coordinator reads
PR_SET_PDEATHSIG = 1  # of Linux's prctl
PASSED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GONE = (errno.EPIPE, errno.EIO)  # the reader or the terminal of an output is gone


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
    gpus, share = visible_gpus(environ), devices or 1
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


class Processes:
    """The processes of a run, from their start until all have ended."""

    def __init__(
        self,
        module: str,
        arguments: Sequence[Sequence[str]],
        environments: Sequence[Mapping[str, str]],
    ):
        self._passed_on = 0  # signals
        self._lost_output = False
        self._printing = threading.Lock()  # keeps lines whole
        self._children: list[subprocess.Popen[str]] = []
        for number in PASSED:
            signal.signal(number, self._pass_on)
        for own in zip(arguments, environments):
            # In a process group of its own, Ctrl-C reaches it only through `_pass_on`.
            self._children.append(start(module, *own, process_group=0))
        self._readers = [
            threading.Thread(target=self._show, args=(i, started), daemon=True)
            for i, started in enumerate(self._children)
        ]
        for reader in self._readers:
            reader.start()

    def _show(self, index: int, child: subprocess.Popen[str]) -> None:
        """Shows the output of a process. If its reader is gone, all processes must stop."""
        with child.stdout as printed:  # type: ignore
            for line in printed:
                if not self._lost_output:
                    self._show_line(f"[{index}] {line.rstrip()}")

    def _show_line(self, line: str) -> None:
        try:
            with self._printing:
                print(line, flush=True)
        except OSError as error:
            if error.errno in GONE:  # a full disk does not stop the run
                self._lost_output = True
                self._send(signal.SIGTERM)

    def _send(self, number: int) -> None:
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(number)

    def _pass_on(self, number: int, _: object) -> None:
        """Passes a signal on. The third one kills."""
        self._passed_on += 1
        self._send(number if self._passed_on < 3 else signal.SIGKILL)

    def wait(self, grace: float) -> int:
        """Blocks until all have ended. Returns the exit status of the first that failed.

        Args:
          grace: seconds for the others to end by themselves, and again after SIGTERM.
        """
        failed: list[subprocess.Popen[str]] = []
        deadline, signals = float("inf"), [signal.SIGTERM, signal.SIGKILL]
        running = list(self._children)
        while running:
            time.sleep(0.05)
            ended = [child for child in running if child.poll() is not None]
            running = [child for child in running if child not in ended]
            # Processes that this launcher ended have not failed.
            failed += [child for child in ended if child.returncode and len(signals) == 2]
            if failed and deadline == float("inf"):
                deadline = time.monotonic() + grace
            if signals and time.monotonic() >= deadline:
                self._send(signals.pop(0))
                deadline = time.monotonic() + grace
        for reader in self._readers:
            reader.join(grace)
        return self._status(failed)

    def _status(self, failed: Sequence[subprocess.Popen[str]]) -> int:
        """The status of the process that failed. If a signal ended it, a line says so."""
        # A process that ends because another one failed may be the first to end.
        for_others = (LOST, -signal.SIGABRT)
        causes = [c for c in failed if c.returncode not in for_others] or failed
        if not causes:
            return STOPPED * self._lost_output
        code = causes[0].returncode
        if code > 0:
            return code
        name = f"process {self._children.index(causes[0])}"
        print(f"error: {name} was ended by {signal.Signals(-code).name}", file=sys.stderr)
        return SIGNALED - code


class Parser(argparse.ArgumentParser):
    """Raises errors instead of printing them. tyro would have to import jax."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


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
    add("--grace", type=int, default=5, help="seconds to end after another one failed (5)")
    add("--module", default="train", help="module to run, such as train.compare (train)")
    add("arguments", nargs="*", help="arguments of the module, after --")
    options = parser.parse_args(arguments)
    for name, least in {"processes": 1, "devices_per_process": 1, "grace": 0}.items():
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"`{name}` must be at least {least}, got {name}={value}")
    return options


def main(arguments: Sequence[str]) -> int:
    """Launches a run. Returns its exit status, or 2 (wrong usage)."""
    try:
        options = parse(arguments)
        count, devices = options.processes, options.devices_per_process
        given = environments(count, devices, os.environ)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_USAGE
    again = ["python", "-m", "train.launch", "--processes", str(count)]
    again += [] if devices is None else ["--devices-per-process", str(devices)]
    coordinator = f"127.0.0.1:{free_port()}"
    mine = {LAUNCHER: shlex.join([*again, "--"]), BIND_ADDRESS: coordinator}
    given = [one | mine for one in given]
    own = [rendezvous_options(coordinator, count, i) for i in range(count)]
    each = [[*options.arguments, *meeting] for meeting in own]
    return Processes(options.module, each, given).wait(options.grace)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
