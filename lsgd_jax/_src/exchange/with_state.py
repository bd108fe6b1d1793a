"""with_state: exchange parts of the base optimizer's state with the parameters."""

from typing import Any, NamedTuple

import jax
import optax

from lsgd_jax._src.exchange.exchange import NO_PARAMS
from lsgd_jax._src.trees import Tree, apply_updates


class WithState(NamedTuple):
    """The states of the base optimizer and of the exchange."""

    base: Any
    exchange: Any


def with_state(
    base: optax.GradientTransformation,
    exchange: optax.GradientTransformationExtraArgs,
    *fields: str,
) -> optax.GradientTransformationExtraArgs:
    r"""A base optimizer with an exchange of the parameters and of fields of its state.

    With x the parameters, s the fields, which are trees of floats, and ŝ the fields after
    the base optimizer's step:

    .. math:: (u, \; s') \leftarrow \text{exchange}(x, s; \; u, \; \hat s - s), \qquad
      s \leftarrow s + s'

    so that s is pulled, sent and restored like x, by the same leader or mean. Use it for a
    state that belongs to a point in parameter space and must move with it (z of
    ``optax.contrib.schedule_free``), to average momenta as well ("mu", "trace"), or to
    take over a leader's learning rate (of ``optax.inject_hyperparams``). Otherwise every
    worker keeps its own state.

    Args:
      base: the base optimizer of one worker.
      exchange: any method that pulls, which would otherwise stand last in the chain.
      *fields: the names of the fields in the base's state, as `optax.tree.get` finds them.

    Returns:
      A gradient transformation for one worker, the last in its chain, in place of
      ``optax.chain(base, exchange)``. The fields are sent in addition to the parameters.

    Raises:
      ValueError: no fields; in `init`, a field that the base's state does not have.

    >>> import lsgd_jax as lj, optax
    >>> tx = lj.with_state(optax.sgd(0.1, momentum=0.9), lj.local_sgd(16), "trace")
    """
    if not fields:
        raise ValueError("`fields` must name at least one field of the base's state")
    base = optax.with_extra_args_support(base)

    def taken(state: Any) -> dict[str, Tree]:
        found = {name: optax.tree.get(state, name) for name in fields}
        missing = [name for name, tree in found.items() if tree is None]
        if missing:
            raise ValueError(f"the base's state has no field {missing[0]!r}")
        return found

    def init(params: Tree) -> WithState:
        state = base.init(params)
        return WithState(state, exchange.init((params, taken(state))))

    def update(updates, state, params=None, **extra_args):
        if params is None:
            raise ValueError(NO_PARAMS)
        u, after = base.update(updates, state.base, params, **extra_args)
        before = taken(state.base)
        steps = jax.tree.map(lambda new, old: new - old, taken(after), before)
        grad = extra_args.get("grad")
        if grad is not None:  # the fields have none
            extra_args["grad"] = grad, optax.tree.zeros_like(before)
        # One tree, so that parameters and fields have the same leader or mean.
        moved: Any = exchange.update(
            (u, steps), state.exchange, (params, before), **extra_args
        )
        (u, steps), of_exchange = moved
        # Like the parameters: a field that is not finite is replaced, and nan + u is nan.
        after = optax.tree.set(after, **apply_updates(before, steps))
        return u, WithState(after, of_exchange)

    return optax.GradientTransformationExtraArgs(init, update)
