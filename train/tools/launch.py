"""python -m train.launch: one run in several processes on this machine.

    python -m train.launch --processes 2 --devices-per-process 4 -- digits --steps 100

starts `python -m train digits --steps 100` twice as one run and shows what the processes
print with a prefix ([0], [1], ...). Each gets GPUs of its own if there are any, and
emulated CPU devices otherwise. Ctrl-C and SIGTERM are passed on: the run saves and ends.
If one process fails the others are ended, too, and the last lines of its errors are
repeated at the end; with --max-restarts the run then goes on from its last checkpoint,
unless the command line was wrong (status 2), the run decided to stop by itself (1) or was
interrupted (130). The exit status is that of the process that failed, or 128 plus the
number of the signal that ended it. If what the processes print can be shown no longer
(the terminal is closed, the reader of the pipe has ended), the run saves and ends, with 0
after a SIGHUP and 1 otherwise; launcher.txt in the run folder says why. With the trainer's
--distributed.survive only the first process counts: whether the others can be missed is
left to the trainer.
"""

import argparse
import contextlib
import ctypes
import glob
import itertools
import os
import pathlib
import runpy
import shlex
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import NoReturn

from train.arguments import Parser
from train.cluster.exit_status import INTERRUPTED, SIGNALED, STOPPED, WRONG_USAGE
from train.cluster.process_group import ProcessGroup
from train.tools import launch_plan
from train.tools.launch_plan import NoPlan, Plan


TRAINER = "train"
NOTES = "launcher.txt"  # in the run folder: what the launcher could not show
LAUNCHER = "LSGD_JAX_LAUNCHER"  # see train.run.resuming, which takes jax to import
DELIBERATE = (STOPPED, WRONG_USAGE, INTERRUPTED)  # these call for no restart
PR_SET_PDEATHSIG = 1  # of Linux's prctl
LEAST = {"processes": 1, "devices_per_process": 1, "max_restarts": 0, "grace": 0}


def child() -> NoReturn:
    """What a started process does first: `child PARENT MODULE ARGUMENTS`."""
    _, parent, module, *arguments = sys.argv
    if sys.platform == "linux":
        # If the launcher is killed, so is this process.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(parent):
            sys.exit(SIGNALED + signal.SIGKILL)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit()


def rendezvous_options(processes: int) -> list[list[str]]:
    """Of each process, the options for its rendezvous with the others."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = ["--distributed.coordinator", f"127.0.0.1:{port}"]
    common += ["--distributed.num-processes", str(processes), "--distributed.gpus", "all"]
    return [[*common, "--distributed.process-id", str(i)] for i in range(processes)]


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


class Program:
    """What every process runs.

    Args:
      module: the module.
      arguments: its command line.
      plan: how to make it go on; another module than the trainer just starts again.
    """

    def __init__(self, module: str, arguments: Sequence[str], plan: Plan):
        self._plan = plan
        self._start = [module, *arguments, *self._plan.folder]
        self._resume: Sequence[str] = ()

    def command(self, more: Sequence[str]) -> list[str]:
        """The command of a process that ends with these options."""
        start = [sys.executable, "-c", "from train.tools.launch import child; child()"]
        return [*start, str(os.getpid()), *self._start, *self._resume, *more]

    def note(self, line: str) -> None:
        """Writes a line into the run folder, if there is one."""
        begun = self._plan.begun
        if begun is not None and (folder := pathlib.Path(begun).parent).is_dir():
            with contextlib.suppress(OSError), open(folder / NOTES, "a") as file:
                file.write(f"{line}\n")

    def resume(self) -> None:
        """From now on the run is to go on if it has begun."""
        begun = self._plan.begun
        if begun is not None and pathlib.Path(begun).exists():
            self._resume = self._plan.resume


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The launcher's options; those of the program stand behind --.

    Raises:
      ValueError: they cannot be understood, or a number is too small.
    """
    parser = Parser("python -m train.launch", __doc__)
    add = parser.add_argument
    add("--processes", type=int, required=True, help="how many")
    add("--devices-per-process", type=int, help="GPUs, or emulated CPU devices, of each")
    add("--max-restarts", type=int, default=0, help="how often to go on after a crash (0)")
    add("--grace", type=int, default=5, help="seconds to end in if another failed (5)")
    add("--module", default=TRAINER, help="what to run, such as train.compare (train)")
    add("arguments", nargs="*", help="what to run it with, behind --")
    options = parser.parse_args(arguments)
    for name, least in LEAST.items():
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"`{name}` must be at least {least}, got {name}={value}")
    return options


def main(arguments: Sequence[str]) -> int:
    """Launches; the exit status is that of the processes, or 2 (wrong usage)."""
    try:
        options = parse(arguments)
        given = environments(options.processes, options.devices_per_process, os.environ)
        is_trainer = options.module == TRAINER
        plan = launch_plan.of_trainer(options.arguments) if is_trainer else Plan()
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_USAGE
    except NoPlan as no_plan:
        return no_plan.status
    except KeyboardInterrupt:
        return INTERRUPTED
    return launch(options, given, plan)


def command(options: argparse.Namespace) -> str:
    """This command up to what it launches, for a line that says how to go on."""
    words = ["python", "-m", "train.launch"]
    for name, usual in (("devices_per_process", None), ("max_restarts", 0), ("grace", 5)):
        value = getattr(options, name)
        if value != usual:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join([*words, "--processes", str(options.processes), "--"])


def launch(
    options: argparse.Namespace, given: Sequence[Mapping[str, str]], plan: Plan
) -> int:
    """Starts the processes, again after a crash; the exit status.

    Args:
      options: what `parse` returns.
      given: the environment of each process.
      plan: how the program is started and restarted.
    """
    program = Program(options.module, options.arguments, plan)
    given = [dict(one) | {LAUNCHER: command(options)} for one in given]
    for restart in itertools.count(1):
        commands = map(program.command, rendezvous_options(options.processes))
        with ProcessGroup(
            list(commands), given, options.grace, plan.survive, program.note
        ) as group:
            failed = group.wait()
        if failed is None:
            unasked = group.lost_output and not group.sent
            return max(group.status, STOPPED) if unasked else group.status
        with contextlib.suppress(OSError):  # no terminal any more
            print(f"{failed.fate}:", *failed.last_errors, sep="\n", file=sys.stderr)
        hopeless = group.sent or group.lost_output or failed.status in DELIBERATE
        if hopeless or restart > options.max_restarts:
            return failed.status
        program.resume()
        print(f"restart {restart} of {options.max_restarts}", file=sys.stderr)
    raise AssertionError
