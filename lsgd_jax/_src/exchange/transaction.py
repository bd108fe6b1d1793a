"""An exchange as a transaction: all that it changes is finite, or nothing changes.

What a group holds in common (a `Shared` of the rule, the reference of the wire format) is
bit-identical on its workers. So is the test of it, and they decide alike without a message.
Each worker then decides about its own target and states.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

from lsgd_jax._src import trees
from lsgd_jax._src.shared import Shared
from lsgd_jax._src.trees import Tree
from lsgd_jax._src.wire.encoded import WireState


def committed(
    before: tuple[Any, Any],
    after: tuple[Any, Any],
    z: Tree,
    y: Tree,
    found: Array,
    is_sound: Array | bool,
    is_tested: bool = False,
) -> tuple[Array, Any, Any]:
    """Returns the outcome of an exchange, or nothing new if its results are not finite.

    Quantization errors alone do not wait for the test, because XLA would hold both versions
    meanwhile. That of a message which did not count is as small as that of any other one.

    Args:
      before, after: the rule's state and the `WireState` (or ()), trees of one structure.
      z, y: the target, and the parameters, in whose dtypes the target must be finite.
      found: bool scalar, whether the rule has found a target.
      is_sound: bool scalar, equal in the group; False drops the exchange.
      is_tested: whether the rule has tested what its group has in common, see `Rule`.

    Returns:
      (found, rule, wire): whether there is a target, and the states.
    """
    commits = jnp.asarray(is_sound)
    if not is_tested:
        reference = after[1].reference if after[1] else ()
        of_group = {"rule": trees.in_common(after[0]), "wire": reference}
        commits &= trees.all_finite(_as_held(of_group, y))
    keeps_own = _stays_finite(_own(before[0]), _own(after[0]))
    has_target = ~found | trees.all_finite(optax.tree.cast_like(z, y))
    commits_own = commits & keeps_own & has_target

    def chosen(old: Any, new: Any) -> Any:
        if not _is_in_common(old):
            return trees.where(commits_own, new, with_schedules_of(new, old))
        if is_tested:
            return new
        return trees.where(commits, new, with_schedules_of(new, old))

    rule = jax.tree.map(chosen, before[0], after[0], is_leaf=_is_in_common)
    wire = before[1]
    if wire:
        reference = trees.where(commits & found, after[1].reference, wire.reference)
        wire = WireState(reference, after[1].error)
    return found & commits_own, rule, wire


def committed_by_element(
    before: tuple[Any, Any], after: tuple[Any, Any], found: Array
) -> tuple[Any, Any]:
    """Returns the states after an exchange, without the elements that are not finite.

    It is for a message that travels beside a gradient: XLA would let the gradient wait for
    a test of all elements. See `committed`.
    """

    rule = jax.tree.map(_where_finite, before[0], after[0])
    wire = before[1]
    if wire:
        reference = jax.tree.map(_where_finite, wire.reference, after[1].reference)
        reference = trees.where(found, reference, wire.reference)
        wire = WireState(reference, after[1].error)
    return rule, wire


def _where_finite(old: Array, new: Array) -> Array:
    """The elements of `new` that are finite, and those of `old` in place of the others."""
    if new is old or not jnp.issubdtype(new.dtype, jnp.inexact):
        return new
    return lax.select(jnp.isfinite(new), new, old.astype(new.dtype))


def _own(rule: Any) -> Tree:
    """The states of this worker alone; nothing in place of the others."""

    def keep(node: Any) -> Any:
        return optax.MaskedNode() if _is_in_common(node) else node

    return jax.tree.map(keep, rule, is_leaf=_is_in_common)


def _is_in_common(node: Any) -> bool:
    return isinstance(node, Shared)


def _as_held(states: Tree, y: Tree) -> Tree:
    """The states, with those that are trees like y in the dtypes of y.

    An anchor or a center is where workers will stand, so they must be able to hold it.
    """
    structure = jax.tree.structure(y)

    def is_like(node: Any) -> bool:
        return _is_in_common(node) and jax.tree.structure(node.value) == structure

    def held(node: Any) -> Any:
        return Shared(optax.tree.cast_like(node.value, y)) if is_like(node) else node

    return jax.tree.map(held, states, is_leaf=is_like)


def _stays_finite(before: Tree, after: Tree) -> Array:
    """Whether all that was finite is finite."""

    def tested(old: Array, new: Array) -> Array:
        is_float = jnp.issubdtype(new.dtype, jnp.inexact)
        if new is old or not is_float:
            return jnp.zeros([], jnp.float32)
        return trees.where_finite(old, new, 0)

    return trees.all_finite(jax.tree.map(tested, before, after))


# The schedules of optax


def with_schedules_of(state: Any, other: Any) -> Any:
    """Returns the state `other`, in which schedules have gone on to where `state` has them.

    A rate that is not finite at one exchange would otherwise be that of all later ones.
    """

    def pick(new: Any, old: Any) -> Any:
        if _is_injected(old):
            inner = with_schedules_of(new.inner_state, old.inner_state)
            return new._replace(inner_state=inner)
        return new if _counts(old) else old

    return jax.tree.map(pick, state, other, is_leaf=_has_schedule)


def _has_schedule(node: Any) -> bool:
    return _counts(node) or _is_injected(node)


def _counts(node: Any) -> bool:
    return isinstance(node, optax.ScaleByScheduleState)


def _is_injected(node: Any) -> bool:
    """Whether a node is a state of `optax.inject_hyperparams`."""
    return hasattr(node, "hyperparams")
