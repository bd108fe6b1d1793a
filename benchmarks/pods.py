"""Bytes, temporaries and compile time of all methods for W workers on TPUs and H100s.

    python benchmarks/pods.py                                  # all, several hours
    python benchmarks/pods.py --workers 8 --platform tpu --method lsgd diloco

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

import argparse
import csv
import dataclasses
import functools
import math
import pathlib
import sys
import time

import jax
import jax.numpy as jnp
import optax

import lsgd_jax as lj
from lsgd_jax import aot


sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))
import harness  # noqa: E402


# The tests send half of all entries, from chunks of four.
SPARSE = dataclasses.replace(
    harness.METHODS["sparse_diloco"], make=lambda W: lj.contrib.sparse_diloco()
)
METHODS = harness.METHODS | {"sparse_diloco": SPARSE}
SHAPES = {f"small{i}": (128, 128) for i in range(24)} | {
    f"large{i}": (512, 512) for i in range(2)
}
PARAMETERS = sum(map(math.prod, SHAPES.values()))
BASE = optax.sgd(0.1)
# Slices of W / 2 chips; a slice of one or two chips is no topology of its own.
SLICES = {2: "2x2", 8: "2x2", 32: "4x4", 128: "8x8", 512: "16x16"}


@functools.cache
def workers_on(platform: str, W: int) -> lj.Workers:
    """W workers in two slices, or in hosts of four GPUs."""
    if platform == "gpu":
        nodes = max(2, W // 4)
        pod = aot.gpu("h100", hosts=nodes, each=W // nodes)
    else:
        pod, nodes = aot.tpu(f"v5e:{SLICES[W]}", slices=2), 2
    if shards(platform, W) > 1:
        mesh = pod.mesh(node=nodes, inside=shards(platform, W))
        return lj.Workers(mesh=mesh, axes=("node",))
    return lj.Workers(mesh=pod.mesh(node=nodes, local=W // nodes), axes=("node", "local"))


def shards(platform: str, W: int) -> int:
    """The devices of a worker."""
    return 4 if (platform, W) == ("tpu", 2) else 1


def zeros():
    return {name: jnp.zeros(shape) for name, shape in SHAPES.items()}


def gradient(params, target):
    grads = jax.tree.map(lambda x: x - target, params)
    return jnp.sum(jnp.square(grads["small0"])), grads


@functools.cache
def compiled(platform: str, W: int, name: str, form: str) -> tuple[list, float]:
    """The programs of the quiet step, if there is one, and of the due step.

    Also returns the seconds that all CPUs took for the due step: on a busy machine, unlike
    those of a clock, they are the same.
    """
    method = METHODS.get(name)
    tx = BASE if method is None else method.chain(W, BASE)
    tx = optax.with_extra_args_support(tx)
    exchange = None
    if method is not None and not method.first:
        made = method.make(W)
        exchange = made if isinstance(made, lj.Exchange) else None
    around = lj.outer(exchange) if exchange and form == "outer" else None

    def step(params, state, x, **phase):
        loss, grads = gradient(params, x)
        more = {"value_fn": lambda p: gradient(p, x)[0], "grad": grads, **phase}
        if around is not None:
            params = jax.tree.map(lambda x, g: x - 0.1 * g, params, grads)
            return around.step(params, state, loss=loss, **more)
        updates, state = tx.update(grads, state, params, value=loss, **more)
        return lj.apply_updates(params, updates), state

    phases = None
    if exchange is not None:
        each = exchange.phases()
        due = max(each, key=lambda phase: (len(phase.sends), len(phase.lands)))
        quiet = [phase for phase in each if phase.is_quiet and not phase.lands][:1]
        phases = [*quiet, due]
    batch = jax.ShapeDtypeStruct((), jnp.float32)
    init = lambda: (zeros(), (around or tx).init(zeros()))
    n = shards(platform, W)
    times = [time.process_time()]
    report = aot.report(
        workers_on(platform, W),
        init,
        step,
        batch,
        exchange,
        phases=phases,
        specs=lj.largest_dimension("inside", n) if n > 1 else None,
        on_program=lambda program: times.append(time.process_time()),
    )
    return list(report.programs), times[-1] - times[-2]


NUMBERS = "moved", "across", "temporaries", "seconds", "quiet"
KEY = "platform", "W", "method", "form"


def row(platform: str, W: int, name: str, form: str) -> dict[str, str]:
    """The numbers of one method, as text."""
    [base], _ = compiled(platform, W, "", form)
    [*quiet, due], seconds = compiled(platform, W, name, form)
    if due.memory is None or base.memory is None:
        return {"error": "does not fit"}
    moved = sum(x.times * x.bytes for x in due.collectives)
    more = (due.memory.temporaries - base.memory.temporaries) * shards(platform, W) / 4
    return {
        "moved": f"{moved / PARAMETERS:.2f}",
        "across": f"{due.across / PARAMETERS:.2f}",
        "temporaries": f"{more / PARAMETERS:.2f}",
        "seconds": f"{seconds:.1f}",
        "quiet": f"{quiet[0].across:.0f}" if quiet else "",
    }


def compile_all(options: argparse.Namespace, rows: dict[tuple, dict]):
    """Adds the rows that are missing, and writes each as soon as it is there."""
    is_new = not options.csv.exists()
    with options.csv.open("a", newline="") as file:
        writer = csv.DictWriter(file, (*KEY, *NUMBERS, "error"))
        if is_new:
            writer.writeheader()
        for platform in options.platform:
            for W in options.workers:
                for name in options.method:
                    key = platform, str(W), name, options.form
                    if key in rows or W in METHODS[name].refuses:
                        continue
                    try:
                        rows[key] = row(platform, W, name, options.form)
                    except Exception as error:  # the other rows may take hours
                        rows[key] = {"error": str(error).partition("\n")[0]}
                    writer.writerow(dict(zip(KEY, key)) | rows[key])
                    file.flush()


def table(platform: str, form: str, rows: dict[tuple, dict]) -> str:
    """Methods down, numbers of workers across."""
    here = [key for key in rows if (key[0], key[3]) == (platform, form)]
    counts = sorted({key[1] for key in here}, key=int)

    def cell(name: str, W: str) -> str:
        found = rows.get((platform, W, name, form), {"error": "–"})
        if found.get("error"):
            return found["error"]
        across, more, seconds = (float(found[x]) for x in NUMBERS[1:4])
        return f"{across:.2f} / {more:.1f} / {seconds:.0f}"

    lines = [["method", *(f"W = {W}" for W in counts)], ["---"] * (1 + len(counts))]
    for name in dict.fromkeys(key[2] for key in here):
        lines.append([name, *(cell(name, W) for W in counts)])
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--workers", type=int, nargs="+", choices=SLICES, default=SLICES)
    both = ("tpu", "gpu")
    parser.add_argument("--platform", nargs="+", choices=both, default=both)
    parser.add_argument("--method", nargs="+", choices=METHODS, default=METHODS)
    forms = ("chain", "outer")
    parser.add_argument("--form", choices=forms, default="chain")
    parser.add_argument("--csv", type=pathlib.Path, default=pathlib.Path("pods.csv"))
    options = parser.parse_args()
    rows = {}
    if options.csv.exists():
        with options.csv.open(newline="") as file:
            rows = {tuple(each[x] for x in KEY): each for each in csv.DictReader(file)}
    compile_all(options, rows)
    for platform in options.platform:
        print(f"\n{platform}\n\n{table(platform, options.form, rows)}")


if __name__ == "__main__":
    main()
