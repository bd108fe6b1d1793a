"""Published training runs beside the seconds that `aot` computes for the same operations.

    python benchmarks/published_runs.py

Counts the operations of a training step of each model (`aot.flops`), without compiling, and
divides them by the peak of the chip times the default efficiency of `aot.report`. The last
column is the efficiency at which both would be equal: the defaults of TPUs were taken from
it. That of GPUs is larger, because a report adds the bytes that their kernels move. A
second table has the all-reduce of gradients between slices, in float32 and after the
gradient. Prints two Markdown tables in seconds, and needs no accelerator.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from usage import head, parser, row

from lsgd_jax import aot


MAXTEXT = "https://github.com/AI-Hypercomputer/maxtext"
TOOLBOX = "https://docs.nvidia.com/jax-toolbox/frameworks/max-text/overview"
HEAD = 128


class Model(NamedTuple):
    """A Llama: attention heads have 128 dimensions."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int


class Run(NamedTuple):
    """A published run.

    Attributes:
      sequences, length: those of one chip at each step.
      tokens: tokens per second of a chip.
      teraflops: the published TFLOP/s of a chip, in place of tokens; they do not count what
        is recomputed.
      recomputed: 'nothing' or 'layers'; None if the source does not say.
    """

    name: str
    model: Model
    chip: str
    sequences: int
    length: int
    recomputed: str | None
    source: str
    tokens: float | None = None
    teraflops: float | None = None


LLAMA_2_7B = Model(32, 4096, 32, 32, 11008, 32000)
LLAMA_3_8B = Model(32, 4096, 32, 8, 14336, 128256)
LLAMA_2_70B = Model(80, 8192, 64, 8, 28672, 32000)
LLAMA_3_70B = Model(80, 8192, 64, 8, 28672, 128256)
# MaxText's `global_parameter_scale`.
SCALED = {
    "16B": Model(32, 4096, 64, 64, 28672, 32000),
    "32B": Model(32, 8192, 64, 64, 28672, 32000),
    "64B": Model(64, 8192, 64, 64, 28672, 32000),
    "128B": Model(64, 8192, 128, 128, 57344, 32000),
}
RUNS = (
    Run("16B, 256 v5e", SCALED["16B"], "v5e", 6, 2048, "layers", MAXTEXT, teraflops=120),
    Run("32B, 128 v5p", SCALED["32B"], "v5p", 1, 2048, None, MAXTEXT, teraflops=328),
    Run("128B, 512 v5p", SCALED["128B"], "v5p", 1, 2048, "nothing", MAXTEXT, teraflops=315),
    Run("Llama 2 70B, 512 v5p", LLAMA_2_70B, "v5p", 4, 4096, None, MAXTEXT, tokens=692),
    Run("Llama 3.1 8B, 256 v6e", LLAMA_3_8B, "v6e", 3, 8192, None, MAXTEXT, tokens=7207),
    Run("Llama 3.1 70B, 256 v6e", LLAMA_3_70B, "v6e", 2, 8192, None, MAXTEXT, tokens=960),
    Run(
        "Llama 2 7B, 8 H100",
        *(LLAMA_2_7B, "h100", 2, 4096, "nothing", TOOLBOX),
        tokens=2 * 4096 / 0.721,
    ),
)
# MaxText's TFLOP/s of a chip for 16B on 2, 8 and 32 slices of 256 v5e.
SLICES = {2: 117, 8: 115, 32: 108}


def parameters(model: Model):
    layers, width, heads, kv_heads, hidden, vocabulary = model
    shapes = {
        "q": (width, heads * HEAD),
        "kv": (width, 2 * kv_heads * HEAD),
        "o": (heads * HEAD, width),
        "gate": (width, hidden),
        "up": (width, hidden),
        "down": (hidden, width),
    }
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    stacked = {name: of(layers, *shape) for name, shape in shapes.items()}
    return {"layers": stacked, "in": of(vocabulary, width), "out": of(width, vocabulary)}


def normalized(x):
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def layer(x, w):
    h = normalized(x)
    heads = lambda y: y.reshape(*y.shape[:-1], -1, HEAD)
    k, v = jnp.split(h @ w["kv"], 2, axis=-1)
    mixed = jax.nn.dot_product_attention(*map(heads, (h @ w["q"], k, v)), is_causal=True)
    x += mixed.reshape(*x.shape[:-1], -1) @ w["o"]
    h = normalized(x)
    return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], None


def operations(run: Run, recomputed: str, whole: bool = False) -> int:
    """Operations of a chip in one step; `whole`: with the masked half of attention."""
    body = jax.checkpoint(layer) if recomputed == "layers" else layer

    def loss_of(params, tokens):
        x, _ = jax.lax.scan(body, params["in"][tokens], params["layers"])
        logits = normalized(x) @ params["out"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    tokens = jax.ShapeDtypeStruct((run.sequences, run.length), jnp.int32)
    traced = jax.jit(jax.grad(loss_of)).trace(parameters(run.model), tokens)
    masked = 6 * run.model.layers * run.model.heads * HEAD * run.length**2
    factor = 4 / 3 if recomputed == "layers" else 1
    return aot.flops(traced) - round((1 - whole) * factor * run.sequences * masked)


def measured(run: Run) -> float:
    """Seconds of a step."""
    if run.teraflops is not None:  # MaxText counted the masked half of attention then
        return operations(run, "nothing", whole=True) / (1e12 * run.teraflops)
    assert run.tokens is not None
    return run.sequences * run.length / run.tokens


def cells_of(run: Run) -> list[str]:
    """A row: where the source does not say what is recomputed, numbers for both."""
    each = (run.recomputed,) if run.recomputed else ("nothing", "layers")
    chip = aot.chip(run.chip)
    seconds = measured(run)
    shares = [operations(run, which) / chip.flops / seconds for which in each]
    between = lambda numbers: " to ".join(f"{x:.2f}" for x in numbers)
    return [
        f"[{run.name}]({run.source})",
        run.recomputed or "not said",
        f"{seconds:.2f}",
        between(share * seconds / chip.efficiency for share in shares),
        between(share / chip.efficiency for share in shares),
        between(shares),
    ]


def print_runs() -> None:
    head("run", "recomputed", "measured, s", "computed, s", "ratio", "efficiency")
    for run in RUNS:
        row(*cells_of(run))


def print_slices() -> None:
    run = RUNS[0]
    chips = 256
    chip = aot.chip(run.chip)
    base = measured(RUNS[0])
    size = 4 * sum(x.size for x in jax.tree.leaves(parameters(run.model))) / chips
    print()
    head("16B on slices of 256 v5e", "measured, %", "computed, %")
    for slices, teraflops in SLICES.items():
        exposed = 2 * (slices - 1) / slices * size / chip.network
        computed = base / (base + exposed) - 1
        row(slices, f"{100 * (teraflops / run.teraflops - 1):.1f}", f"{100 * computed:.1f}")


def main():
    parser(__doc__).parse_args()
    print_runs()
    print_slices()


if __name__ == "__main__":
    main()
