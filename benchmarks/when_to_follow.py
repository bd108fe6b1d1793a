"""Where a leader pays: methods among workers that are not alike.

    python benchmarks/when_to_follow.py [--task digits] [--seeds 3] [--steps 800]
    python benchmarks/when_to_follow.py --task cifar10 --cifar CIFAR
    python benchmarks/when_to_follow.py --task text --files FILE
    python benchmarks/when_to_follow.py --task cnn7 --cifar CIFAR --steps 240
    python benchmarks/when_to_follow.py --methods population --scenarios "learning rates"

trains with 8 workers by SGD without momentum: a network of two layers on scikit-learn's
digits, on CIFAR-10 at 8 x 8 pixels, or on the next character of a text after 16 others
(without files, of Python's library); or CNN7 on crops of CIFAR-10. Methods with a period
exchange every 8 steps. In each scenario the workers differ in one way:

- equal workers: they do not differ.
- learning rates: from 1/16 of the usual one to 16 times as much, evenly spaced on a
  logarithmic scale.
- corrupted labels: the labels of 5 workers are random.
- flipped bits: in 2 % of the steps of one worker a bit in the exponent of one number of the
  gradient is wrong.
- data apart: every worker has an eighth of the training data, images sorted by their class
  and text by its position.
- adversary: one worker reports a loss of 0, for itself and for the peer that it judges, and
  each of its steps ends at a random network.

In a population, rates travel: a worker takes the target's learning rate together with its
parameters. Where rates also vary, a worker that has taken a target multiplies the rate by
0.8 or by 1.25 at random. With a leader this is population based training (PBT) in which
all follow the best (Jaderberg et al., arXiv:1711.09846). These four methods run only if
`--methods` names them, or the word population.

Targets of a pull are taken whole (λ = 1) unless a method's name says otherwise. The script
prints a Markdown table of the center's test error in percent, of text the nats per
character, mean ± sd over the seeds. The steps end with an exchange. `--json` also writes
the numbers of each seed, with those of the best worker and the learning rates at the end,
and `--figure` draws the table.
A task takes about ten minutes on two cores; CNN7 takes 20 s per run.
"""

import argparse
import json
import math
import pathlib
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import small_networks as small
from small_networks import SGD, Setting, Task, logits_of
from usage import one_line_errors, parser

import lsgd_jax as lj
from train.compare import spread
from train.data import cifar10, text
from train.metrics import tables
from train.task.models import CNN7


WORKERS, WIDTH, PERIOD = 8, 64, 8
CONTEXT, EMBEDDING, TESTED = 16, 8, 20_000  # of text
CROP, TESTED_IMAGES = slice(2, 30), 2_500  # of CNN7


def pulled_to(rule: lj.Rule) -> lj.Exchange:
    """Returns the exchange whose workers take the target of a rule whole."""
    return lj.exchange(lj.Pull(rule, 1.0, every=PERIOD))


def leader(pull: float, judged_by: Any = "own") -> lj.Exchange:
    """Returns LSGD with one level."""
    return lj.lsgd(pull, 0.0, PERIOD, judged_by=judged_by)


def varied(exchange: lj.Exchange) -> optax.GradientTransformationExtraArgs:
    r"""Varies the learning rate of each worker that an exchange has moved.

    .. math:: \eta \leftarrow c \, \eta, \quad c = 0.8 \text{ or } 1.25

    with η the rate after the exchange and c drawn by each worker with equal probability.
    """

    def init(params: Any) -> Any:
        return exchange.init(params), jax.random.key(jax.lax.axis_index("local"))

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        key, draw = jax.random.split(state[1])
        after, inner = exchange.update(updates, state[0], params, **extra_args)
        # An exchange leaves the update of its leader bit-identical.
        unlike = jax.tree.map(lambda a, b: (a != b).any(), after, updates)
        factor = jnp.where(jax.random.bernoulli(draw), 1.25, 0.8)
        before = optax.tree.get(params, "learning_rate")
        rate = before + optax.tree.get(after, "learning_rate")
        rate *= jnp.where(jnp.any(jnp.array(jax.tree.leaves(unlike))), factor, 1.0)
        return optax.tree.set(after, learning_rate=rate - before), (inner, key)

    return optax.GradientTransformationExtraArgs(init, update)


def rates_travel(
    exchange: optax.GradientTransformationExtraArgs,
) -> optax.GradientTransformation:
    """Returns SGD whose learning rate is exchanged with the parameters."""
    return lj.with_state(SGD, exchange, "learning_rate")


def best(keep: int, judged_by: str = "own") -> lj.Rule:
    """Returns the rule of the mean of the best workers."""
    return lj.leader(("node", "local"), judged_by=judged_by, keep=keep)


