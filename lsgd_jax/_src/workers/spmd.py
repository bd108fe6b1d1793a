"""Compiles a function written for one worker into one over the grid of workers."""

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

from lsgd_jax._src import layouts
from lsgd_jax._src.exchange.noted import EXCHANGES, Exchanged
from lsgd_jax._src.shared import NAMES, SLOTS, check_rows, during, one_worker, shared_flags
from lsgd_jax._src.trees import Tree
from lsgd_jax._src.workers import uniform
from lsgd_jax._src.workers.device_grid import Slots
from lsgd_jax._src.workers.lookups import with_whole_tables
from lsgd_jax._src.workers.meetings import Meetings


class Grid(NamedTuple):
    """The positions of workers: the mesh of devices, and the slots inside a device.

    Attributes:
      mesh: the devices.
      axes: the mesh axes along which workers stand; all other axes are inside a worker.
      slots: the names and sizes of the vmapped axes.
      nodes, locals: the sizes of the grid of workers.
      inside: the names and sizes of the axes inside a worker.
      names: other names of 'node' and 'local' on the mesh, if it has any.
    """

    mesh: Mesh
    axes: tuple[str, ...]
    slots: Slots
    nodes: int
    locals: int
    inside: Mapping[str, int]
    names: Mapping[str, str] = {}

    def sharding(self, spec: Spec | None = None, shared: bool = False) -> NamedSharding:
        """The sharding of leaves [W, ...], or of shared ones [...], by their own `spec`."""
        own = spec or Spec()
        if not self.is_explicit:  # as XLA returns it
            own = layouts.over(own, self.inside)
        if not shared:
            own = self._of_rows(own)
        return NamedSharding(self.mesh, own)

    def _of_rows(self, own: Spec) -> Spec:
        """The spec of leaves [W, ...], over all workers' devices, as XLA returns it."""
        names = tuple(name for name in self.axes if self.mesh.shape[name] > 1)
        if not names:
            return Spec(None, *own) if own else Spec()
        return Spec(names if len(names) > 1 else names[0], *own)

    @property
    def is_explicit(self) -> bool:
        """Whether types tell how arrays are sharded."""
        return AxisType.Explicit in self.mesh.axis_types

    def placed(self, x: Any, shared: bool) -> Any:
        """A traced leaf, sharded over the workers; on axes inside them as it was."""
        now = jax.typeof(x).sharding
        own = _of_one(now.spec, shared) if now.mesh.explicit_axes else Spec()
        return jax.reshard(x, self.sharding(own, shared))

    def typed(self, one: jax.ShapeDtypeStruct, x: Any, shared: bool) -> Any:
        """The shape of a leaf in a worker, with the type that it has there."""
        spec = _of_one(jax.typeof(x).sharding.spec, shared)
        sharding = NamedSharding(self.mesh.abstract_mesh, spec)
        return one.update(sharding=sharding)

    @property
    def sizes(self) -> dict[str, int]:
        """The names and sizes of the axes of workers, on the mesh and vmapped."""
        return {name: self.mesh.shape[name] for name in self.axes} | dict(self.slots)

    def check(self, tree: Tree) -> None:
        """Raises ValueError unless all leaves but shared ones have a leading axis of W."""
        workers = f"W = {self.nodes} nodes x {self.locals} locals"
        check_rows(tree, self.nodes * self.locals, workers)

    def spec_of(self, sharding: Any, shared: bool) -> Spec | None:
        """The spec in a worker of an array with that sharding; None on another mesh."""
        if not isinstance(sharding, NamedSharding) or sharding.mesh != self.mesh:
            return None
        return layouts.over(_of_one(sharding.spec, shared), self.inside)


def _of_one(spec: Spec, shared: bool) -> Spec:
    """The spec in a worker: without that of the leading axis, which a shared leaf lacks."""
    return Spec(*spec) if shared else Spec(*spec[1:])


