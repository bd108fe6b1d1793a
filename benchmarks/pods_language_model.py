"""Transformers of about 1 and 8 billion parameters on pods: memory, bytes, exposed seconds.

    python benchmarks/pods_language_model.py                       # all, about half an hour
    python benchmarks/pods_language_model.py --size 1B --cluster v5p

Compiles a training step for 2 slices of v5p:4x4x4 and for 4 hosts of 8 H100, in which each
slice or host is one worker, sharded over its devices (fsdp). Needs the extras `tpu` and
`gpu-compile`, and neither TPUs nor GPUs. Seconds are computed from the compiled programs
and public figures of the chips. They are not measured. Prints a Markdown table.
"""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from usage import head, parser, row

import lsgd_jax as lj
from lsgd_jax import aot


VOCABULARY = 32_768
CONTEXT = 2048
HEAD = 128
# Layers, width, and sequences per device.
SIZES = {"1B": (20, 2048, 4), "8B": (40, 4096, 2)}
CLUSTERS = {
    "v5p": lambda: aot.tpu("v5p:4x4x4", slices=2),
    "h100": lambda: aot.gpu("h100", hosts=4, each=8),
}
# The codes and scales of six leaves travel at the same time.
OPTIONS = {"h100": aot.overlap_options(messages=12)}
PERIOD = 64
SLOW = 25e9 / 8  # bytes per second of a host
METHODS = {
    "all-reduce": None,
    "LSGD": lj.lsgd(local_pull=0.0, global_pull=0.1, global_period=PERIOD),
    "DiLoCo": lj.diloco(PERIOD),
    "streaming DiLoCo, int8, delay 1": lj.diloco(
        PERIOD, fragments=4, delay=1, wire="int8", scan_axis={"layers": 0}
    ),
}


def parameters(layers: int, width: int):
    """Zeros; only their shapes matter. Layers are stacked for a scan."""
    shapes = {
        "qkv": (width, 3 * width),
        "out": (width, width),
        "up": (width, 4 * width),
        "down": (4 * width, width),
        "scale": (2, width),
    }
    stacked = {name: jnp.zeros((layers, *shape)) for name, shape in shapes.items()}
    return {"embedding": jnp.zeros((VOCABULARY, width)), "layers": stacked}


def normalized(x, scale):
    x = x.astype(jnp.float32)
    return (x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6) * scale).astype(
        jnp.bfloat16
    )


def gathered(x):
    """A whole weight in bfloat16: fsdp gathers the shards of one layer at a time."""
    return jax.lax.with_sharding_constraint(x.astype(jnp.bfloat16), P())


def layer(x, w):
    """One layer: attention and a network, x is [batch, time, width]."""
    scale = 1 + w["scale"]
    h = normalized(x, scale[0]) @ gathered(w["qkv"])
    q, k, v = (y.reshape(*y.shape[:2], -1, HEAD) for y in jnp.split(h, 3, -1))
    x += jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ gathered(
        w["out"]
    )
    h = jax.nn.gelu(normalized(x, scale[1]) @ gathered(w["up"]))
    return x + h @ gathered(w["down"]), None


def loss_of(params, tokens):
    x = gathered(params["embedding"])[tokens[:, :-1]]
    x = jax.lax.with_sharding_constraint(x, P("fsdp"))
    x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
    logits = normalized(x, 1.0) @ gathered(params["embedding"]).T
    logits = logits.astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def step_of(size: str, method):
    """An init and a step of one worker."""
    layers, width, _ = SIZES[size]
    adam = optax.adamw(1e-4)
    first = () if method else (lj.allreduce(),)
    tx = optax.chain(*first, adam)
    around = lj.outer(method) if method else None

    def init():
        params = parameters(layers, width)
        state = around.init(params) if around else ()
        return params, tx.init(params), state

    def train_step(params, opt_state, state, tokens, phase=None):
        loss, grads = jax.value_and_grad(loss_of)(params, tokens)
        updates, opt_state = tx.update(grads, opt_state, params, value=loss)
        params = optax.apply_updates(params, updates)
        if around:
            params, state = around.step(params, state, loss=loss, phase=phase)
        return params, opt_state, state, loss

    return init, train_step


def phase_of(method):
    """The phase in which the first fragment is sent; all fragments have about one size."""
    if method is None:
        return None
    return [next(phase for phase in method.phases() if phase.sends)]


def compiled(size: str, cluster: str, name: str) -> tuple[aot.Report, float]:
    """The report of the step that sends, and the share of steps that do."""
    pod = CLUSTERS[cluster]()
    method = METHODS[name]
    each = len(pod.devices) // pod.groups
    workers = lj.Workers(mesh=pod.mesh(node=pod.groups, fsdp=each), axes=("node",))
    batch = jax.ShapeDtypeStruct((each * SIZES[size][2], CONTEXT + 1), jnp.int32)
    specs = lj.layouts.largest_dimension("fsdp", each)
    report = aot.report(
        workers,
        *step_of(size, method),
        batch,
        method,
        phases=phase_of(method),
        specs=specs,
        batch_specs=P("fsdp"),
        compiler_options=OPTIONS.get(cluster),
    )
    period = range(PERIOD, 2 * PERIOD)
    share = 1.0 if method is None else sum(bool(method.phase(t).sends) for t in period)
    return report, share if method is None else share / PERIOD


def cells_of(size: str, cluster: str, name: str) -> list[str]:
    report, share = compiled(size, cluster, name)
    (program,) = report.programs
    cells = [size, cluster, name]
    if program.memory is None:
        return [*cells, "does not fit", *"–––––", f"{program.compile_seconds:.0f}"]
    host = program.across * report.pod.per_host
    fast, slow = (x.seconds(program) for x in (report, report.at(SLOW)))
    exposed = lambda x: f"{x.across_exposed:.2f} ({share * x.across_exposed:.3f})"
    return [
        *cells,
        f"{program.memory.peak / 2**30:.1f}",
        f"{host / 1e9:.2f} ({share * host / 1e9:.3f})",
        f"{fast.compute:.2f}",
        f"{fast.inside_exposed:.2f}",
        exposed(slow),
        exposed(fast),
        f"{program.compile_seconds:.0f}",
    ]


HEADER = (
    "parameters",
    "cluster",
    "method",
    "HBM, GiB",
    "GB sent across by a host on a step that sends (mean of all steps)",
    "compute, s",
    "exposed inside, s",
    "exposed across at 25 Gbit/s, s (mean)",
    "at 200 (v5p) or 3,200 (H100) Gbit/s, s (mean)",
    "compile, s",
)


def main():
    words = parser(__doc__)
    words.add_argument("--size", choices=SIZES, action="append")
    words.add_argument("--cluster", choices=CLUSTERS, action="append")
    words.add_argument("--method", choices=METHODS, action="append")
    options = words.parse_args()
    head(*HEADER)
    for cluster in options.cluster or CLUSTERS:
        for size in options.size or SIZES:
            for name in options.method or METHODS:
                row(*cells_of(size, cluster, name))


if __name__ == "__main__":
    main()
