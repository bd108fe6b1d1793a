"""Workers, pulls and memory on a GPU: one command, one Markdown table.

    python benchmarks/gpu.py > gpu.md        # a CUDA machine, under 8 minutes
    python benchmarks/gpu.py --small         # tries the script anywhere, with tiny sizes

Needs the extras `cuda` and `train`. The parts (`gpu_parts.py`) are

- workers: 1, 4 and 16 workers of one GPU beside one model of the same total batch, and
  beside one worker;
- pulls: a step with a pull, one that is not due, and one compiled without it, beside AdamW
  alone, at 100 million parameters;
- memory: the peak of a step with a pull, with and without donation, and the method's state;
- processes: the pulls again, among one process per GPU joined by NCCL; skipped where there
  is one GPU.

Each part runs in its own process, because the peak of memory is one number per process, and
has a time limit. The arms of a ratio take turns in one process.
"""

import argparse
import dataclasses
import json
import pathlib
import socket
import subprocess
import sys
import threading
import time


PARTS = pathlib.Path(__file__).with_name("gpu_parts.py")
ROW = "row: "  # marks results, because gloo and NCCL print lines, too
# Seconds of each part; together less than 8 minutes.
LIMITS_S = {"devices": 30, "workers": 150, "pulls": 120, "memory": 100, "processes": 70}


@dataclasses.dataclass(frozen=True)
class Network:
    """A transformer and the batch of one worker."""

    layers: int
    heads: int
    width: int
    context: int
    vocabulary: int
    dtype: str
    batch: int


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of the measurements.

    Attributes:
      networks: the models of the workers.
      counts: numbers of workers on one device.
      parameters: millions of float32 parameters of a worker.
      leaves: the number of arrays that hold them.
      methods, wires: the pulls to time.
      repetitions: blocks of steps of each arm.
      block_s: approximate seconds of a block.
    """

    networks: tuple[Network, ...] = (
        Network(4, 4, 128, 64, 65, "float32", batch=12),
        Network(4, 8, 512, 256, 4096, "bfloat16", batch=8),
    )
    counts: tuple[int, ...] = (1, 4, 16)
    parameters: float = 100.0
    leaves: int = 40
    methods: tuple[str, ...] = ("lsgd", "diloco", "easgd")
    wires: tuple[str, ...] = ("float32", "int8")
    repetitions: int = 5
    block_s: float = 0.3


SMALL = Sizes(
    networks=(Network(1, 2, 16, 8, 11, "float32", batch=2),),
    counts=(1, 2),
    parameters=0.01,
    leaves=9,
    methods=("diloco",),
    wires=("int8",),
    repetitions=1,
    block_s=0.01,
)


def parse():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--small", action="store_true", help="tiny sizes, on any backend")
    parser.add_argument("--processes", type=int, help="defaults to the number of GPUs")
    parser.add_argument(
        "--only", nargs="+", choices=list(LIMITS_S)[1:], default=list(LIMITS_S)[1:]
    )
    return parser.parse_args()


class Part:
    """Runs a part of the measurements in other processes.

    Attributes:
      rows: the results of the first process.
      wrong: why they are incomplete, or ''.
    """

    def __init__(self, name, small, limit_s, processes=1, **given):
        self.rows, self.wrong = [], ""
        # Small sizes run on machines that may be busy.
        limit_s *= 5 if small else 1
        given |= {"processes": processes, "port": free_port()}
        words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
        command = [sys.executable, PARTS, name, *words, *["--small"] * small]
        self._children = [
            subprocess.Popen(
                [*command, f"--process-id={i}"], stdout=subprocess.PIPE, text=True
            )
            for i in range(processes)
        ]
        late = threading.Timer(limit_s, self._kill)
        late.start()
        try:
            for line in self._children[0].stdout:
                print(f"  {line}", end="", file=sys.stderr, flush=True)
                if line.startswith(ROW):
                    self.rows.append(json.loads(line.removeprefix(ROW)))
            if any([child.wait() for child in self._children]):
                self.wrong = "failed, see the messages above"
            if not late.is_alive():
                self.wrong = f"stopped after {limit_s:.0f} s"
        finally:
            late.cancel()
            self._kill()

    def _kill(self):
        for child in self._children:
            child.kill()


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def rows_of(part, options, sizes, machine):
    """Returns the rows of a part, and why they are incomplete or ''."""
    if part == "memory":
        return memory_rows(options.small, sizes)
    count = 1
    if part == "processes":
        count = options.processes or machine["gpus"]
        if count < 2:
            return [], f"skipped: one process per GPU, and the GPUs are {count}"
    found = Part(part, options.small, LIMITS_S[part], processes=count)
    return found.rows, found.wrong


def memory_rows(small, sizes):
    """Compares processes that differ only in donation."""
    rows, began = [], time.perf_counter()
    for method in sizes.methods:
        found = {}
        for donate in (1, 0):
            left = max(1, LIMITS_S["memory"] - (time.perf_counter() - began))
            part = Part("memory", small, left, method=method, donate=donate)
            if part.wrong:
                return rows, part.wrong
            (found[donate],) = part.rows
        for kind in ("peak in use", "planned by the compiler"):
            donated, kept = (found[donate][kind] for donate in (1, 0))
            if donated is not None:
                case = f"{method}: {kind}, donated"
                rows.append(memory_row(case, donated, "not donated", kept))
        case = f"{method}: state for all workers together"
        state, parameters = found[1]["state"], found[1]["parameters"]
        rows.append(memory_row(case, state, "the parameters of one worker", parameters))
    return rows, ""


def memory_row(case, nbytes, beside, others):
    mb = lambda nbytes: f"{nbytes / 1e6:,.2f} MB"
    return [case, mb(nbytes), beside, mb(others), f"{nbytes / others:.2f}"]


def main():
    options, began = parse(), time.perf_counter()
    sizes = SMALL if options.small else Sizes()
    devices = Part("devices", options.small, LIMITS_S["devices"])
    if devices.wrong:
        return 1
    (machine,) = devices.rows
    if not machine["gpus"] and not options.small:
        print(
            f"error: no GPU was found, the backend is {machine['backend']}; install the "
            "extra `cuda`, or pass --small to try the script",
            file=sys.stderr,
        )
        return 1
    lines, status = [], 0
    for part in options.only:
        print(f"{part}:", file=sys.stderr, flush=True)
        rows, wrong = rows_of(part, options, sizes, machine)
        lines += [[part, *row] for row in rows]
        if wrong:
            lines.append([part, wrong, "", "", "", ""])
            status |= not wrong.startswith("skipped")
    kind = "the small sizes, which say nothing of speed" if options.small else "full sizes"
    print(
        f"Backend {machine['backend']}: {machine['count']} x {machine['kind']}, jax "
        f"{machine['jax']}, {kind}, {time.perf_counter() - began:.0f} s in all. Times are "
        "medians. A ratio divides what was measured by what stands beside it: the median "
        "(least to largest), above 1 where the measured takes more.\n"
    )
    print("| part | measured | | beside | | ratio |\n| --- | --- | --- | --- | --- | --- |")
    for line in lines:
        print("| " + " | ".join(line) + " |")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
