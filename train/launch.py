"""python -m train.launch: one run in several processes on this machine.

    python -m train.launch --processes 2 --devices-per-process 4 -- digits --steps 100

starts `python -m train digits --steps 100` twice as one run and shows what the processes
print with a prefix ([0], [1], ...). Each gets GPUs of its own if there are any, and
emulated CPU devices otherwise. Ctrl-C and SIGTERM are passed on: the run saves and ends. If
one process fails the others are ended, too; the exit status is that of the process that
failed, or 128 plus the number of the signal that ended it. `--ray.processes` of the trainer
starts processes again after a failure.
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


LAUNCHER = "LSGD_JAX_LAUNCHER"  # in the environment: this command, up to --
BIND_ADDRESS = "JAX_COORDINATOR_BIND_ADDRESS"  # where jax's coordinator listens
PR_SET_PDEATHSIG = 1  # of Linux's prctl
PASSED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GONE = (errno.EPIPE, errno.EIO)  # of an output: no reader, no terminal any more


def child() -> NoReturn:
    """Runs a module in a process that dies with its parent: PARENT MODULE ARGUMENTS."""
    _, parent, module, *arguments = sys.argv
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # a thread of Ray may have blocked some
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
    """Starts a process that runs a module, and dies with this one.

    Args:
      module: the module.
      arguments: its command line.
      environment: its variables.
      options: of `subprocess.Popen`. What it prints goes to `stdout`, errors too.
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
    """A port of this host that nothing listens at."""
    with socket.socket() as free:
        free.bind(("", 0))
        return free.getsockname()[1]


def rendezvous_options(coordinator: str, processes: int, process_id: int) -> list[str]:
    """The options of a process for its rendezvous with the others."""
    each = {"coordinator": coordinator, "num-processes": processes, "gpus": "all"}
    each["process-id"] = process_id
    return [f"--distributed.{name}={value}" for name, value in each.items()]


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """The numbers of the NVIDIA GPUs that jax may use here.

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
    """The environment of each process, with devices of its own.

    Raises:
      ValueError: there are GPUs, but not enough.

    >>> each = environments(2, 2, {"CUDA_VISIBLE_DEVICES": "4,5,6,7"})
    >>> [one["CUDA_VISIBLE_DEVICES"] for one in each]
    ['4,5', '6,7']
    """
    gpus, share = visible_gpus(environ), devices or 1
    if gpus and len(gpus) < processes * share:
        raise ValueError(
            f"{processes} processes with {share} GPU{'s' * (share > 1)} each need "
            f"{processes * share}, and there are {len(gpus)}; with JAX_PLATFORMS=cpu none "
            "is used"
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
        self._sent: list[int] = []  # the signals that were passed on
        self._lost_output = False
        self._printing = threading.Lock()  # lines of two processes must not mix
        self._children: list[subprocess.Popen[str]] = []
        for number in PASSED:
            signal.signal(number, self._pass_on)
        for own in zip(arguments, environments):
            # In a group of its own: Ctrl-C reaches it once, through `_pass_on`.
            self._children.append(start(module, *own, process_group=0))
        self._readers = [
            threading.Thread(target=self._show, args=(i, started), daemon=True)
            for i, started in enumerate(self._children)
        ]
        for reader in self._readers:
            reader.start()

    def _show(self, index: int, child: subprocess.Popen[str]) -> None:
        """Shows what a process prints; if no one reads it any more, all are to stop."""
        with child.stdout as printed:  # type: ignore
            for line in printed:
                if not self._lost_output:
                    self._show_line(f"[{index}] {line.rstrip()}")

    def _show_line(self, line: str) -> None:
        try:
            with self._printing:
                print(line, flush=True)
        except OSError as error:
            if error.errno in GONE:  # a full disk is no reason to stop
                self._lost_output = True
                self._send(signal.SIGTERM)

    def _send(self, number: int) -> None:
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(number)

    def _pass_on(self, number: int, _: object) -> None:
        """Passes a signal on; the third one kills."""
        self._sent.append(number)
        self._send(number if len(self._sent) < 3 else signal.SIGKILL)

    def wait(self, grace: float) -> int:
        """Waits until all have ended; the exit status of the first one that failed.

        Args:
          grace: seconds that the others get to end by themselves, and then after SIGTERM.
        """
        failed: list[subprocess.Popen[str]] = []
        deadline, signals = float("inf"), [signal.SIGTERM, signal.SIGKILL]
        running = list(self._children)
        while running:
            time.sleep(0.05)
            ended = [child for child in running if child.poll() is not None]
            running = [child for child in running if child not in ended]
            # Those that were ended by this launcher have not failed by themselves.
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
        """The status of the process that failed, which is named if a signal ended it."""
        # One that ends because of another one may be faster than that one.
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
    """A parser that raises where argparse prints and exits; tyro would import more."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The launcher's options; those of the program stand behind --.

    Raises:
      ValueError: they cannot be understood, or a number is too small.
    """
    keep_lines = argparse.RawDescriptionHelpFormatter
    program = "python -m train.launch"
    parser = Parser(program, None, __doc__, formatter_class=keep_lines, allow_abbrev=False)
    add = parser.add_argument
    add("--processes", type=int, required=True, help="how many")
    add("--devices-per-process", type=int, help="GPUs, or emulated CPU devices, of each")
    add("--grace", type=int, default=5, help="seconds to end in if another failed (5)")
    add("--module", default="train", help="what to run, such as train.compare (train)")
    add("arguments", nargs="*", help="what to run it with, behind --")
    options = parser.parse_args(arguments)
    for name, least in {"processes": 1, "devices_per_process": 1, "grace": 0}.items():
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"`{name}` must be at least {least}, got {name}={value}")
    return options


def main(arguments: Sequence[str]) -> int:
    """Launches; the exit status is that of the processes, or 2 (wrong usage)."""
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
