"""Bytes, temporaries and compile time of all methods for W workers on TPUs and H100s.

    python benchmarks/pods.py                                  # all, two hours
    python benchmarks/pods.py --workers 8 --platform tpu --method lsgd diloco
    python benchmarks/pods.py --workers 8 --form outer --scale 16      # large leaves

Compiles a step on which everything is due and a quiet one, with one worker per device, for
two slices of v5e and for hosts of four H100. For W = 2 a worker has four TPUs. Needs the
extras `tpu` and `gpu-compile`, and neither TPUs nor GPUs. Writes a file of one line per
method and number of workers; those that it has already are not compiled again:

- moved, across: the results of all collectives of the due step, and what a device sends to
  other slices or hosts, in bytes per parameter of a worker;
- temporaries of the due step beyond those of a step without an exchange, as a multiple of
  the parameters;
- seconds: of all CPUs, to trace, lower and compile the due step;
- quiet: bytes that a device sends across on the quiet step;
- error: why there are no numbers.

Prints a Markdown table for each platform, with across / temporaries / seconds.
"""

import csv
import dataclasses
import functools
import itertools
import pathlib
import sys
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
import usage

import lsgd_jax as lj
from lsgd_jax import aot


sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))
import harness  # noqa: E402


# The tests send half of all entries, from chunks of four.
SPARSE = dataclasses.replace(
    harness.METHODS["sparse_diloco"], make=lambda W: lj.contrib.sparse_diloco()
)
METHODS = harness.METHODS | {"sparse_diloco": SPARSE}
# Sides of the leaves.
SIDES = {f"small{i}": 128 for i in range(24)} | {f"large{i}": 512 for i in range(2)}
BASE = optax.adamw(0.1)
# Slices of W / 2 chips; a slice of one or two chips is no topology of its own.
SLICES = {2: "2x2", 8: "2x2", 32: "4x4", 128: "8x8", 512: "16x16"}


class Case(NamedTuple):
    """A method on a cluster, compiled once. The sides of all leaves are times `scale`."""

    platform: str
    W: int
    method: str
    form: str
    scale: int


