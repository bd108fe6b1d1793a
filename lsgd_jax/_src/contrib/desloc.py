"""DES-LOC: parameters and the moments of the base optimizer, each with its own period."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Unpack

import jax
import optax

from lsgd_jax._src.checks import check_positive_int
from lsgd_jax._src.exchange.exchange import NO_PARAMS, exchange
from lsgd_jax._src.exchange.kernel import Pull
from lsgd_jax._src.exchange.options import PullOptions, takes_options
from lsgd_jax._src.exchange.parts import Fragment, runs_of
from lsgd_jax._src.exchange.with_state import with_state
from lsgd_jax._src.methods.averaging import average
from lsgd_jax._src.shared import Axes


# Fields of optax's states, and how many periods of the parameters theirs are long.
MOMENTS = {"mu": 3, "trace": 3, "nu": 6}


@takes_options(
    fragments="moments are exchanged at periods of their own",
    scan_axis="it cuts no leaves",
    delay="a moment must not land on the parameters of another step",
    late="it has no delay",
)
def desloc(
    base: optax.GradientTransformation,
    period: int = 32,
    moments: Mapping[str, int] | None = None,
    axes: Axes = ("node", "local"),
    **options: Unpack[PullOptions],
) -> optax.GradientTransformationExtraArgs:
    r"""DES-LOC: local Adam whose parameters and moments are averaged at different periods.

    After the base optimizer's step t = 1, 2, …, with y = x + u the worker's parameters and
    m, v the moments in its state:

    .. math::
      y_i &\leftarrow \frac{1}{|H|} \sum_{j \in H} y_j && \text{if } t \bmod K_x = 0 \\
      m_i &\leftarrow \frac{1}{|H|} \sum_{j \in H} m_j && \text{if } t \bmod K_m = 0 \\
      v_i &\leftarrow \frac{1}{|H|} \sum_{j \in H} v_j && \text{if } t \bmod K_v = 0

    H are the workers whose loss, y, m and v are finite; a worker outside of H takes each
    mean when it is due, and moves again once y, m and v are all finite. The counts of bias
    corrections stay local. With K_m = 3 K_x and K_v = 6 K_x a step costs half the bytes of
    local Adam with one period for all. Equal periods are that method.

    The `wire` is that of the parameters. Moments travel as they are, since a second moment
    must not be rounded below 0. A `part` is exchanged with its moments.

    Args:
      base: the base optimizer of one worker, such as ``optax.adamw(1e-3)``.
      period: steps between means of the parameters, K_x.
      moments: the period of each field of the base's state that is averaged, by its name,
        such as ``{"mu": 96, "nu": 192}``; None: 3 periods of the parameters for a first
        moment ('mu' of Adam, 'trace' of SGD with momentum) and 6 for a second ('nu').
      axes: the mesh axes of the group.
      **options: see `PullOptions`.

    Returns:
      An optax transformation for one worker, the last in its chain, which contains the base
      optimizer.

    Raises:
      ValueError: a period below 1, a `fragment` that cuts leaves; in `init`, a field that
        the base's state does not have, or none that it has by default.

    Reference: Iacob et al., DES-LOC: Desynced Low Communication Adaptive Optimizers for
    Training Foundation Models, 2025, arXiv:2505.22549. The periods are those of a write-up.

    >>> import optax, lsgd_jax as lj
    >>> tx = lj.contrib.desloc(optax.adam(1e-3), period=32, moments={"mu": 96, "nu": 192})
    """
    check_positive_int("period", period)
    for name, steps in (moments or {}).items():
        check_positive_int(f"moments[{name!r}]", steps)
    wire = options.pop("wire", "float32")
    part = options.pop("part", None)
    if isinstance(part, Fragment) and part.scan_axis is not None:
        raise ValueError(f"`part` must not cut leaves for `desloc`, got {part=}")
    of_all = Pull(average(axes), 1.0, every=period, part=part, wire=wire)
    base = optax.with_extra_args_support(base)

    def around(params: Any, state: Any) -> optax.GradientTransformationExtraArgs:
        """The exchange, with the base optimizer that has this state."""
        periods = moments
        if periods is None:
            present = (name for name in MOMENTS if optax.tree.get(state, name) is not None)
            periods = {name: MOMENTS[name] * period for name in present}
            if not periods:
                raise ValueError(
                    "`moments` must name the fields of the base's state to average: it has "
                    f"none of {', '.join(map(repr, MOMENTS))}; parameters alone are "
                    "averaged by `local_sgd`"
                )
        taken = jax.tree.unflatten(jax.tree.structure(params), runs_of(part, params))
        others = dict.fromkeys(periods, False)
        # `with_state` exchanges the tree (parameters, {field: tree}).
        pulls = [dataclasses.replace(of_all, part=(taken, others))] + [
            Pull(of_all.rule, 1.0, every=steps, part=(False, others | {name: taken}))
            for name, steps in periods.items()
        ]
        return with_state(base, exchange(*pulls, **options), *periods)

    def init(params: Any) -> Any:
        return around(params, jax.eval_shape(base.init, params)).init(params)

    def update(updates, state, params=None, **extra_args):
        if params is None:
            raise ValueError(NO_PARAMS)
        return around(params, state.base).update(updates, state, params, **extra_args)

    return optax.GradientTransformationExtraArgs(init, update)