def default_methods(steps: int) -> dict[str, optax.GradientTransformation]:
    """Returns the methods that run by default, for so many steps."""
    guard = lj.Guard(warmup=max(2, steps // PERIOD // 5), decay=0.1)
    return {
        name: optax.chain(SGD, exchange)
        for name, exchange in {
            "all-reduce": lj.allreduce(),
            "all-reduce, coordinate median": lj.coordinate_median(),
            "mean (local SGD)": lj.local_sgd(PERIOD),
            "mean (DiLoCo)": lj.diloco(PERIOD),
            "mean (DiLoCo with EDiT's guard)": lj.diloco(PERIOD, guard=guard),
            "weighted mean (GRAWA)": lj.contrib.grawa(1.0, PERIOD),
            "trimmed mean, 2 of 8": pulled_to(lj.robust_mean("trimmed_mean", cut=2)),
            "Krum, 2 faulty": pulled_to(lj.robust_mean("krum", faulty=2)),
            "best 2": pulled_to(best(2)),
            "best 2, judged by peers": pulled_to(best(2, judged_by="peers")),
            "leader": leader(1.0),
            "leader, judged by peers": leader(1.0, "peers"),
            "leader, λ = 0.1": leader(0.1),
            "leader, λ = 0.1, judged by peers": leader(0.1, "peers"),
            "center (EASGD)": lj.easgd(period=PERIOD),
        }.items()
    }


POPULATION = {
    "leader, rates travel": rates_travel(leader(1.0)),
    "leader, rates travel and vary (PBT)": rates_travel(varied(leader(1.0))),
    "best 2, rates travel": rates_travel(pulled_to(best(2))),
    "best 2, rates travel and vary": rates_travel(varied(pulled_to(best(2)))),
}


# Tasks


def text_task(files: Sequence[str]) -> Task:
    """Returns the prediction of a text's next character."""
    data = text.load(files, "characters")

    def windows(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        view = np.lib.stride_tricks.sliding_window_view(ids, CONTEXT + 1)
        return view[:, :-1].copy(), view[:, -1].astype(np.int32)

    given, tested = windows(data.train), windows(data.test[:TESTED])
    classes = len(data.vocabulary)
    sizes = CONTEXT * EMBEDDING, WIDTH, classes

    def start(key: jax.Array) -> Any:
        embedding = jax.random.normal(jax.random.split(key, 3)[2], (classes, EMBEDDING))
        return {"embedding": embedding, "layers": small.start(key, sizes)}

    def logits(params: Any, ids: jax.Array, key: None) -> jax.Array:
        features = params["embedding"][ids].reshape(len(ids), -1)
        return logits_of(params["layers"], features)

    return Task(*given, *tested, classes, 0.5, "loss in nats", start, logits)


def cnn7_task(folder: str) -> Task:
    """Returns CIFAR-10's central crops of 28 x 28 pixels, for CNN7."""
    data, model = cifar10.load(folder, accept_other_files=True), CNN7()
    crop = lambda x: x[:, CROP, CROP]
    given = crop(data.train.images), data.train.labels.astype(np.int32)
    tested = crop(data.test.images), data.test.labels.astype(np.int32)

    def logits(params: Any, inputs: jax.Array, key: None) -> jax.Array:
        outputs: Any = model.apply({"params": params}, inputs / 127.5 - 1, train=False)
        return outputs

    start = lambda key: model.init(key, given[0][:1] / 127.5 - 1, train=False)["params"]
    tested = (x[:TESTED_IMAGES] for x in tested)
    return Task(*given, *tested, 10, 0.05, "error in percent", start, logits, batch=16)


# Scenarios


def equal_workers(task: Task, seed: int) -> Setting:
    """Returns workers that do not differ."""
    return small.equal_workers(task, WORKERS)


def learning_rates(task: Task, seed: int) -> Setting:
    """Returns workers whose learning rates are 1/16 to 16 times the usual one."""
    rate = np.float32(task.rate * 16 ** np.linspace(-1, 1, WORKERS))
    return equal_workers(task, seed)._replace(rate=rate)


def corrupted_labels(task: Task, seed: int) -> Setting:
    """Returns workers of which the first five have random labels."""
    setting, draw = equal_workers(task, seed), np.random.default_rng(seed)
    setting.labels[:5] = draw.integers(task.classes, size=(5, len(task.labels)))
    return setting


def flipped_bits(task: Task, seed: int) -> Setting:
    """Returns workers of which the first sometimes computes a wrong gradient."""
    setting = equal_workers(task, seed)
    setting.faults[0] = 0.02
    return setting


def data_apart(task: Task, seed: int) -> Setting:
    """Returns workers that have one or two classes each, or a part of the text."""
    is_text, count = task.unit == "loss in nats", len(task.labels)
    order = np.arange(count) if is_text else np.argsort(task.labels, kind="stable")
    parts = np.array_split(order, WORKERS)
    rows = np.stack([np.resize(part, count) for part in parts]).astype(np.int32)
    return equal_workers(task, seed)._replace(rows=rows)


def adversary(task: Task, seed: int) -> Setting:
    """Returns workers of which the first lies; a rate of 1 makes its step a whole one."""
    setting = equal_workers(task, seed)
    setting.lies[0], setting.rate[0] = True, 1.0
    return setting


SCENARIOS: dict[str, Callable[[Task, int], Setting]] = {
    f.__name__.replace("_", " "): f
    for f in (
        equal_workers,
        learning_rates,
        corrupted_labels,
        flipped_bits,
        data_apart,
        adversary,
    )
}


# Results

# 'center', 'best worker' and the last 'rates' by method, scenario and seed.
Results = dict[str, dict[str, list[dict[str, Any]]]]


def measure(task: Task, options: argparse.Namespace) -> Results:
    """Returns the test results of the center and of the best worker, and the last rates."""
    test = task.tester()
    made = default_methods(options.steps) | POPULATION

    def prepare(method: str) -> Callable[[str, int], dict[str, Any]]:
        train = small.trainer(task, made[method], options.steps, WORKERS)

        def run(scenario: str, seed: int) -> dict[str, Any]:
            (found,) = train(SCENARIOS[scenario](task, seed), seed)
            center, best = test(found.center), min(map(test, found.params))
            return {"center": center, "best worker": best, "rates": found.rates.tolist()}

        return run

    return small.sweep(options, prepare, lambda runs: cell_of(task, runs))


def cell_of(task: Task, runs: list[dict[str, Any]]) -> str:
    """Returns the mean ± sd of the centers."""
    return spread([run["center"] for run in runs], digits_of(task))


def digits_of(task: Task) -> int:
    """The number of decimals of a result."""
    return 2 if task.unit == "loss in nats" else 1


def draw(task: Task, results: Results, path: pathlib.Path) -> None:
    """Draws the table of centers, dark where a method loses most of what can be learned."""
    from matplotlib import colors
    from matplotlib import pyplot as plt

    methods, scenarios = list(results), list(next(iter(results.values())))
    mean = lambda runs: statistics.fmean(run["center"] for run in runs)
    table = np.array([[mean(results[m][s]) for s in scenarios] for m in methods])
    chance = (
        math.log(task.classes) if task.unit == "loss in nats" else 100 - 100 / task.classes
    )
    best = table.min(axis=0)
    lost = np.clip((table - best) / (chance - best), 0, 1)
    figure, axes = plt.subplots(
        figsize=(9, 0.36 * len(methods) + 1.6), layout="constrained"
    )
    norm = colors.PowerNorm(0.5, 0, 1)
    shown = axes.imshow(lost, cmap="YlOrRd", norm=norm, aspect="auto")
    for (i, j), value in np.ndenumerate(table):
        label = f"{value:.{digits_of(task)}f}" if math.isfinite(value) else "diverged"
        weight = "bold" if lost[i, j] < 0.01 else "normal"
        color = "white" if lost[i, j] > 0.5 else "black"
        axes.text(j, i, label, ha="center", va="center", weight=weight, color=color)
    names = [name.replace(" ", "\n") for name in scenarios]
    axes.set_xticks(range(len(scenarios)), names)
    axes.set_yticks(range(len(methods)), methods)
    axes.tick_params(length=0)
    axes.xaxis.tick_top()
    bar = figure.colorbar(shown, ticks=[0, 0.05, 0.2, 0.5, 1], pad=0.01)
    bar.set_label("lost, from the best method to chance")
    axes.set_title(f"the center's test {task.unit}", fontsize=10)
    figure.savefig(path, dpi=120)


def main(arguments: list[str]) -> int:
    """Runs the benchmark."""
    words = parser(__doc__)
    tasks = {
        "digits": lambda: small.images(small.digits(), WIDTH),
        "cifar10": lambda: small.images(small.cifar10(options.cifar), WIDTH),
        "text": lambda: text_task(options.files),
        "cnn7": lambda: cnn7_task(options.cifar),
    }
    words.add_argument("--task", choices=tasks, default="digits")
    words.add_argument("--cifar", help="the folder that holds cifar-10-batches-bin")
    words.add_argument("--files", nargs="+", default=[], help="the files of the text")
    words.add_argument("--steps", type=int, default=800, help="steps of every worker")
    more = [*POPULATION, "population"]
    small.add_choices(words, default_methods(steps=0), SCENARIOS, more)
    words.add_argument("--figure", type=pathlib.Path)
    words.add_argument("--json", type=pathlib.Path)
    options = words.parse_args(arguments)
    options.methods = [
        name
        for given in options.methods
        for name in (POPULATION if given == "population" else [given])
    ]
    if options.task in ("cifar10", "cnn7") and options.cifar is None:
        words.error(f"--task {options.task} needs --cifar, the folder of the images")
    lj.tune_cpu()
    with one_line_errors():
        task = tasks[options.task]()
    results = measure(task, options)
    rows = [
        {"method": method, **{name: cell_of(task, runs) for name, runs in row.items()}}
        for method, row in results.items()
    ]
    print(tables.markdown(rows), end="")
    if options.json:
        # JSON has no infinity.
        numbers = json.dumps(results, indent=1).replace("Infinity", "null")
        options.json.write_text(numbers + "\n")
    if options.figure:
        draw(task, results, options.figure)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
