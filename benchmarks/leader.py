"""How much a leader helps, by λ, τ, timing, number of workers and their learning rates.

    python benchmarks/leader.py CIFAR [--seeds 3] [--steps 400]

trains the small network of `python -m train digits` on CIFAR-10 at 8 x 8 pixels by SGD
without momentum. It starts from 4 workers with equal learning rates, a period of 8 steps
and a pull of 0.1 towards the best worker, and changes one setting at a time. Learning rates
that differ are evenly spaced on a logarithmic scale around 0.1. The script prints Markdown
tables of test errors in percent, mean ± sd over the seeds: of the center after a quarter of
the steps and after all steps, of the workers on average, and of the best worker.
"""

import functools
import statistics
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
import small_networks as small
from usage import head, one_line_errors, parser, row

import lsgd_jax as lj
from train.compare import spread
from train.task.models import DigitsCNN


class Case(NamedTuple):
    """A run without its seed.

    Attributes:
      workers: W.
      period: steps between two pulls.
      pull: λ, None for local SGD.
      between: the fractions of the run between which workers are pulled.
      factor: the ratio of the largest learning rate to the smallest.
    """

    workers: int = 4
    period: int = 8
    pull: float | None = 0.1
    between: tuple[float, float] = (0.0, 1.0)
    factor: int = 1

    def exchange(self, steps: int) -> lj.Exchange:
        """Returns the exchange after SGD."""
        if self.pull is None:
            return lj.local_sgd(self.period)
        first, last = (round(steps * part) for part in self.between)
        pull = lambda t: jnp.where((first < t) & (t <= last), self.pull, 0.0)
        return lj.lsgd(pull, 0.0, local_period=self.period)

    def setting(self, task: small.Task) -> small.Setting:
        """Returns the workers, which differ in their rates alone."""
        rates = task.rate * float(self.factor) ** np.linspace(-0.5, 0.5, self.workers)
        equal = small.equal_workers(task, self.workers)
        return equal._replace(rate=np.float32(rates))


PULLS = {"no pull": 0.0, "lsgd": 0.1, "lsgd, λ = 0.5": 0.5, "local SGD": None}
QUESTIONS = {
    "λ, every 8 steps": {f"{x:g}": Case(pull=x) for x in (0.0, 0.03, 0.1, 0.5, 1.0)},
    "τ, λ = 0.1": {str(tau): Case(period=tau) for tau in (2, 8, 32)},
    "when is it pulled": {
        "first half": Case(between=(0.0, 0.5)),
        "second half": Case(between=(0.5, 1.0)),
        "always": Case(),
    },
    "workers": {
        f"{count}, {name}": Case(workers=count, pull=PULLS[name])
        for count in (2, 4, 8)
        for name in ("no pull", "lsgd")
    },
    "largest over least learning rate, 8 workers": {
        f"{factor}, {name}": Case(workers=8, factor=factor, pull=pull)
        for factor in (1, 16, 256)
        for name, pull in PULLS.items()
    },
}


def task_of(data: small.Data) -> small.Task:
    """Returns the classification of 8 x 8 images by the network of the digits."""
    model = DigitsCNN()

    def logits(params, images, key):
        is_training = key is not None
        dropout = {"dropout": key} if is_training else None
        return model.apply(params, images, train=is_training, rngs=dropout)

    start = lambda key: model.init(key, data[0][:1], train=False)
    return small.Task(*data, 10, 0.1, "error in percent", start, logits)


def errors(
    case: Case, task: small.Task, seeds: int, steps: int
) -> list[tuple[float, float, float, float]]:
    """Returns each seed's errors: the early center, the center, the workers, the best."""
    tx, test = optax.chain(small.SGD, case.exchange(steps)), task.tester()
    train, found = small.trainer(task, tx, steps, case.workers), []
    for seed in range(seeds):
        early, last = train(case.setting(task), seed, tested=(steps // 4, steps))
        each = [test(params) for params in last.params]
        centers = test(early.center), test(last.center)
        found.append((*centers, statistics.fmean(each), min(each)))
    return found


def main() -> None:
    """Runs the benchmark."""
    words = parser(__doc__)
    words.add_argument("data", metavar="CIFAR", help="the folder cifar-10-batches-bin")
    words.add_argument("--seeds", type=int, default=3)
    words.add_argument("--steps", type=int, default=400)
    options = words.parse_args()
    lj.tune_cpu()
    with one_line_errors():
        task = task_of(small.cifar10(options.data))
    centers = (f"center, {steps} steps" for steps in (options.steps // 4, options.steps))
    columns = *centers, "mean of the workers", "best worker"
    once = functools.cache(lambda case: errors(case, task, options.seeds, options.steps))
    for question, cases in QUESTIONS.items():
        print()
        head(question, *columns)
        for label, case in cases.items():
            row(label, *(spread(values, 1) for values in zip(*once(case))))


if __name__ == "__main__":
    main()
