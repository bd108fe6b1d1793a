"""Every worker's own optimizer: its options, and the transformation they stand for."""

import dataclasses
import math
from typing import Any, Literal, get_args

import jax
import numpy as np
import optax


Name = Literal["sgd", "adamw", "lion", "muon", "lars"]
Schedule = Literal["constant", "drops", "cosine"]
NEVER = np.iinfo(np.int32).max

# Which optimizers, or schedules, a field belongs to; the others belong to all of them.
OPTIMIZERS = {
    "momentum": ("sgd", "muon", "lars"),
    "nesterov": ("sgd", "lars"),
    "betas": ("adamw", "lion", "muon"),
    "eps": ("adamw", "muon"),
}
SCHEDULES = {
    "drop_at": ("drops",),
    "drop_factor": ("drops",),
    "final_fraction": ("cosine",),
}

# What the learning rate is if another optimizer is chosen and nothing is said of it: those
# of other optimizers are of another order.
USUAL_RATES = {"sgd": 0.1, "adamw": 1e-3, "lion": 1e-4, "muon": 1e-2, "lars": 10.0}

# The fields that choose, their choices, and what belongs to which of them.
NAMES, SCHEDULE_NAMES = get_args(Name), get_args(Schedule)
TABLES = (OPTIMIZERS, "name"), (SCHEDULES, "schedule")


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Every worker's own optimizer."""

    # The optimizer: muon is for matrices, and adamw for embeddings and whatever else is in
    # the model; lars is for large batches (with --method allreduce).
    name: Name = "sgd"
    # Learning rate, at its highest if there is a schedule.
    learning_rate: float = 0.1
    # Momentum coefficient, in [0, 1): of sgd and lars, by default 0, and of muon, by
    # default 0.95.
    momentum: float | None = None
    # Nesterov's momentum instead of the classical one: sgd and lars. Muon always has it.
    nesterov: bool = False
    # Decay rates of the two moments, in [0, 1): of adamw and of muon's adamw, by default
    # (0.9, 0.999), and of lion, by default (0.9, 0.99).
    betas: tuple[float, float] | None = None
    # What is added to the root of the second moment: adamw, muon.
    eps: float = 1e-8
    # Weight decay: of sgd and lars an L2 penalty, added to the gradient; of adamw, lion and
    # muon decoupled from it, multiplied by the learning rate only.
    weight_decay: float = 0.0
    # What weight decay is for: all parameters, or matrices and convolutions (of muon: what
    # is not adamw's), without biases, the scales of norms and embeddings.
    decay_of: Literal["all", "matrices"] = "all"
    # Gradients of a larger norm, over all parameters of a worker, are scaled down to it.
    clip: float | None = None
    # How the learning rate changes after the warm-up: not at all, by drops at the steps
    # named by --optimizer.drop-at, or along a cosine that ends at the last step.
    schedule: Schedule = "constant"
    # Steps over which the learning rate rises linearly to its full value.
    warmup_steps: int = 0
    # Steps after which the learning rate is multiplied by --optimizer.drop-factor.
    drop_at: tuple[int, ...] = ()
    # What the learning rate is multiplied by at each of --optimizer.drop-at.
    drop_factor: float = 0.1
    # Where the cosine ends, in [0, 1], as a part of the learning rate.
    final_fraction: float = 0.0

    def __post_init__(self):
        for table, owner in TABLES:
            chosen = getattr(self, owner)
            for field, owners in table.items():
                if chosen not in owners and getattr(self, field) != DEFAULTS[field]:
                    self._refuse(field, f"left out with optimizer.{owner}={chosen}")
        self._check(
            "learning_rate", 0 < self.learning_rate < math.inf, "positive and finite"
        )
        if self.momentum is not None:
            self._check("momentum", 0 <= self.momentum < 1, "in [0, 1)")
        if self.betas is not None:
            inside = all(0 <= beta < 1 for beta in self.betas)
            self._check("betas", inside, "in [0, 1)")
        self._check("eps", 0 < self.eps < math.inf, "positive and finite")
        decays = 0 <= self.weight_decay < math.inf
        self._check("weight_decay", decays, "at least 0 and finite")
        if self.clip is not None:
            self._check("clip", 0 < self.clip < math.inf, "positive and finite")
        self._check("warmup_steps", self.warmup_steps >= 0, "at least 0")
        drops = self.drop_at
        ascending = all(before < at for before, at in zip((0, *drops), drops))
        self._check("drop_at", ascending, "positive and ascending")
        self._check("drop_factor", 0 < self.drop_factor < math.inf, "positive and finite")
        self._check("final_fraction", 0 <= self.final_fraction <= 1, "in [0, 1]")

    def _check(self, field: str, holds: bool, rule: str) -> None:
        if not holds:
            self._refuse(field, rule)

    def _refuse(self, field: str, rule: str) -> None:
        name, value = f"optimizer.{field}", getattr(self, field)
        raise ValueError(f"`{name}` must be {rule}, got {name}={value}")


