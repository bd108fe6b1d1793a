"""python -m train.launch: one run in several processes on this machine.

    python -m train.launch --processes 2 --devices-per-process 4 -- digits --steps 100

starts `python -m train digits --steps 100` twice as one run and shows what the processes
print with a prefix ([0], [1], ...). Each gets GPUs of its own if there are any, and
emulated CPU devices otherwise. Ctrl-C and SIGTERM are passed on: the run saves and ends.
If one process fails the others are ended, too, and its last words are repeated at the end;
with --max-restarts the run then goes on from its last checkpoint, unless the command line
was wrong (status 2), the run decided to stop by itself (1) or was interrupted (130). The
exit status is that of the process that failed, or 128 plus the number of the signal that
ended it. With the trainer's --distributed.survive only the first process counts: whether
the others can be missed is left to the trainer.
"""

import argparse
import contextlib
import ctypes
import glob
import itertools
import os
import pathlib
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NoReturn, TextIO

from train.arguments import Parser


TRAINER = "train"
DELIBERATE = (1, 2, 130)  # exit statuses that call for no restart
SURVIVE = "--distributed.survive"
LOST = 75  # exit status of a process that ends because of another one
LAST_WORDS = 20  # lines that are repeated
PR_SET_PDEATHSIG = 1  # of Linux's prctl
PASSED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
LEAST = {"processes": 1, "devices_per_process": 1, "max_restarts": 0, "grace": 0}


class Child:
    """A process of the run, and what it prints."""

    def __init__(self, index: int, command: Sequence[str], environment: Mapping[str, str]):
        self.index = index
        self.last_words: deque[str] = deque(maxlen=LAST_WORDS)
        self.popen = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            process_group=0,  # what the process starts itself is ended with it
        )
        # Of each pipe, where it goes and the line that is not complete yet.
        self.pipes: dict[int, tuple[TextIO, bytearray]] = {
            self.popen.stdout.fileno(): (sys.stdout, bytearray()),  # type: ignore
            self.popen.stderr.fileno(): (sys.stderr, bytearray()),  # type: ignore
        }

    def show(self, pipe: int) -> bool:
        """Shows the lines that a pipe holds; whether more may come."""
        screen, line = self.pipes[pipe]
        read = os.read(pipe, 2**16)
        line += read
        while b"\n" in line or (line and not read):
            text, _, rest = line.partition(b"\n")
            line[:] = rest
            self._show_line(text.decode(errors="replace"), screen)
        return bool(read)

    def _show_line(self, text: str, screen: TextIO) -> None:
        if screen is sys.stderr:
            self.last_words.append(text)
        print(f"[{self.index}] {text}", file=screen, flush=True)

    def send(self, number: int) -> None:
        """Sends a signal, unless the process has ended; SIGKILL to all it has started."""
        if self.popen.returncode is None and number == signal.SIGKILL:
            self._kill_all()
        elif self.popen.returncode is None:
            self.popen.send_signal(number)

    def has_ended(self) -> bool:
        """Whether it has ended; what it has left behind is then ended, too."""
        ended = self.popen.poll() is not None
        if ended:
            self._kill_all()
        return ended

    def _kill_all(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)

    def close(self) -> None:
        """Ends it if need be."""
        self.send(signal.SIGKILL)
        self.popen.wait()
        for pipe in (self.popen.stdout, self.popen.stderr):
            pipe.close()  # type: ignore

    @property
    def status(self) -> int:
        """Its exit status as a shell reports it."""
        code = self.popen.returncode
        return code if code >= 0 else 128 - code

    @property
    def fate(self) -> str:
        """How it ended."""
        code = self.popen.returncode
        if code < 0:
            return f"process {self.index} was ended by {signal.Signals(-code).name}"
        return f"process {self.index} failed with status {code}"