def compiled(
    fn: Callable,
    grid: Grid,
    meetings: Meetings,
    donate: tuple[int, ...] = (),
    static: tuple[str, ...] = (),
) -> Callable:
    """Returns the jitted function over all workers; see `Workers.map`."""

    def over_workers(shardings, *args, **named):
        _check_context(grid.mesh)
        call, args = _without(static, fn, args, named)
        grid.check(args)
        flags = shared_flags(args)
        leaves, structure = jax.tree.flatten(args)
        one = one_worker(args)
        if grid.is_explicit:
            leaves = list(map(grid.placed, leaves, flags))
            one = list(map(grid.typed, one, leaves, flags))
            shardings = ()
        found = layouts.Layouts(args, map(grid.spec_of, shardings, flags), one)
        flat = _OnLeaves(call, structure, grid)
        with layouts.known(found), during(NAMES, grid.names):
            traced = _trace(flat, one, uniform.leaf_axes(args, grid.sizes), grid, meetings)
            specs = [None] * len(flat.specs) if grid.is_explicit else flat.specs
            spmd = _spmd(traced, grid, flags, flat.shared, specs)
            return flat.results.unflatten(spmd(*leaves))

    @functools.lru_cache
    def jitted(shardings: tuple) -> Callable:
        bound = functools.wraps(fn)(functools.partial(over_workers, shardings))
        return jax.jit(bound, donate_argnums=donate, static_argnames=static)

    tells = grid.is_explicit or not grid.inside
    return jitted(()) if tells else _PerSharding(fn, jitted, static)


class _OnLeaves:
    """A function of one worker, from the leaves of its arguments to those of its results.

    Only traced arrays pass through the user's own nodes, which may refuse anything else.

    Args:
      fn: the function, of trees.
      args: the structure of the tuple of its arguments.
      grid: the positions of the workers.

    Attributes:
      results: the structure of the results. This and all below are known after a call.
      shared: for each result, whether it is the same on all workers.
      specs: for each result, its known layout inside a worker, or None.
      leaf_axes: see `uniform.leaf_axes`.
    """

    results: Any
    shared: list[bool]
    specs: list[Spec | None]
    leaf_axes: list[uniform.LeafAxes]

    def __init__(self, fn: Callable, args: Any, grid: Grid):
        self._fn = fn
        self._args = args
        self._grid = grid

    def __call__(self, *leaves: Any) -> list[Any]:
        outputs = self._fn(*self._args.unflatten(leaves))
        found, self.results = jax.tree.flatten(outputs)
        self.shared = shared_flags(outputs)
        self.specs = layouts.of_known(outputs)
        self.leaf_axes = uniform.leaf_axes(outputs, self._grid.sizes)
        return found


def _trace(
    fn: _OnLeaves,
    shapes: Sequence[Any],
    leaf_axes: Sequence[uniform.LeafAxes],
    grid: Grid,
    meetings: Meetings,
) -> Callable[..., list[Any]]:
    """Traces the function of one worker, once, and checks that it cannot hang.

    A function may keep arrays of its first trace, as lazily built layers do. Therefore its
    jaxpr runs on the devices, and the function itself is not called again.

    Args:
      fn: the function, written for one worker.
      shapes: one worker's arguments: anything with a shape, a dtype and a weak type.
      leaf_axes: those of the arguments, see `uniform.leaf_axes`.
      grid: the positions of the workers.
      meetings: the axes along which programs communicate.

    Returns:
      A function (arrays) -> arrays that evaluates the jaxpr inside a `jax.shard_map` and
      `jax.vmap`s with the axes of the grid.
    """
    one = jax.shard_map(
        fn,
        mesh=grid.mesh,
        in_specs=Spec(),
        out_specs=Spec(),
        axis_names=set(grid.axes),
        check_vma=False,
    )
    exchanges = list[Exchanged]()
    slots = tuple(name for name, _ in grid.slots)
    trace = jax.make_jaxpr(one, axis_env=grid.slots, return_shape=True)
    with during(EXCHANGES, exchanges), during(SLOTS, slots):
        traced, types = trace(*shapes)
    uniform.check(traced.jaxpr, leaf_axes, fn.leaf_axes, grid.sizes)
    meetings.check(traced.jaxpr, exchanges, grid.sizes)
    (mapped,) = traced.eqns
    body = jaxpr_as_fun(ClosedJaxpr(with_whole_tables(mapped.params["jaxpr"]), ()))

    def run(*leaves: Any) -> list[Any]:
        names = (*traced.jaxpr.constvars, *traced.jaxpr.invars)
        values = dict(zip(names, (*traced.consts, *leaves)))

        def read(x):
            return x.val if isinstance(x, Literal) else values[x]

        results = body(*map(read, mapped.invars))
        # The result of a jaxpr may be a literal.
        return [
            x if isinstance(x, jax.Array) else jnp.asarray(x, dtype)
            for x, dtype in zip(results, dtypes)
        ]

    dtypes = [None if type_.weak_type else type_.dtype for type_ in types]
    return run