DEFAULTS = {field.name: field.default for field in dataclasses.fields(OptimizerConfig)}


def switched(options: OptimizerConfig, **chosen: Any) -> OptimizerConfig:
    """The options with another optimizer or schedule: what does not apply is left out.

    >>> other = switched(OptimizerConfig(momentum=0.9, clip=1.0), name="adamw")
    >>> other.momentum, other.learning_rate, other.clip
    (None, 0.001, 1.0)
    """
    changed: dict[str, Any] = dataclasses.asdict(options) | chosen
    if changed["name"] != options.name:
        changed["learning_rate"] = USUAL_RATES[changed["name"]]
    for table, owner in TABLES:
        for field, owners in table.items():
            if changed[owner] not in owners:
                changed[field] = DEFAULTS[field]
    return OptimizerConfig(**changed)


def make(
    options: OptimizerConfig, rate: optax.ScalarOrSchedule
) -> optax.GradientTransformation:
    """The optimizer, which skips gradients that are not finite and clips the others.

    Args:
      options: its options.
      rate: its learning rate, as `schedules.learning_rate` makes it.
    """
    parts = [_base(options, rate)]
    if options.clip is not None:
        parts.insert(0, optax.clip_by_global_norm(options.clip))
    # Without it one gradient with a nan would stay in the momentum forever.
    return optax.apply_if_finite(optax.chain(*parts), max_consecutive_errors=NEVER)


def _base(
    options: OptimizerConfig, rate: optax.ScalarOrSchedule
) -> optax.GradientTransformation:
    decay, momentum, nesterov = options.weight_decay, options.momentum, options.nesterov
    mask = matrices if options.decay_of == "matrices" else None
    b1, b2 = options.betas or (0.9, 0.99 if options.name == "lion" else 0.999)
    match options.name:
        case "sgd":
            sgd = optax.sgd(rate, momentum or None, nesterov=nesterov)
            return optax.chain(optax.add_decayed_weights(decay, mask), sgd)
        case "lars":
            return optax.lars(
                rate, decay, mask or True, momentum=momentum or 0.0, nesterov=nesterov
            )
        case "adamw":
            return optax.adamw(rate, b1, b2, options.eps, weight_decay=decay, mask=mask)
        case "lion":
            return optax.lion(rate, b1, b2, weight_decay=decay, mask=mask)
        case "muon":
            return optax.contrib.muon(
                rate,
                beta=0.95 if momentum is None else momentum,
                eps=options.eps,
                weight_decay=decay,
                adam_b1=b1,
                adam_b2=b2,
                adam_weight_decay=0.0 if mask else decay,
                muon_weight_dimension_numbers=_of_muon,
            )


def matrices(params: Any) -> Any:
    """Whether a parameter is a matrix or a convolution: no bias, scale or embedding.

    >>> matrices({"kernel": np.zeros((2, 2)), "bias": np.zeros(2)})
    {'bias': False, 'kernel': True}
    """

    def is_matrix(path: Any, x: Any) -> bool:
        return x.ndim > 1 and "embedding" not in jax.tree_util.keystr(path)

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def _of_muon(params: Any) -> Any:
    """How muon takes each parameter; None: not at all."""
    how = lambda is_matrix, x: (
        optax.contrib.MuonDimensionNumbers() if is_matrix and x.ndim == 2 else None
    )
    return jax.tree.map(how, matrices(params), params)