@functools.cache
def workers_on(platform: str, W: int) -> lj.Workers:
    """W workers in two slices, or in hosts of four GPUs."""
    if platform == "gpu":
        nodes = max(2, W // 4)
        pod = aot.gpu("h100", hosts=nodes, each=W // nodes)
    else:
        pod = aot.tpu(f"v5e:{SLICES[W]}", slices=2)
        nodes = 2
    if shards(platform, W) > 1:
        mesh = pod.mesh(node=nodes, inside=shards(platform, W))
        return lj.Workers(mesh=mesh, axes=("node",))
    return lj.Workers(mesh=pod.mesh(node=nodes, local=W // nodes), axes=("node", "local"))


def shards(platform: str, W: int) -> int:
    """The devices of a worker."""
    return 4 if (platform, W) == ("tpu", 2) else 1


def gradient(params, target):
    grads = jax.tree.map(lambda x: x - target, params)
    return jnp.sum(jnp.square(grads["small0"])), grads


@functools.cache
def compiled(case: Case) -> tuple[list, float]:
    """The programs of the quiet step, if there is one, and of the due step.

    Also returns the seconds that all CPUs took for the due step: on a busy machine, unlike
    those of a clock, they are the same.
    """
    platform, W, name, form, scale = case
    workers = workers_on(platform, W)
    method = METHODS.get(name)
    tx = BASE if method is None else method.chain(W, BASE)
    tx = optax.with_extra_args_support(tx)
    exchange = None
    if method is not None and not method.first:
        made = method.make(W)
        exchange = made if isinstance(made, lj.Exchange) else None
    around = lj.outer(exchange) if exchange and form == "outer" else None

    def init():
        params = {name: jnp.zeros((scale * n, scale * n)) for name, n in SIDES.items()}
        return params, (around or tx).init(params)

    def step(params, state, x, **phase):
        loss, grads = gradient(params, x)
        more = {"grad": grads, **phase}
        if around is not None:
            params = jax.tree.map(lambda x, g: x - 0.1 * g, params, grads)
            return around.step(params, state, loss=loss, **more)
        updates, state = tx.update(grads, state, params, value=loss, **more)
        return lj.apply_updates(params, updates), state

    phases = None
    if exchange is not None:
        each = exchange.phases(workers.sizes)
        due = max(each, key=lambda phase: (len(phase.sends), len(phase.lands)))
        quiet = [phase for phase in each if phase.is_quiet and not phase.lands][:1]
        phases = [*quiet, due]
    n = shards(platform, W)
    times = [time.process_time()]
    report = aot.report(
        workers,
        init,
        step,
        jax.ShapeDtypeStruct((), jnp.float32),
        exchange,
        phases=phases,
        specs=lj.layouts.largest_dimension("inside", n) if n > 1 else None,
        on_program=lambda program: times.append(time.process_time()),
    )
    return list(report.programs), times[-1] - times[-2]


NUMBERS = "moved", "across", "temporaries", "seconds", "quiet"


def row(case: Case) -> dict[str, str]:
    """The numbers of a case, as text."""
    [base], _ = compiled(case._replace(method=""))
    [*quiet, due], seconds = compiled(case)
    if due.memory is None or base.memory is None:
        return {"error": "does not fit"}
    parameters = sum((case.scale * n) ** 2 for n in SIDES.values())
    moved = sum(x.times * x.bytes for x in due.collectives)
    more = (due.memory.temporaries - base.memory.temporaries) / 4
    return {
        "moved": f"{moved / parameters:.2f}",
        "across": f"{due.across / parameters:.2f}",
        "temporaries": f"{more * shards(case.platform, case.W) / parameters:.2f}",
        "seconds": f"{seconds:.1f}",
        "quiet": f"{quiet[0].across:.0f}" if quiet else "",
    }


def read(path: pathlib.Path) -> dict[Case, dict[str, str]]:
    """The rows of an earlier call."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        case = lambda x: Case(x[0], int(x[1]), x[2], x[3], int(x[4]))
        rows = csv.DictReader(file)
        return {case([each[name] for name in Case._fields]): each for each in rows}


def compile_all(cases: list[Case], path: pathlib.Path, rows: dict[Case, dict[str, str]]):
    """Adds the rows that are missing, and writes each as soon as it is there."""
    is_new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, (*Case._fields, *NUMBERS, "error"))
        if is_new:
            writer.writeheader()
        for case in cases:
            if case in rows or case.W in METHODS[case.method].refuses:
                continue
            try:
                rows[case] = row(case)
            except Exception as error:  # the other rows may take hours
                rows[case] = {"error": str(error).partition("\n")[0]}
            writer.writerow(case._asdict() | rows[case])
            file.flush()


def print_table(rows: dict[Case, dict[str, str]]) -> None:
    """Prints a table: methods down, numbers of workers across."""
    counts = sorted({case.W for case in rows})
    each = {(case.method, case.W): numbers for case, numbers in rows.items()}

    def cell(method: str, W: int) -> str:
        found = each.get((method, W), {"error": "–"})
        if found.get("error"):
            return found["error"]
        across, more, seconds = (float(found[x]) for x in NUMBERS[1:4])
        return f"{across:.2f} / {more:.1f} / {seconds:.0f}"

    usage.head("method", *(f"W = {W}" for W in counts))
    for method in dict.fromkeys(case.method for case in rows):
        usage.row(method, *(cell(method, W) for W in counts))


def main():
    words = usage.parser(__doc__)
    both = ("tpu", "gpu")
    words.add_argument("--workers", type=int, nargs="+", choices=SLICES, default=SLICES)
    words.add_argument("--platform", nargs="+", choices=both, default=both)
    words.add_argument("--method", nargs="+", choices=METHODS, default=METHODS)
    words.add_argument("--form", choices=("chain", "outer"), default="chain")
    words.add_argument("--scale", type=int, default=1)
    words.add_argument("--csv", type=pathlib.Path, default=pathlib.Path("pods.csv"))
    options = words.parse_args()
    rows = read(options.csv)
    kind = (options.form, options.scale)
    names = itertools.product(options.platform, options.workers, options.method)
    compile_all([Case(*each, *kind) for each in names], options.csv, rows)
    for platform in options.platform:
        here = {x: n for x, n in rows.items() if (x.platform, *x[3:]) == (platform, *kind)}
        print(f"\n{platform}\n")
        print_table(here)


if __name__ == "__main__":
    main()