class Group:
    """The processes of a run, from their start until all have ended.

    Args:
      commands, environments: of each process.
      grace: seconds that the others get to end in when one has failed.
      survive: whether only the first process may end the others.

    Attributes:
      sent: the signals that were passed on.
    """

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        environments: Sequence[Mapping[str, str]],
        grace: float,
        survive: bool = False,
    ):
        self.sent: list[int] = []
        self._grace, self._survive = grace, survive
        self._children: list[Child] = []
        self._pipes = selectors.DefaultSelector()
        self._handlers = {number: signal.signal(number, self._pass_on) for number in PASSED}
        try:
            for i, (command, environment) in enumerate(zip(commands, environments)):
                self._children.append(child := Child(i, command, environment))
                for pipe in child.pipes:
                    self._pipes.register(pipe, selectors.EVENT_READ, child)
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> "Group":
        return self

    def __exit__(self, *_) -> None:
        """Leaves nobody behind, whatever happened."""
        for child in self._children:
            child.close()
        self._pipes.close()
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _send(self, number: int) -> None:
        for child in self._children:
            child.send(number)

    def _pass_on(self, number: int, _: object) -> None:
        """Passes a signal on; the third one kills."""
        asked = signal.SIGINT if number == signal.SIGINT else signal.SIGTERM
        self.sent.append(asked if len(self.sent) < 2 else signal.SIGKILL)
        self._send(self.sent[-1])

    def wait(self) -> Child | None:
        """Shows what the processes print until all have ended.

        Returns:
          The first one that failed, or None. To end because of a signal that was passed on
          is no failure.
        """
        running, failed, deadline = set(self._children), [], float("inf")
        as_told, signals = {0}, [signal.SIGTERM, signal.SIGKILL]
        while running:
            self._show()
            ended = {child for child in running if child.has_ended()}
            running -= ended
            as_told.update(128 + number for number in self.sent)
            unexpected = [child for child in ended if child.status not in as_told]
            for child in unexpected:
                if self._survive and child.index > 0:
                    print(child.fate, file=sys.stderr)
                else:
                    failed.append(child)
            now = time.monotonic()
            if failed and len(signals) == 2:
                # One that ends because of another one may be faster than that one.
                because = all(child.status == LOST for child in failed)
                deadline = min(deadline, now + because * self._grace)
            if signals and now >= deadline:
                number = signals.pop(0)
                self._send(number)
                as_told.add(128 + number)
                deadline = now + self._grace
        while self._show():
            pass
        return min(failed, key=lambda child: child.status == LOST) if failed else None

    def _show(self) -> bool:
        """Shows what has been printed, or comes within 0.1 s; whether there was any."""
        ready = self._pipes.select(0.1)
        for key, _ in ready:
            if not key.data.show(key.fd):
                self._pipes.unregister(key.fd)
        return bool(ready)

    @property
    def status(self) -> int:
        """The highest of the exit statuses that count."""
        counting = self._children[:1] if self._survive else self._children
        return max(child.status for child in counting)


def child() -> NoReturn:
    """What a started process does first: `child PARENT MODULE ARGUMENTS`."""
    _, parent, module, *arguments = sys.argv
    if sys.platform == "linux":
        # If the launcher is killed, so is this process.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(parent):
            sys.exit(128 + signal.SIGKILL)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    sys.exit()


def joining(processes: int) -> list[list[str]]:
    """The options by which the processes find one another."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    together = ["--distributed.coordinator", f"127.0.0.1:{port}"]
    together += ["--distributed.num-processes", str(processes), "--distributed.gpus", "all"]
    return [[*together, "--distributed.process-id", str(i)] for i in range(processes)]


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
      restarts: whether it may have to go on later: the trainer then gets its run folder
        here.

    Raises:
      ValueError, SystemExit: the trainer does not take this command line.
    """

    def __init__(self, module: str, arguments: Sequence[str], restarts: bool):
        self._module, self._arguments = module, list(arguments)
        self._begun: pathlib.Path | None = None  # there once the run folder is
        self._to_go_on = ["--resume"]
        if restarts and module == TRAINER:
            from train import cli  # they take seconds
            from train.run import folder as run_folder

            config = cli.parse(arguments)
            folder = run_folder.choose(config)
            self._begun = folder / run_folder.CONFIG
            if config.run_dir is None:
                self._arguments += ["--run-dir", str(folder)]
            if config.distributed.survive:  # with all nodes again, whoever was lost
                grid = config.workers
                self._to_go_on += ["--workers.nodes", str(grid.nodes)]
                self._to_go_on += ["--workers.locals", str(grid.locals)]

    def command(self, more: Sequence[str]) -> list[str]:
        """The command of a process that ends with this one."""
        start = [sys.executable, "-c", "from train.tools.launch import child; child()"]
        return [*start, str(os.getpid()), self._module, *self._arguments, *more]

    def go_on(self) -> None:
        """From now on the trainer is to go on; another module gets the same once more."""
        begun = self._begun is not None and self._begun.exists()
        if begun and "--resume" not in self._arguments:
            self._arguments += self._to_go_on


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The launcher's options; those of the program stand behind --.

    Raises:
      ValueError: they can not be understood, or a number is too small.
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
        program = Program(options.module, options.arguments, options.max_restarts > 0)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    for restart in itertools.count(1):
        commands = [program.command(join) for join in joining(options.processes)]
        with Group(commands, given, options.grace, SURVIVE in options.arguments) as group:
            failed = group.wait()
        if failed is None:
            return group.status
        print(f"{failed.fate}:", *failed.last_words, sep="\n", file=sys.stderr)
        hopeless = group.sent or failed.status in DELIBERATE
        if hopeless or restart > options.max_restarts:
            return failed.status
        program.go_on()
        print(f"restart {restart} of {options.max_restarts}", file=sys.stderr)
    raise AssertionError
