"""Argument checks of factories, with uniform messages: the name, the rule, the value.

Traced numbers have no value to check, so they pass. `optax.inject_hyperparams` calls the
factories with such numbers.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh


def check_positive_int(name: str, value: Any) -> None:
    """Raises ValueError unless the value is an int of at least 1."""
    if isinstance(value, jax.core.Tracer):
        raise ValueError(
            f"`{name}` must be a positive int known before tracing, got the traced "
            f"{name}={value}; for `optax.inject_hyperparams(lj.lsgd, static_args=...)` "
            "`lj.static_args(lj.lsgd)` names all arguments of this kind"
        )
    if _int(value) < 1:
        raise ValueError(f"`{name}` must be a positive int, got {name}={value!r}")


def check_count(name: str, value: Any) -> None:
    """Raises ValueError unless the value is an int of at least 0."""
    if _int(value) < 0:
        raise ValueError(f"`{name}` must be an int of at least 0, got {name}={value!r}")


def check_fraction(name: str, value: Any) -> None:
    """Raises ValueError unless the value is a number in [0, 1], or traced."""
    if not _holds(lambda: 0 <= value <= 1, value):
        raise ValueError(
            f"`{name}` must be in [0, 1] (or a schedule), got {name}={value!r}"
        )


def check_not_negative(name: str, value: Any) -> None:
    """Raises ValueError unless the value is a number of at least 0, or traced."""
    if not _holds(lambda: 0 <= value < float("inf"), value):
        raise ValueError(
            f"`{name}` must be at least 0 and finite (or a schedule), got {name}={value!r}"
        )


def check_option(name: str, value: Any, options: Sequence[str]) -> None:
    """Raises ValueError unless the value is one of the options."""
    if value not in options:
        known = ", ".join(repr(option) for option in options)
        raise ValueError(f"`{name}` must be one of {known}, got {name}={value!r}")


def check_period(name: str, value: Any, period: int) -> None:
    """Raises ValueError unless the value is an int in [0, period)."""
    if not 0 <= _int(value) < period:
        raise ValueError(f"`{name}` must be an int in [0, {period}), got {name}={value!r}")


def check_axes(axes: Any) -> None:
    """Raises ValueError unless the value is a name of a mesh axis, or a tuple of names."""
    names = axes if isinstance(axes, tuple | list) else (axes,)
    if not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"`axes` must be a name of a mesh axis, or a tuple of names, got {axes=}"
        )


def check_step_count(count: Any) -> None:
    """Raises ValueError if the step count of a state is stacked over workers."""
    if jnp.ndim(count):
        raise ValueError(
            "`state` must be that of one worker, but its `count`, which stands in a "
            f"`Shared`, has the shape {jnp.shape(count)}: `flax.jax_utils.replicate`, "
            "`jnp.stack` and `jax.vmap` add an axis of workers, which a `Shared` does not "
            "have under `Workers`; make the state by `workers.map(tx.init)(params)`, or "
            "make that of one worker and call `workers.replicate(state)`"
        )


def check_same_tree(name: str, tree: Any, like: Any) -> None:
    """Raises ValueError unless a tree has the parameters' structure and shapes."""
    structures = jax.tree.structure(tree), jax.tree.structure(like)
    if structures[0] != structures[1]:
        raise ValueError(
            f"`{name}` must be a tree like the parameters, {structures[1]}, got "
            f"{structures[0]}"
        )
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    for (path, x), y in zip(leaves, jax.tree.leaves(like)):
        if np.shape(x) != np.shape(y):
            raise ValueError(
                f"`{name}` must have the shapes of the parameters, got {np.shape(x)} for "
                f"{np.shape(y)} at {jax.tree_util.keystr(path) or 'the top'}"
            )


def check_all_auto(mesh: Mesh | AbstractMesh | None = None) -> None:
    """Raises ValueError for a mesh that has an `AxisType.Explicit` axis.

    mesh: defaults to the one of the trace, in functions that take a function of the user's,
      whose axes would be unknown; all others see automatic axes on any mesh (see
      `explicit`).
    """
    mesh = jax.sharding.get_abstract_mesh() if mesh is None else mesh
    explicit = [
        name
        for name, kind in zip(mesh.axis_names, mesh.axis_types)
        if kind == AxisType.Explicit
    ]
    if explicit:
        names = ", ".join(map(repr, explicit))
        raise ValueError(
            f"every axis of your mesh must be AxisType.Auto, but {names} is "
            "Explicit: use `jax.make_mesh(shape, names, "
            "axis_types=(jax.sharding.AxisType.Auto,) * len(names))`, or a "
            "`jax.shard_map` in which all axes are manual"
        )


def _int(value: Any) -> int:
    """The value as an int; -1 if it is a bool or no integer."""
    try:
        return -1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return -1


def _holds(rule: Callable[[], Any], value: Any) -> bool:
    """Whether the value follows the rule; traced values are assumed to."""
    try:
        return isinstance(value, jax.core.Tracer) or bool(rule())
    except (TypeError, ValueError):
        return False
