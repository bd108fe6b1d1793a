"""Bytes, temporaries and compile time of all methods for W workers on TPUs and H100s.

    python benchmarks/pods.py                                  # all, several hours
    python benchmarks/pods.py --workers 8 --platform tpu --method lsgd diloco

Compiles a step on which everything is due and a quiet one, with one worker per device, for
two slices of v5e and for hosts of four H100. For W = 2 a worker has four TPUs. Needs the
extras `tpu` and `gpu-compile`, and neither TPUs nor GPUs. Prints a Markdown table:

- bytes per parameter: the results of all collectives of the due step, and what a device
  sends to other slices or hosts, divided by the parameters of a worker;
- temporaries of the due step beyond those of a step without an exchange, as a multiple of
  the parameters;
- seconds of XLA for the due step, and bytes across on the quiet step.
"""

import argparse
import functools
import math
import pathlib
import sys

import jax
import jax.numpy as jnp
import optax

import lsgd_jax as lj
from lsgd_jax import aot


sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))
from harness import METHODS  # noqa: E402


SHAPES = {f"small{i}": (128, 128) for i in range(24)} | {
    f"large{i}": (512, 512) for i in range(2)
}
PARAMETERS = sum(map(math.prod, SHAPES.values()))
BASE = optax.sgd(0.1)
# Slices of W / 2 chips; a slice of one or two chips is no topology of its own.
SLICES = {8: "2x2", 32: "4x4", 128: "8x8", 512: "16x16"}


@functools.cache
def workers_on(platform: str, W: int) -> lj.Workers:
    """W workers in two slices, or in hosts of four GPUs."""
    if platform == "tpu":
        if W == 2:  # two workers of four chips
            mesh = aot.tpu("v5e:2x2", slices=2).mesh(node=2, inside=4)
            return lj.Workers(mesh=mesh, axes=("node",))
        pod, nodes = aot.tpu(f"v5e:{SLICES[W]}", slices=2), 2
    else:
        nodes = max(2, W // 4)
        pod = aot.gpu("h100", hosts=nodes, each=W // nodes)
    return lj.Workers(mesh=pod.mesh(node=nodes, local=W // nodes), axes=("node", "local"))


def zeros():
    return {name: jnp.zeros(shape) for name, shape in SHAPES.items()}


def gradient(params, target):
    grads = jax.tree.map(lambda x: x - target, params)
    return jnp.sum(jnp.square(grads["small0"])), grads


@functools.cache
def compiled(platform: str, W: int, name: str, form: str) -> dict[str, aot.Program]:
    """The programs of the due and of the quiet step; an aggregation has the first only."""
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
        phases = [due, *quiet]
    batch = jax.ShapeDtypeStruct((), jnp.float32)
    init = lambda: (zeros(), (around or tx).init(zeros()))
    workers = workers_on(platform, W)
    report = aot.report(workers, init, step, batch, exchange, phases=phases)
    return dict(zip(("due", "quiet"), report.programs))


def row(platform: str, W: int, name: str, form: str) -> list[str]:
    base = compiled(platform, W, "", form)["due"]
    programs = compiled(platform, W, name, form)
    due, quiet = programs["due"], programs.get("quiet")
    if due.memory is None or base.memory is None:
        return [platform, str(W), name, *["does not fit"] * 5]
    moved = sum(x.times * x.bytes for x in due.collectives) / PARAMETERS
    more = (due.memory.temporaries - base.memory.temporaries) / PARAMETERS / 4
    return [
        platform,
        str(W),
        name,
        f"{moved:.2f}",
        f"{due.across / PARAMETERS:.2f}",
        f"{more:.2f}",
        f"{due.compile_seconds:.1f}",
        "–" if quiet is None else f"{quiet.across:.0f}",
    ]


HEADER = (
    "platform",
    "W",
    "method",
    "bytes per parameter",
    "of these sent across",
    "temporaries",
    "compile, s",
    "bytes across when quiet",
)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    counts = (2, 8, 32, 128, 512)
    parser.add_argument("--workers", type=int, nargs="+", choices=counts, default=counts)
    both = ("tpu", "gpu")
    parser.add_argument("--platform", nargs="+", choices=both, default=both)
    parser.add_argument("--method", nargs="+", choices=METHODS, default=METHODS)
    forms = ("chain", "outer")
    parser.add_argument("--form", choices=forms, default="chain")
    options = parser.parse_args()
    line = lambda cells: print("| " + " | ".join(cells) + " |", flush=True)
    line(HEADER)
    line(["---"] * len(HEADER))
    for platform in options.platform:
        for W in options.workers:
            for name in options.method:
                if W in METHODS[name].refuses:
                    continue
                try:
                    line(row(platform, W, name, options.form))
                except Exception as error:  # the other rows may take hours
                    reason = str(error).partition("\n")[0]
                    line([platform, str(W), name, f"fails: {reason}", *["–"] * 4])


if __name__ == "__main__":
    main()
