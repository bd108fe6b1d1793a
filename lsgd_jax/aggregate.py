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
    r"""Replaces each worker's gradient by something made of everybody's.

    .. math:: g_i \leftarrow \text{rule}(g_1, \dots, g_W) \quad \text{on the first } until
      \text{ steps}

    It stands first in a chain, before the base optimizer.

    Args:
      rule: (g, own, finite) -> (aggregate, own), for one worker; the one place that
        communicates. g: its gradients; own: its state; finite: bool scalar, whether all
        of g is finite; aggregate: a tree like g, cast to the dtypes of g.
      payload: params -> bytes that each worker hands to the collectives of one exchange.
      axes: the mesh axes of the group.
      init_own: params -> own.
      until: the last step on which to communicate; None: on all.

    Returns:
      A gradient transformation for one worker. Its state is a `PullState` of period 1:
      `count` are the exchanges so far, `healed` how many gradients of this worker were not
      finite, `target` is own.

    >>> import lsgd_jax as lj
    >>> first = lambda g, own, finite: (lj.collectives.take_from(g, 0, "local"), own)
    >>> tx = aggregate(first, payload=lambda params: 4, axes="local")
    >>> workers = lj.Workers(nodes=1, locals=2)
    >>> follow = workers.map(lambda g: tx.update(g, tx.init(g))[0])
    >>> follow(workers.put(jnp.array([1.0, 2.0]))).tolist()
    [1.0, 1.0]
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
