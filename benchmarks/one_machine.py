"""Outer optimizers and several workers on one machine, training a language model.

    python benchmarks/one_machine.py --files FILE... [--json FILE]
    python benchmarks/one_machine.py --speed

trains a small transformer (2 layers, width 64, context 64) on the characters of a text, on
one device. All rows train on the same number of tokens: 2,000 steps of 12 windows, 500
steps of 48 windows, or 500 steps of 4 workers with 12 windows each. The learning rate of
each row is searched with the first seed: starting from 0.004 it is doubled and halved until
the rates on both sides of the best are worse. The script prints a Markdown table of the
validation loss of the center, in nats.

`--speed` times steps instead: several workers of one device beside one model of the same
total batch and beside one worker, in turns.
"""

import argparse
import dataclasses
import json
import pathlib
import statistics
import sys
from typing import Any

import gpu_parts
import jax
import jax.numpy as jnp
import optax
from gpu import Network, Sizes
from usage import one_line_errors

import lsgd_jax as lj
from train import cli
from train.config import Config
from train.data import text
from train.task import optimizers, schedules
from train.task.text import TextForward


PERIOD = 20
NETWORK = "--transformer.layers 2 --transformer.width 64 --transformer.heads 4".split()


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table.

    Attributes:
      method: the method around AdamW, or None.
      workers: number of workers.
      batch: windows per worker and step.
    """

    method: Any = None
    workers: int = 1
    batch: int = 12


def alone(rate: float, momentum: float) -> Row:
    """Returns the row of an outer optimizer around one worker, which needs no axes."""
    outer = optax.sgd(rate, momentum, nesterov=momentum > 0)
    return Row(lj.diloco(PERIOD, outer, axes=()))


ROWS = {
    "AdamW": Row(),
    "outer Nesterov SGD, η = 0.7, μ = 0.9": alone(0.7, 0.9),
    "outer Nesterov SGD, η = 0.7, μ = 0.5": alone(0.7, 0.5),
    "outer SGD without momentum, η = 0.7 (Lookahead)": alone(0.7, 0.0),
    "AdamW, batch 48": Row(batch=48),
    "4 workers, lsgd, λ = 0.5": Row(lj.lsgd(0.5, 0.0, PERIOD, PERIOD), 4),
    "4 workers, local_sgd": Row(lj.local_sgd(PERIOD), 4),
    "4 workers, diloco": Row(lj.diloco(PERIOD), 4),
}


def parse(arguments: list[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--files", nargs="+", default=[], help="files of the text")
    parser.add_argument("--steps", type=int, default=2000, help="steps of one worker")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "--rate", type=float, default=0.004, help="first learning rate to try"
    )
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--speed", action="store_true", help="time steps instead")
    parser.add_argument("--json", type=pathlib.Path, help="write all losses to this file")
    return parser.parse_args(arguments)


class Trial:
    """Trains a row, with one compilation for all learning rates and seeds."""

    def __init__(self, row: Row, config: Config, data: text.Text):
        self._workers = lj.Workers(1, row.workers, devices=jax.devices()[:1])
        self._config = dataclasses.replace(config, batch_size=row.batch)
        self.steps = config.steps * config.batch_size // (row.batch * row.workers)
        self._forward = TextForward(self._config, data, self._workers)
        self._outer = lj.outer(row.method) if row.method is not None else None
        self._start = jax.jit(lambda key: self._forward.init(key)["params"])
        self._init = self._workers.map(self._init_of_one)
        self._step = self._workers.map(self._step_of_one, donate=(0, 1, 2))
        self._sums = self._workers.map(self._sums_of_one)

    def loss(self, rate: float, seed: int) -> float:
        """Trains and returns the validation loss of the center."""
        start, draws = jax.random.split(jax.random.key(seed))
        workers, forward = self._workers, self._forward
        params = workers.replicate(self._start(start))
        keys = workers.put(jax.random.split(draws, workers.num_workers))
        state, outer = self._init(params)
        peak = workers.share(jnp.float32(rate))
        for step in range(self.steps):
            t = workers.share(jnp.int32(step))
            params, state, outer = self._step(
                params, state, outer, forward.source.data, keys, t, peak
            )
        center = workers.share(lj.center(params, outer))
        batches = forward.source.test_batches
        sums = [workers.fetch(self._sums(center, *batch)) for batch in batches]
        return forward.result([sum(x.sum() for x in each) for each in zip(*sums)])["loss"]

    def _optimizer(self, peak: Any) -> optax.GradientTransformation:
        options = dataclasses.replace(
            self._config.optimizer, learning_rate=1.0, warmup_steps=self.steps // 20
        )
        shape = schedules.learning_rate(options, self.steps)
        return optimizers.make(options, lambda count: peak * shape(count))

    def _init_of_one(self, params: Any) -> tuple[Any, Any]:
        outer = self._outer.init(params) if self._outer else ()
        return self._optimizer(1.0).init(params), outer

    def _step_of_one(self, params, state, outer, data, key, t, peak) -> Any:
        key = jax.random.fold_in(key, t.value)
        loss_of = lambda params: self._forward.loss(params, {}, data, (), key)[0]
        loss, grads = jax.value_and_grad(loss_of)(params)
        updates, state = self._optimizer(peak.value).update(grads, state, params)
        params = optax.apply_updates(params, updates)
        if self._outer:
            params, outer = self._outer.step(params, outer, loss=loss)
        return params, state, outer

    def _sums_of_one(self, center, *batch) -> Any:
        return self._forward.sums({"params": center.value}, *batch)


def table(options: argparse.Namespace) -> None:
    """Trains all rows and prints the table."""
    words = [*NETWORK, "--steps", str(options.steps), "--data.files", *options.files]
    with one_line_errors():
        config = cli.parse(["text", *words])
        data = text.load(options.files, config.data.tokens)
    found = {}
    print(f"| method | workers × batch | steps | loss by rate | {options.seeds} seeds |")
    print("| --- | --- | --- | --- | --- |")
    for name in options.only:
        row = ROWS[name]
        trial = Trial(row, config, data)
        tried, best = searched(trial, options.rate)
        seeds = [tried[best], *(trial.loss(best, i) for i in range(1, options.seeds))]
        found[name] = {"tried": tried, "best": best, "seeds": seeds}
        cells = [name, f"{row.workers} × {row.batch}", f"{trial.steps:,}"]
        cells.append(", ".join(f"{rate:g}: {tried[rate]:.3f}" for rate in sorted(tried)))
        spread = f" ± {statistics.stdev(seeds):.3f}" if len(seeds) > 1 else ""
        cells.append(f"{statistics.mean(seeds):.3f}{spread}")
        print("| " + " | ".join(cells) + " |", flush=True)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))


def searched(trial: Trial, first: float) -> tuple[dict[float, float], float]:
    """Searches for the best rate; returns the losses of all rates tried, and the rate."""
    tried = {first: trial.loss(first, 0)}
    while True:
        best = min(tried, key=tried.__getitem__)
        untried = [rate for rate in (best / 2, best * 2) if rate not in tried]
        if not untried:
            return tried, best
        tried |= {rate: trial.loss(rate, 0) for rate in untried}


def speed() -> None:
    """Times workers of one device, for a tiny network and for the network of the table."""
    networks = (
        Network(1, 2, 16, 16, 65, "float32", batch=4),
        Network(2, 4, 64, 64, 65, "float32", batch=12),
    )
    sizes = Sizes(networks=networks, block_s=0.5)
    print("| measured | | beside | | ratio |\n| --- | --- | --- | --- | --- |")
    for row in gpu_parts.workers(None, sizes):
        print("| " + " | ".join(row) + " |", flush=True)


def main(arguments: list[str]) -> int:
    """Runs the benchmark."""
    options = parse(arguments)
    lj.tune_cpu()
    speed() if options.speed else table(options)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
