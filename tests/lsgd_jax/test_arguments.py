"""Invalid arguments: every public factory that takes an argument refuses them by name."""

import inspect

import pytest
from harness import FACTORIES, needed

import lsgd_jax as lj
from lsgd_jax.asynchronous import (
    ADPSGD,
    LSGD,
    OSGP,
    WAGMA,
    DecoupledDiLoCo,
    DiLoCo,
    Pairwise,
)


INF, NAN = float("inf"), float("nan")
COUNT, FRACTION, NUMBER = "a positive int", r"in \[0, 1\]", "at least 0 and finite"
COUNTS = (
    "period local_period global_period sync_period batches_per_epoch loss_window window "
    "keep until restart staleness iterations every fragments chunk "
    "momentum_every local_steps quorum"
)
FRACTIONS = (
    "local_pull global_pull local_proximal global_proximal pull strength mixing beta decay "
    "value fetch_probability send_probability noloco.alpha momentum"
)
NUMBERS = (
    "alpha slowmo.learning_rate parle.learning_rate sparse_diloco.learning_rate "
    "palsgd.learning_rate palsgd.pull outer_learning_rate anchor_pull center_pull "
    "divergence_threshold gamma power initial largest noloco.beta deviations "
    "DiLoCo.learning_rate "
    "DecoupledDiLoCo.learning_rate"
)
# For each argument, of every factory or of a single one, invalid values and what the
# message says after "must be".
INVALID = {
    **dict.fromkeys(COUNTS.split(), ([0, 2.5, True], COUNT)),
    **dict.fromkeys(FRACTIONS.split(), ([-0.1, 1.5, NAN], FRACTION)),
    **dict.fromkeys(NUMBERS.split(), ([-1, INF, NAN], NUMBER)),
    "grawa.decay": ([1, NAN], "(less than 1|in )"),
    "cge.decay": ([1, NAN], "(less than 1|in )"),
    "faulty": ([-1], COUNT),
    "cut": ([-1, True], COUNT),
    "offset": ([-1, 1], r"an int in \[0, 1\)"),
    "delay": ([-1, 10**9], r"an int in \[0, "),
    "after": ([-1, 0.5, True], "an int of at least 0"),
    "probability": ([-0.1, 1.0, NAN], r"in \[0, 1\)"),
    "warmup": ([1], "at least 2"),
    "group_size": ([1, 3], "a power of two"),
    "bits": ([9], "at most 8, got bits=9"),
    "density": ([0.0], "above 0"),
    "temperature": ([0, None], "positive"),
    "threshold": ([-1], "positive"),
    "clip": ([0], "positive"),
    "weights": ([(0, 0), (1, -1)], "finite numbers"),
    "DiLoCo.weights": (["none"], "one of"),
    "DiLoCo.delay": ([-1], NUMBER),
    "tokens": ([(1.0, -1.0)], NUMBER),
    "DecoupledDiLoCo.local_steps": ([0, 5], "(a positive int|divisible by)"),
    "guard": ([True], "a Guard or None"),
    "outer": ([0.7], "an optax .*got outer=0.7"),
    "part": (["head", [], 0.5], "a function"),
    "wire": (["int9", "int8-up"], "one of .*'int4', .*, got wire='int"),
    "merge": (["rda"], "one of 'mean', 'radial'"),
    "aggregate": (["sum"], "one of 'mean', 'senders'"),
    "memory": (["disk"], "one of 'device', 'host'"),
    "order": (["both"], "one of 'adapt_then_combine', 'combine_then_adapt'"),
    "interpolation": (["nearest"], "one of"),
    "check": (["never"], "one of"),
}
FACTORIES = [
    *FACTORIES,
    *(
        lj.allreduce,
        lj.robust.cge,
        lj.robust.geometric_median,
        lj.robust.krum,
        lj.robust.licm,
        lj.robust.trimmed_mean,
    ),
    *(lj.Guard, lj.Pull, lj.TopK, lj.rules.leader, lj.scoping),
    *(ADPSGD, LSGD, OSGP, WAGMA, DecoupledDiLoCo, DiLoCo, Pairwise),
]


def rows():
    for factory in FACTORIES:
        for name in inspect.signature(factory).parameters:
            full = f"{factory.__name__}.{name}"
            if values_and_rule := INVALID.get(full, INVALID.get(name)):
                yield pytest.param(factory, name, *values_and_rule, id=full)


@pytest.mark.parametrize("factory, name, values, rule", list(rows()))
def test_an_invalid_argument_is_refused_by_name(factory, name, values, rule):
    for value in values:
        with pytest.raises(ValueError, match=f"`{name}` must be {rule}"):
            factory(**{**needed(factory), name: value})