def _check_context(mesh: Mesh) -> None:
    """Raises ValueError inside a `jax.set_mesh` of another mesh."""
    context = jax.sharding.get_abstract_mesh()
    if not context.empty and context != mesh.abstract_mesh:
        raise ValueError(
            f"the mesh set by `jax.set_mesh`, {context.axis_names}, is not that of the "
            "workers: build the workers on it with `lj.Workers(mesh=mesh, axes=...)`, or "
            "call mapped functions outside of it"
        )


def _without(
    static: tuple[str, ...], fn: Callable, args: Sequence[Any], named: Mapping[str, Any]
) -> tuple[Callable, tuple]:
    """Returns fn with its static arguments bound, and all other arguments by position."""
    names = _positional(fn)[: len(args)] if static else []
    fixed = {i: args[i] for i, name in enumerate(names) if name in static}
    fixed_by_name = {name: x for name, x in named.items() if name in static}
    by_name = sorted(named.keys() - fixed_by_name)

    def call(*given: Any) -> Tree:
        first = len(given) - len(by_name)
        rest = iter(given[:first])
        placed = [fixed[i] if i in fixed else next(rest) for i in range(len(args))]
        outputs = fn(*placed, **dict(zip(by_name, given[first:])), **fixed_by_name)

        def to_array(x):
            return x if isinstance(x, jax.Array) else jnp.asarray(x)

        return jax.tree.map(to_array, outputs)

    arrays = [x for i, x in enumerate(args) if i not in fixed]
    return call, (*arrays, *(named[name] for name in by_name))


def _positional(fn: Callable) -> list[str]:
    """The names of the parameters that have a place of their own, before any `*args`."""
    parameters = inspect.signature(fn).parameters.values()
    places = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD}
    return [parameter.name for parameter in parameters if parameter.kind in places]


class _PerSharding:
    """A jitted function that is traced again for each sharding of its arguments.

    jit does not tell a function how its arguments are sharded on automatic axes.
    """

    def __init__(
        self, fn: Callable, jitted: Callable[[tuple], Any], static: tuple[str, ...]
    ):
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._jitted = jitted
        self._static = static

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._of(args, named)(*args, **named)

    def lower(self, *args: Any, **named: Any) -> Any:
        """Lowers the function, as `jax.jit(...).lower` does."""
        return self._of(args, named).lower(*args, **named)

    def trace(self, *args: Any, **named: Any) -> Any:
        """Traces the function, as `jax.jit(...).trace` does."""
        return self._of(args, named).trace(*args, **named)

    def _of(self, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        _, arrays = _without(self._static, self._fn, args, named)
        shardings = [getattr(x, "sharding", None) for x in jax.tree.leaves(arrays)]
        return self._jitted(tuple(shardings))


def _spmd(
    fn: Callable,
    grid: Grid,
    shared: list[bool],
    shared_out: list[bool],
    specs_out: Sequence[Spec | None],
) -> Callable:
    """Maps fn over all workers: shard_map over the devices, vmap over a device's slots.

    Types are not checked for varying (`check_vma`), because a function written for one
    worker must not need to cast the values that its scans and conds carry.

    Args:
      fn: from arrays to a list of arrays, for one worker.
      grid: the positions of the workers.
      shared: for each argument, whether it is the same on all workers.
      shared_out: for each result, whether it is the same on all workers.
      specs_out: for each result, its spec in a worker; None leaves the choice to XLA.
    """
    shapes = tuple(size for _, size in grid.slots)

    def specs(shared):
        return grid.sharding(shared=shared).spec

    def unstack(x, shared):
        return x if shared else x.reshape(shapes + x.shape[1:])

    def stack(x, shared, spec):
        if shared and not shapes and spec is None:
            return x
        # A wrapper's `where` may have stacked a value that is equal on all workers, so
        # that one row is enough. XLA drops the copies of values that had no rows.
        rows = x.reshape((math.prod(shapes),) + x.shape[len(shapes) :])
        stacked = rows[0] if shared else rows
        if spec is None:
            return stacked
        stacked_spec = spec if shared else Spec(None, *spec)
        return jax.lax.with_sharding_constraint(stacked, stacked_spec)

    def on_device(*leaves):
        one = fn
        for name, size in reversed(grid.slots):
            axes = tuple(None if is_shared else 0 for is_shared in shared)
            one = jax.vmap(one, axes, 0, axis_name=name, axis_size=size)
        results = one(*map(unstack, leaves, shared))
        return list(map(stack, results, shared_out, specs_out))

    return jax.shard_map(
        on_device,
        mesh=grid.mesh,
        in_specs=tuple(map(specs, shared)),
        out_specs=list(map(specs, shared_out)),
        axis_names=set(grid.axes),
        check_vma=False,
    )
