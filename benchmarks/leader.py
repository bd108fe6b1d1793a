"""How much a leader helps, by λ, τ, timing, number of workers and their learning rates.

    python benchmarks/leader.py CIFAR [--seeds 3] [--steps 400]

trains the small network of `python -m train digits` on CIFAR-10 at 8 x 8 pixels by SGD
without momentum. It starts from 4 workers with equal learning rates, a period of 8 steps
and a pull of 0.1 towards the best worker, and changes one setting at a time. Learning rates
that differ are evenly spaced on a logarithmic scale around 0.1. The script prints Markdown
tables of test errors in percent, mean ± sd over the seeds: of the center after a quarter of
the steps and after all steps, of the workers on average, and of the best worker.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import small_networks as small
from usage import head, one_line_errors, parser, row

import lsgd_jax as lj
from train import compare
from train.task.models import DigitsCNN


BATCH, RATE = 32, 0.1
MODEL = DigitsCNN()


@dataclasses.dataclass(frozen=True)
class Setting:
    """The settings of a run, without its seed.

    pull: λ, or the two fractions of the run between which it is 0.1.
    factor: the ratio of the largest learning rate to the smallest.
    """

    method: str = "lsgd"
    workers: int = 4
    period: int = 8
    pull: float | tuple[float, float] = 0.1
    factor: int = 1

    def exchange(self, steps: int) -> optax.GradientTransformationExtraArgs:
        """Returns the exchange after SGD."""
        if self.method == "local-sgd":
            return lj.local_sgd(self.period)
        if isinstance(self.pull, tuple):
            first, last = (round(steps * part) for part in self.pull)
            pull = lambda t: jnp.where((first < t) & (t <= last), 0.1, 0.0)
        else:
            pull = self.pull
        return lj.lsgd(pull, 0.0, local_period=self.period)

    def rates(self) -> np.ndarray:
        """Returns the learning rates [W]."""
        return RATE * float(self.factor) ** np.linspace(-0.5, 0.5, self.workers)


PULLS = (0.0, 0.03, 0.1, 0.5, 1.0)
VARIANTS = {
    "no pull": {"pull": 0.0},
    "lsgd": {},
    "lsgd, λ = 0.5": {"pull": 0.5},
    "local SGD": {"method": "local-sgd"},
}
QUESTIONS = {
    "λ, every 8 steps": {f"{pull:g}": Setting(pull=pull) for pull in PULLS},
    "τ, λ = 0.1": {str(tau): Setting(period=tau) for tau in (2, 8, 32)},
    "when is it pulled": {
        "first half": Setting(pull=(0.0, 0.5)),
        "second half": Setting(pull=(0.5, 1.0)),
        "always": Setting(),
    },
    "workers": {
        f"{count}, {label}": Setting(workers=count, **VARIANTS[label])
        for count in (2, 4, 8)
        for label in ("no pull", "lsgd")
    },
    "largest over least learning rate, 8 workers": {
        f"{factor}, {label}": Setting(workers=8, factor=factor, **method)
        for factor in (1, 16, 256)
        for label, method in VARIANTS.items()
    },
}


def error(params, images, labels) -> jax.Array:
    """Returns the test error of a model, in percent."""
    return small.error(MODEL.apply(params, images, train=False), labels)


def train(
    setting: Setting, data: small.Data, seeds: int, steps: int
) -> list[dict[str, float]]:
    """Returns the errors of each seed: 'early', 'center', 'workers' and 'best'."""
    train_set, test_set = data[:2], data[2:]
    workers = lj.Workers(nodes=1, locals=setting.workers)
    tx = optax.chain(optax.sgd(1.0), setting.exchange(steps))

    def loss_of(params, images, labels, key):
        logits = MODEL.apply(params, images, train=True, rngs={"dropout": key})
        return small.cross_entropy(logits, labels)

    def train_step(params, state, rate, key, data):
        images, labels = data.value
        draw, dropout = jax.random.split(key)
        rows = jax.random.randint(draw, [BATCH], 0, len(labels))
        gradient = lj.unrolled(jax.value_and_grad(loss_of))
        loss, grads = gradient(params, images[rows], labels[rows], dropout)
        grads = jax.tree.map(lambda g: rate * g, grads)
        updates, state = tx.update(grads, state, params, value=loss)
        return lj.apply_updates(params, updates), state

    step = workers.map(train_step, donate=(0, 1))
    test_one = jax.jit(error)
    test_all = jax.jit(jax.vmap(error, in_axes=(0, None, None)))
    test_center = lambda params: float(test_one(lj.consensus(params), *test_set))
    shared = workers.share(train_set)
    rate = workers.put(setting.rates().astype(np.float32))
    found = []
    for seed in range(seeds):
        start, key = jax.random.split(jax.random.key(seed))
        params = MODEL.init(start, train_set[0][:1], train=False)
        params = workers.replicate(params)
        state, seen = workers.map(tx.init)(params), {}
        for t in range(1, steps + 1):
            keys = jax.random.split(jax.random.fold_in(key, t), setting.workers)
            params, state = step(params, state, rate, workers.put(keys), shared)
            if t == steps // 4:
                seen["early"] = test_center(params)
        seen["center"] = test_center(params)
        errors = test_all(params, *test_set)
        seen |= {"workers": float(errors.mean()), "best": float(errors.min())}
        found.append(seen)
    return found


def main() -> None:
    """Runs the benchmark."""
    words = parser(__doc__)
    words.add_argument("data", metavar="CIFAR", help="the folder cifar-10-batches-bin")
    words.add_argument("--seeds", type=int, default=3)
    words.add_argument("--steps", type=int, default=400)
    options = words.parse_args()
    with one_line_errors():
        data = small.cifar10(options.data)
    lj.emulate_devices(2)
    lj.tune_cpu()
    columns = {
        "early": f"center, {options.steps // 4} steps",
        "center": f"center, {options.steps} steps",
        "workers": "mean of the workers",
        "best": "best worker",
    }
    done: dict[Setting, list[dict[str, float]]] = {}
    for question, settings in QUESTIONS.items():
        print()
        head(question, *columns.values())
        for label, setting in settings.items():
            if setting not in done:
                done[setting] = train(setting, data, options.seeds, options.steps)
            each = ([seen[column] for seen in done[setting]] for column in columns)
            row(label, *(compare.spread(values, 1) for values in each))


if __name__ == "__main__":
    main()
