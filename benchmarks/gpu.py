"""Workers, pulls, predictions and memory on a GPU: one command, one Markdown table.

    python benchmarks/gpu.py > gpu.md              # a CUDA machine, under 11 minutes
    python benchmarks/gpu.py --sizes small         # tries the script anywhere
    python benchmarks/gpu.py --sizes cpu --only workers

Needs the extras `cuda` and `train`. The parts are

- workers: 1, 4 and 16 workers of one device beside one model of the same total batch, and
  beside one worker;
- pulls: a step with a pull, one that is not due, and one compiled without it, beside AdamW
  alone, at 100 million parameters;
- models: a step of three language models and its peak of memory, beside what `lj.aot`
  computes for them;
- memory: the peak of a step with a pull, with and without donation, and the method's state.

`python -m train.accept` compares such steps among several processes with limits.

Each part runs in its own process, because the peak of memory is one number per process, and
has a time limit. The arms of a ratio take turns in one process.
"""

import argparse
import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from usage import head, parser, row

import lsgd_jax as lj
from lsgd_jax import aot
from train.accept import subject
from train.accept.turns import TimedStep, in_turns, ratios
from train.task.transformer import Transformer


ROW = "row: "  # marks results, because libraries print lines, too
# Seconds of a run of each part; with six runs for memory less than 11 minutes.
LIMITS_S = {"devices": 30, "workers": 150, "pulls": 130, "models": 150, "memory": 20}
NEVER = 1_000_000
PLENTY = 30e9  # bytes of a GPU that has room for four workers of 100 million parameters


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of the measurements.

    Attributes:
      networks: the models of the workers, and the batch of one.
      counts: numbers of workers on one device.
      parameters: millions of float32 parameters of a worker.
      leaves: the number of arrays that hold them.
      methods, wires: the pulls to time.
      models: the models of the predictions and their batches, from small to large.
      repetitions: blocks of steps of each arm.
      block_s: approximate seconds of a block.
      limit: factor of the time limits, because machines without a GPU may be busy.
    """

    networks: tuple[tuple[Transformer, int], ...] = (
        (Transformer(65, 64, 4, 4, 128), 12),
        (Transformer(4096, 256, 4, 8, 512, dtype="bfloat16"), 8),
    )
    counts: tuple[int, ...] = (1, 4, 16)
    parameters: float = 100.0
    leaves: int = 40
    methods: tuple[str, ...] = ("lsgd", "diloco", "easgd")
    wires: tuple[str, ...] = ("float32", "int8")
    models: tuple[tuple[Transformer, int], ...] = (
        (Transformer(32768, 1024, 12, 12, 768, dtype="bfloat16"), 16),
        (Transformer(32768, 1024, 24, 16, 1024, dtype="bfloat16"), 8),
        (Transformer(32768, 2048, 16, 16, 2048, dtype="bfloat16"), 4),
    )
    repetitions: int = 5
    block_s: float = 0.3
    limit: float = 1.0


SIZES = {
    "full": Sizes(),
    "small": Sizes(
        networks=((Transformer(11, 8, 1, 2, 16), 2),),
        counts=(1, 2),
        parameters=0.01,
        leaves=9,
        methods=("diloco",),
        wires=("int8",),
        models=((Transformer(11, 8, 1, 2, 16), 2),),
        repetitions=1,
        block_s=0.01,
        limit=5,
    ),
    "cpu": Sizes(
        networks=((Transformer(65, 16, 1, 2, 16), 4), (Transformer(65, 64, 2, 4, 64), 12)),
        block_s=0.5,
        limit=5,
    ),
}


# The command


def parse():
    words = parser(__doc__)
    parts = list(LIMITS_S)[1:]
    words.add_argument("--sizes", choices=SIZES, default="full")
    words.add_argument("--only", nargs="+", choices=parts, default=parts)
    words.add_argument("--part", choices=LIMITS_S, help=argparse.SUPPRESS)
    words.add_argument("--method", help=argparse.SUPPRESS)
    words.add_argument("--donate", type=int, help=argparse.SUPPRESS)
    return words.parse_args()


def run(part, sizes, **given):
    """Runs a part in another process.

    Returns:
      The rows, and why they are incomplete or ''.
    """
    limit_s = LIMITS_S[part] * SIZES[sizes].limit
    given |= dict(part=part, sizes=sizes)
    command = [sys.executable, __file__, *(f"--{k}={value}" for k, value in given.items())]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    is_late = False
    try:
        said, _ = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        is_late = True
        child.kill()
        said, _ = child.communicate()
    lines = [line for line in said.splitlines() if line.startswith(ROW)]
    rows = [json.loads(line.removeprefix(ROW)) for line in lines]
    if is_late:
        return rows, f"stopped after {limit_s:.0f} s"
    return rows, "failed, see the messages above" if child.returncode else ""


def rows_of(part, options):
    """Returns the rows of a part, and why they are incomplete or ''."""
    if part == "memory":
        return memory_rows(options.sizes)
    return run(part, options.sizes)


def memory_rows(sizes):
    """Compares processes that differ only in donation."""
    rows = []
    for method in SIZES[sizes].methods:
        found = []
        for donate in (1, 0):
            seen, wrong = run("memory", sizes, method=method, donate=donate)
            if wrong:
                return rows, wrong
            found += seen
        donated, kept = found
        for kind in ("peak in use", "planned by the compiler"):
            if donated[kind] is not None:
                case = f"{method}: {kind}, donated"
                rows.append(memory_row(case, donated[kind], "not donated", kept[kind]))
        case = "state for all workers together"
        beside = "the parameters of one worker"
        sizes_of_both = donated["state"], beside, donated["parameters"]
        rows.append(memory_row(f"{method}: {case}", *sizes_of_both))
    return rows, ""


def memory_row(case, nbytes, beside, others):
    mb = lambda nbytes: f"{nbytes / 1e6:,.2f} MB"
    return [case, mb(nbytes), beside, mb(others), f"{nbytes / others:.2f}"]


def measure(options):
    """Runs one part, in a process of its own, and prints its rows."""
    # The default is three quarters of a GPU's memory.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.92")
    lj.tune_cpu()
    for found in PARTS[options.part](options, SIZES[options.sizes]):
        print(f"  {found}", file=sys.stderr, flush=True)
        print(ROW + json.dumps(found), flush=True)
    return 0


def main():
    options = parse()
    began = time.perf_counter()
    if options.part:
        return measure(options)
    is_full = options.sizes == "full"
    found, wrong = run("devices", options.sizes)
    if wrong:
        return 1
    (machine,) = found
    if not machine["gpus"] and is_full:
        print(
            f"error: no GPU was found, the backend is {machine['backend']}; install the "
            "extra `cuda`, or pass --sizes small to try the script",
            file=sys.stderr,
        )
        return 1
    lines = []
    status = 0
    for part in options.only:
        print(f"{part}:", file=sys.stderr, flush=True)
        rows, wrong = rows_of(part, options)
        lines += [[part, *row] for row in rows]
        if wrong:
            lines.append([part, wrong, "", "", "", ""])
            status = 1
    note = ", which say nothing of speed" if options.sizes == "small" else ""
    print(
        f"Backend {machine['backend']}: {machine['count']} x {machine['kind']}, jax "
        f"{machine['jax']}, {options.sizes} sizes{note}, "
        f"{time.perf_counter() - began:.0f} s in all. Times are medians. A ratio divides "
        "what was measured by what stands beside it: the median (least to largest), above "
        "1 where the measured takes more.\n"
    )
    head("part", "measured", "", "beside", "", "ratio")
    for line in lines:
        row(*line)
    return status


# Parts, in processes of their own


def timed(sizes, arms):
    """Times blocks of all arms in turns and returns the milliseconds per step."""
    for arm in arms.values():
        arm.seconds_per_step(1)  # compiles
    slowest = max(arm.seconds_per_step(1) for arm in arms.values())
    steps = int(max(2, min(100, sizes.block_s / slowest)))
    return in_turns(arms, sizes.repetitions, steps)


def row_of(case, times, beside, others, more=lambda ms: ""):
    """Returns a row of times."""
    found = ratios(times, others)
    cell = lambda x: f"{statistics.median(x):.2f} ms{more(statistics.median(x))}"
    ratio = f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"
    return [case, cell(times), beside, cell(others), ratio]


def devices(options, sizes):
    """Describes the devices of this machine."""
    backend = jax.default_backend()
    count = jax.device_count()
    gpus = count if backend == "gpu" else 0
    kind = jax.devices()[0].device_kind
    yield dict(backend=backend, gpus=gpus, count=count, kind=kind, jax=jax.__version__)


# Workers of one device


def workers(options, sizes):
    """Times workers of one device beside a model of their total batch and one worker."""
    for network, batch in sizes.networks:
        one = network_arm(network, 1, batch)
        for count in sizes.counts:
            samples = count * batch
            arms = {"one model": network_arm(network, None, samples), "one worker": one}
            if count > 1:
                arms["workers"] = network_arm(network, count, batch)
            times = timed(sizes, arms)

            def rate(ms, samples=samples):
                return f", {1e3 / ms:.1f} steps/s, {1e3 * samples / ms:.0f} samples/s"

            millions = sum(x.size for x in jax.tree.leaves(started(network))) / 1e6
            whose = f"{count} worker{'s' * (count > 1)} of {millions:.3g} M {network.dtype}"
            case = f"{whose}, batch {batch}"
            seen = times["workers" if count > 1 else "one worker"]
            model = f"one model, batch {samples}"
            yield row_of(case, seen, model, times["one model"], rate)
            if count > 1:
                yield row_of(f"{case}: as a price", seen, "1 worker", times["one worker"])


started = functools.cache(subject.started)


def network_arm(network, count, batch):
    return TimedStep(*network_step(network, count, batch))


def network_step(network, count, batch):
    """Returns AdamW of `count` workers, or of one model for None, and its state."""
    start = started(network)
    tx = optax.adamw(1e-3)
    shape = (count or 1, batch, network.context + 1)
    tokens = np.random.default_rng(0).integers(0, network.vocabulary, shape, np.int32)

    def step(params, state, tokens):
        def loss_of(params):
            logits = network.apply({"params": params}, tokens[:, :-1])
            each = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
            return each.mean()

        updates, state = tx.update(jax.grad(loss_of)(params), state, params)
        return optax.apply_updates(params, updates), state, tokens

    if count is None:
        params, tokens = jax.device_put((start, tokens[0]))
        state = [params, tx.init(params), tokens]
        return jax.jit(step, donate_argnums=(0, 1)), state
    grid = lj.Workers(1, count, devices=jax.devices()[:1])
    params = grid.replicate(start)
    state = [params, grid.map(tx.init)(params), grid.put(tokens)]
    return grid.map(step, donate=(0, 1)), state


# Predictions


def models(options, sizes):
    """Times models and measures their memory, beside what is computed for them.

    The peak of memory is that of the process, so models must be in the order of their size.
    """
    for network, batch in sizes.models:
        step, state = network_step(network, None, batch)
        report = aot.report_of(step.trace(*state))
        millions = sum(x.size for x in jax.tree.leaves(state[0])) / 1e6
        case = f"{millions:.4g} M {network.dtype}, context {network.context}, batch {batch}"
        times = timed(sizes, {"model": TimedStep(step, state)})["model"]
        seconds = report.mean_seconds()
        if seconds:
            yield row_of(case, times, "computed", [1e3 * seconds.step] * len(times))
        else:
            yield [case, f"{statistics.median(times):.2f} ms", "an unknown chip", "", ""]
        peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
        if peak:
            planned = report.programs[0].memory.peak
            yield memory_row(f"{case}: peak in use", peak, "computed", planned)
        del step, state


# Pulls


def pulls(options, sizes):
    """Times AdamW alone and steps with and without a pull, in turns on one state."""
    grid = grid_of_device()
    counts = sizes_of(sizes.parameters, sizes.leaves)
    for wire in sizes.wires:
        for name in sizes.methods:
            make = functools.partial(method, name, wire=wire)
            times = timed(sizes, Pulling(grid, counts, make).arms())
            alone = times.pop("alone")
            whose = f"{name}, {wire}, {sizes.parameters:g} M, {grid.num_workers} workers"
            for words, seen in times.items():
                case = f"{whose} of one device: {words}"
                yield row_of(case, seen, "AdamW alone", alone)


def grid_of_device():
    """Returns as many workers on one device as its memory can hold, 4 or 2."""
    device = jax.devices()[0]
    stats = device.memory_stats() or {}
    count = 4 if stats.get("bytes_limit", PLENTY) >= PLENTY else 2
    return lj.Workers(1, count, devices=[device])


def sizes_of(millions: float, leaves: int) -> list[int]:
    """Returns the sizes of leaves of some million elements; eight of them hold half."""
    wanted = int(millions * 1e6)
    big = wanted // 2 // 8
    return [big] * 8 + [(wanted - 8 * big) // (leaves - 8)] * (leaves - 8)


def method(name: str, period: int, wire: str = "float32") -> lj.Exchange:
    """Returns a method with a period."""
    if name == "lsgd":
        return lj.lsgd(0.1, 0.0, period, period, wire=wire)
    return {"diloco": lj.diloco, "easgd": lj.easgd}[name](period=period, wire=wire)


class Pulling:
    """Steps of an optimizer with and without a pull, on one state.

    Attributes:
      state: the parameters, the optimizer's state and the pull's state, of all workers.
      given: made-up gradients and losses of all workers.
    """

    def __init__(self, grid: lj.Workers, sizes: list[int], make, base=None):
        self._grid = grid
        self._make = make
        self._base = base or optax.adamw(1e-3)
        rng = np.random.default_rng(0)
        tree = {f"leaf{i:03}": rng.random(n, np.float32) for i, n in enumerate(sizes)}
        params = grid.replicate(tree)
        init = grid.map(optax.chain(self._base, make(NEVER)).init)
        self.state = [params, *init(params)]
        losses = np.arange(grid.num_workers, dtype=np.float32)
        gradients = grid.replicate(jax.tree.map(lambda x: 1e-3 * x, tree))
        self.given = gradients, grid.put(losses)

    def step(self, period: int | None = None, due=None, donate=True) -> Callable[..., Any]:
        """Returns a step with a pull every `period` steps; None: without its update."""
        base = self._base  # the step must not hold the state
        pull = None if period is None else self._make(period)

        def step(params, inner, outer, gradients, loss):
            if pull is None:
                updates, inner = base.update(gradients, inner, params)
                return lj.apply_updates(params, updates), inner, outer
            updates, state = optax.chain(base, pull).update(
                gradients, (inner, outer), params, value=loss, due=due
            )
            return lj.apply_updates(params, updates), *state

        return self._grid.map(step, donate=(0, 1, 2) if donate else ())

    def arms(self) -> dict[str, TimedStep]:
        """Returns the optimizer alone, and with a pull that is due, or not, or never."""
        steps = {
            "alone": self.step(),
            "a step with its pull": self.step(1),
            "a step that is not due": self.step(NEVER),
            "a step compiled with due=False": self.step(NEVER, due=False),
        }
        return {
            name: TimedStep(step, self.state, *self.given) for name, step in steps.items()
        }


def memory(options, sizes):
    """Measures the peak of memory of steps with a pull, with or without donation."""
    counts = sizes_of(sizes.parameters, sizes.leaves)
    make = functools.partial(method, options.method)
    pulling = Pulling(grid_of_device(), counts, make)
    step = pulling.step(1, donate=options.donate == 1)
    found = {"parameters": 4 * sum(counts)}
    found["state"] = sum(x.nbytes for x in jax.tree.leaves(pulling.state[2]))
    plan = step.lower(*pulling.state, *pulling.given).compile().memory_analysis()
    planned = plan.argument_size_in_bytes + plan.output_size_in_bytes
    planned += plan.temp_size_in_bytes - plan.alias_size_in_bytes
    TimedStep(step, pulling.state, *pulling.given).seconds_per_step(3)
    stats = jax.devices()[0].memory_stats() or {}  # CPUs have none
    found |= {"peak in use": stats.get("peak_bytes_in_use")}
    yield found | {"planned by the compiler": planned}


PARTS = {f.__name__: f for f in (devices, workers, pulls, models, memory)}


if __name__ == "__main__":
    sys.exit(main())
