"""Runs functions that are written for automatic mesh axes also on explicit ones.

`jax.make_mesh` makes explicit axes: the type of an array says how it is sharded, and an
operation whose result could be sharded in several ways is an error. Exchanges flatten,
join and split arrays, so they compute with automatic axes. Types tell the layouts of their
arguments, and each result gets the type of the argument in its place.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as Spec

from lsgd_jax._src.layouts import (
    TYPED,
    Layouts,
    known,
    known_axes,
    over,
    shard_by_shard,
)
from lsgd_jax._src.shared import during


F = TypeVar("F", bound=Callable[..., Any])


def with_automatic_axes(fn: F) -> F:
    """Returns fn so that mesh axes are automatic in it.

    A result lies like the argument of the same path and shape, or else like the argument of
    the same shape whose path ends most alike. Functions among the arguments are called with
    explicit axes, as the user has written them.

    Args:
      fn: from trees to trees.
    """

    @functools.wraps(fn)
    def run(*args: Any, **named: Any) -> Any:
        leaves, treedef = jax.tree.flatten((args, named))
        mesh = explicit_mesh(leaves)
        if mesh is None:
            return fn(*args, **named)
        kinds = {AxisType.Explicit: AxisType.Auto}
        types = tuple(kinds.get(kind, kind) for kind in mesh.axis_types)
        automatic = mesh.update(axis_types=types)
        arrays = [isinstance(x, jax.Array) for x in leaves]
        specs = [jax.typeof(x).sharding.spec if a else None for x, a in zip(leaves, arrays)]
        each_argument = (*args, *(named[name] for name in sorted(named)))
        typed = Layouts(each_argument, specs)
        divided = [s if s is None else over(s, mesh.shape) for s in specs]
        layouts = Layouts(each_argument, divided)

        def inside(x: Any) -> Any:
            if isinstance(x, jax.Array):
                return _retyped(x, Spec())
            return _with_explicit_axes(x, mesh, typed) if callable(x) else x

        def flat(given: list[Any]) -> list[Any]:
            nonlocal structure
            rest = iter(given)
            each = [next(rest) if a else x for x, a in zip(leaves, arrays)]
            # Under a `jax.vmap`, the axis of the workers is automatic as well, and no array
            # can be taken apart along the other axes; see `replicas`.
            layout = known(layouts) if mesh.manual_axes else during(TYPED, layouts)
            with jax.sharding.use_abstract_mesh(automatic), layout:
                args, named = treedef.unflatten(map(inside, each))
                outputs = fn(*args, **named)
            results, structure = jax.tree.flatten(outputs)
            with jax.sharding.use_abstract_mesh(mesh):
                return list(map(_retyped, results, typed.of_leaves(outputs)))

        structure: Any = None
        given = [x for x, a in zip(leaves, arrays) if a]
        traced = any(isinstance(x, jax.core.Tracer) for x in given)
        results = (flat if traced else jax.jit(flat))(given)
        return structure.unflatten(results)

    return cast(F, run)


def by_shards(out: Callable[..., Any]) -> Callable[[F], F]:
    """Makes a method of trees run with automatic axes, on the shards of each device.

    Args:
      out: from the specs of the trees to those of the results; see `shard_by_shard`.
    """

    def decorate(fn: F) -> F:
        @functools.wraps(fn)
        def run(self: Any, *trees: Any, **static: Any) -> Any:
            own = functools.partial(fn, self, **static)
            # On most meshes nothing is sharded, and no layer is needed around fn.
            if known_axes() or explicit_mesh(jax.tree.leaves(trees)):
                own = functools.partial(shard_by_shard, own, out=out)
                return with_automatic_axes(own)(*trees)
            return own(*trees)

        return cast(F, run)

    return decorate


def as_automatic(x: Any) -> Any:
    """A traced number from outside of the function with automatic axes, for use in it."""
    if not isinstance(x, jax.Array) or not jax.typeof(x).sharding.mesh.explicit_axes:
        return x
    is_here = jax.sharding.get_abstract_mesh().explicit_axes
    return x if is_here else _retyped(x, Spec())


def _with_explicit_axes(fn: Callable, mesh: AbstractMesh, layouts: Layouts) -> Callable:
    """A user's function of trees like the arguments, for a call with automatic axes."""

    def run(*args: Any) -> Any:
        automatic = jax.sharding.get_abstract_mesh()
        leaves, treedef = jax.tree.flatten(args)
        with jax.sharding.use_abstract_mesh(mesh), known(None):
            typed = map(_retyped, leaves, layouts.of_leaves(args))
            results = fn(*treedef.unflatten(typed))
        with jax.sharding.use_abstract_mesh(automatic):
            return jax.tree.map(lambda x: _retyped(x, Spec()), results)

    return run


def _retyped(x: Any, spec: Spec | None) -> Any:
    """x with the type of that spec on the mesh of the context."""
    return jax.reshard(x, spec or Spec()) if isinstance(x, jax.Array) else x


def explicit_mesh(leaves: Any = ()) -> AbstractMesh | None:
    """The mesh with explicit axes on which the leaves lie, or the one set, if any."""
    meshes = [jax.sharding.get_abstract_mesh()]
    if meshes[0].empty:
        types = [jax.typeof(x) for x in leaves if isinstance(x, jax.Array)]
        meshes = [type_.sharding.mesh for type_ in types]
    return next((mesh for mesh in meshes if mesh.explicit_axes), None)
