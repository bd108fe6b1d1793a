"""aggregate: replace each worker's gradient by something made of everybody's."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from lsgd_jax._types import Shared, Tree
from lsgd_jax.collectives import Axes
from lsgd_jax.pull import PullState, all_finite, communicate_if


def aggregate(
    rule: Callable[[Tree, Any, Array], tuple[Tree, Any]],
    payload: Callable[[Tree], int],
    axes: Axes,
    init_own: Callable[[Tree], Any] = lambda params: (),
    until: int | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Replaces gradients by rule(g, own state, finite) -> (aggregate, own state).

    The state is a `PullState`: its `count` are the exchanges so far, and its `healed`
    counts the gradients of this worker that were not finite.
    """

    def init(params: Tree) -> Any:
        return PullState(
            count=Shared(jnp.zeros([], jnp.int32)),
            healed=jnp.zeros([], jnp.int32),
            target=init_own(params),
            axes=axes,
            period=1,
            payload=payload(params),
        )

    def update(updates, state, params=None, **extra_args):
        del params, extra_args
        finite = all_finite(updates)
        count = state.count.value

        def exchange(g, own):
            aggregate, own = rule(g, own, finite)
            cast = jax.tree.map(lambda a, g: a.astype(g.dtype), aggregate, g)
            return cast, own, state.healed + ~finite, optax.safe_increment(count)

        def keep(g, own):
            return g, own, state.healed, count

        due = True if until is None else count < until
        g, own, healed, count = communicate_if(due, exchange, keep, (updates, state.target))
        return g, dataclasses.replace(state, count=Shared(count), healed=healed, target=own)

    return optax.GradientTransformationExtraArgs(init, update)
