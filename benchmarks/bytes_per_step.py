"""Bytes that methods send per step, peak and mean, and bytes that they keep.

    python benchmarks/bytes_per_step.py [--variant "NAME=--method diloco ..."]...

builds the transformer of `python -m train text` on bytes and, for every variant, takes one
step of the optimizer with zero gradients. Nothing is trained. The script prints the
megabytes that a worker sends in the step with the most traffic and per step on average,
over whole periods, and the megabytes of the method's state on its device. Each
`--variant NAME=OPTIONS` adds a row in place of the variants of docs/slow_networks.md;
OPTIONS are options of `python -m train text`.
"""

import math
import shlex
import sys
from typing import Any

import jax
import jax.numpy as jnp
from usage import one_line_errors, parser

import lsgd_jax as lj
from train import cli
from train.config import Config
from train.metrics import tables, traffic
from train.task.experiment import make_optimizer
from train.task.transformer import Transformer


LSGD = "--method lsgd --method.local-period 16"
DILOCO = "--method diloco --method.period 100"
STREAMING = f"{DILOCO} --method.fragments 4 --method.delay 5"
VARIANTS = {
    "allreduce": "--method allreduce",
    "local-sgd": "--method local-sgd --method.period 16",
    "lsgd": LSGD,
    "lsgd-fragments": f"{LSGD} --method.fragments 4",
    "lsgd-delay": f"{LSGD} --method.delay 5",
    "lsgd-int8": f"{LSGD} --method.wire int8",
    "lsgd-int4": f"{LSGD} --method.wire int4",
    "diloco": DILOCO,
    "diloco-int8": f"{DILOCO} --method.wire int8",
    "diloco-int4": f"{DILOCO} --method.wire int4",
    "fragments-diloco": f"{DILOCO} --method.fragments 4",
    "streaming-diloco": STREAMING,
    "streaming-diloco-int8": f"{STREAMING} --method.wire int8",
    "streaming-diloco-int4": f"{STREAMING} --method.wire int4",
}
TEXT = ["text", "--data.tokens", "bytes"]
BYTES = 256  # tokens


def parameters(config: Config) -> Any:
    """Returns the shapes of the network's parameters."""
    model = Transformer(BYTES, config.data.context, **vars(config.transformer))
    tokens = jnp.zeros((1, config.data.context), jnp.int32)
    return jax.eval_shape(model.init, jax.random.key(0), tokens)["params"]


def after_a_step(config: Config) -> Any:
    """Returns the optimizer's state after a step with zero gradients."""
    workers = lj.Workers(config.workers.nodes, config.workers.locals)
    shapes = parameters(config)
    x = workers.replicate(jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes))
    tx, loss = make_optimizer(config), workers.put(jnp.zeros(workers.num_workers))
    step = lambda x, state, loss: tx.update(x, state, x, value=loss)[1]
    return workers.map(step)(x, workers.map(tx.init)(x), loss)


def kept(state: Any) -> int:
    """Returns the bytes of a state on one device, which holds one worker."""
    shards = [x.addressable_shards[0].data for x in jax.tree.leaves(state)]
    return sum(shard.nbytes for shard in shards)


def row(name: str, options: str) -> dict[str, str]:
    """Returns the row of a variant, in MB."""
    config = cli.parse([*TEXT, *shlex.split(options)])
    alone = cli.parse([*TEXT, *without_method(options), "--method", "independent"])
    state = after_a_step(config)
    schedules = traffic.schedules(lj.diagnostics(state))
    period = math.lcm(*(pull.every for pull in schedules))
    always = [pull._replace(exchanges=period) for pull in schedules]
    sent = traffic.per_step(always, period) / 1e6
    more = (kept(state) - kept(after_a_step(alone))) / 1e6
    show = lambda megabytes: f"{megabytes:.4f}"
    return {
        "variant": name,
        "peak, MB in a step": show(sent.max()),
        "mean, MB a step": show(sent.mean()),
        "kept, MB": f"{more:.2f}",
    }


def without_method(options: str) -> list[str]:
    """Returns the options without those of the method. Every option must have a value."""
    words = iter(shlex.split(options))
    pairs = [(word, next(words, "")) for word in words]
    return [x for name, value in pairs if "--method" not in name for x in (name, value)]


def main(arguments: list[str]) -> int:
    """Prints the table."""
    words = parser(__doc__)
    words.add_argument("--variant", action="append", default=[], metavar="NAME=OPTIONS")
    given = [text.partition("=")[::2] for text in words.parse_args(arguments).variant]
    variants = dict(given) or VARIANTS
    with one_line_errors():
        lines = [shlex.split(options) for options in variants.values()]
        configs = [cli.parse([*TEXT, *line]) for line in lines]
    lj.emulate_devices(max(config.workers.devices for config in configs))
    lj.tune_cpu()
    shapes = jax.tree.leaves(parameters(configs[0]))
    print(f"{sum(math.prod(x.shape) for x in shapes):,} parameters, {len(shapes)} leaves\n")
    rows = [row(name, options) for name, options in variants.items()]
    print(tables.markdown(rows), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
