"""Workers: a node × local grid of workers over the devices at hand.

`Workers.map` refuses, while tracing, a function in which workers would wait for each other
forever, and a `Shared` output that may differ between workers; `lsgd_jax._uniform` tells
how it knows. One of its rules is optimistic: integer and bool SCALARS that each worker has
of its own are taken to be equal on all workers, because wrappers such as
`optax.MultiSteps` and `optax.conditionally_transform` count their steps in such leaves; so
are the scalars that `optax.inject_hyperparams` keeps.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from lsgd_jax import _uniform
from lsgd_jax._debug import check_not_misplaced
from lsgd_jax._device_grid import (
    check_no_process_is_idle,
    device_grid,
    leading_axis_over,
    named_mesh,
)
from lsgd_jax._transfer import check_rows, is_key, map_flagged, place, read, shared_flags
from lsgd_jax.checks import check_positive_int
from lsgd_jax.devices import reserve_threads
from lsgd_jax.shared import WORKER_AXES, Shared
from lsgd_jax.trees import Tree


class Workers:
    """W = nodes × locals workers, laid over the devices of all processes.

    Worker i is local worker i mod locals of node i // locals. A tree of the workers has a
    leading axis of W on every leaf, sharded over the devices; what is equal on all
    workers stands in a `Shared` and has none. With fewer devices than workers each device
    holds several workers in a row, and the numbers stay the same.

    Args:
      nodes: how many groups of close-by workers (hosts, as a rule).
      locals: how many workers in each; None: as many as there are devices for.
      devices: the devices to use, all of them. None: the largest grid of all processes'
        devices that divides nodes × locals, each node's devices on one host if possible.
      debug: whether mapped functions look at the states they return, after each call, for
        an exchange whose parameters were changed behind it (`misplaced`). It waits for
        every step to end, so steps no longer overlap with the host's work.

    Attributes:
      nodes, locals, num_workers: the grid and W.
      mesh: the grid of devices, with axes 'node' and 'local'; an axis along which
        devices hold several workers is called 'node_device' or 'local_device'.
      sharding: of per-worker leaves (leading axis W); `replicated`: of shared ones.
      workers_per_device: how many workers each device holds.
      owned: the workers whose device belongs to this process, as a range.

    Raises:
      ValueError: a count below 1, devices that the workers do not divide over, or a
        process that would have no worker.

    >>> import jax.numpy as jnp
    >>> import lsgd_jax as lj
    >>> workers = lj.Workers(nodes=2, locals=4)
    >>> workers
    Workers(nodes=2, locals=4) on 8 cpu devices (2 x 4), 1 worker per device
    >>> params = workers.replicate({"w": jnp.ones(3)})
    >>> params["w"].shape
    (8, 3)
    """

    def __init__(
        self,
        nodes: int = 1,
        locals: int | None = None,
        *,
        devices: Sequence[jax.Device] | None = None,
        debug: bool = False,
    ):
        check_positive_int("nodes", nodes)
        reserve_threads()
        if locals is None:
            available = len(jax.devices() if devices is None else devices)
            locals = max(1, available // nodes)
        check_positive_int("locals", locals)
        self.nodes, self.locals = int(nodes), int(locals)
        self.num_workers = self.nodes * self.locals
        self.debug = debug
        grid = device_grid(self.nodes, self.locals, devices)
        if devices is None:
            check_no_process_is_idle(grid, jax.process_count())
        self.mesh, self._slots = named_mesh(grid, self.nodes, self.locals)
        self.sharding = NamedSharding(self.mesh, leading_axis_over(self.mesh))
        self.replicated = NamedSharding(self.mesh, PartitionSpec())
        self.workers_per_device = self.num_workers // grid.size
        mine = [d.process_index == jax.process_index() for d in grid.flat]
        rows = np.repeat(mine, self.workers_per_device).nonzero()[0]
        self.owned = range(rows[0], rows[-1] + 1) if rows.size else range(0)
        if len(self.owned) != rows.size:
            raise ValueError(
                "the devices of a process must stand next to one another in the grid, "
                f"got processes {[d.process_index for d in grid.flat]}"
            )
        self._pass_on = self._compile(lambda tree: tree)
        self._replicate_rows = jax.jit(lambda t: t, out_shardings=self.replicated)

    def __repr__(self) -> str:
        per_device = self.workers_per_device
        return (
            f"Workers(nodes={self.nodes}, locals={self.locals}) on "
            f"{self.mesh.size} {self.mesh.devices.flat[0].platform} "
            f"device{'s' * (self.mesh.size > 1)} "
            f"({' x '.join(map(str, self.mesh.devices.shape))}), "
            f"{per_device} worker{'s' * (per_device > 1)} per device"
        )

    # Placing trees

    def put(self, stacked: Tree) -> Tree:
        """Places a tree with leading axis W: row i goes to the device of worker i.

        With several processes every process passes the whole tree, or uses `put_owned`.

        Args:
          stacked: arrays (host or device, any dtype) of shape [W, ...]; a `Shared`
            inside is copied to every device whole.

        Returns:
          The same tree of placed `jax.Array`s; never the same buffers as the argument.

        Raises:
          ValueError: a leaf without a leading axis of W.
        """
        self._check(stacked)
        return self._placed(stacked, lambda x: place(x, self.sharding))

    def put_owned(self, rows: Tree) -> Tree:
        """Places a tree of which each process passes only its own workers' rows.

        Args:
          rows: arrays of shape [len(owned), ...]: the rows of the workers in `owned`.

        Returns:
          The placed tree with leading axis W.

        Raises:
          ValueError: a leaf without a leading axis of len(owned).
        """
        check_rows(rows, len(self.owned), "the workers of this process")

        def place_rows(x: Any) -> jax.Array:
            shape = (self.num_workers, *np.shape(x)[1:])
            local = np.array(x)
            return jax.make_array_from_process_local_data(self.sharding, local, shape)

        return self._placed(rows, place_rows)

    def replicate(self, tree: Tree) -> Tree:
        """Gives every worker a copy of one tree: leaves [...] become [W, ...].

        What stands in a `Shared` stays one.
        """

        def place_copies(x: Any) -> jax.Array:
            rows = np.broadcast_to(np.asarray(x), (self.num_workers, *np.shape(x)))
            return place(rows, self.sharding)

        return self._placed(tree, place_copies)

    def share(self, tree: Tree) -> Shared:
        """Puts one tree on every device, as it is, for all workers to read."""
        return self.put(Shared(tree))

    def fetch(self, tree: Tree) -> Tree:
        """The tree as host arrays, all workers' rows, in every process.

        Random keys come as key arrays, which `put` takes back. Communicates if there are
        several processes, which then must all call it.
        """
        if jax.process_count() > 1:
            tree = self._replicate_rows(tree)
        return jax.tree.map(read, tree)

    # Running per-worker functions

    def map(self, fn: Callable, donate: int | Iterable[int] = ()) -> Callable:
        """Turns a function written for one worker into a jitted one over all workers.

        Args:
          fn: takes and returns trees of ONE worker's arrays. The axis names 'node' and
            'local' are bound inside, so that `lsgd_jax` transformations and collectives
            work. A `Shared` argument arrives as `Shared`.
          donate: the positions of arguments whose buffers may be reused.

        Returns:
          A `jax.jit` function of the same signature (positional arguments): every array
          has a leading axis of W, in and out, except those in a `Shared`. Python scalars
          that fn returns become arrays. `fn` is traced twice per compilation: once for
          one worker, to see what it returns and that it cannot hang.

        Raises:
          ValueError: at the call, an argument without a leading axis of W; a branch or a
            loop that depends on a worker's own values and contains collectives; a
            `Shared` output that may differ between workers; with `debug`, parameters that
            are not where an exchange left them.

        >>> import jax.numpy as jnp
        >>> import lsgd_jax as lj
        >>> workers = lj.Workers(nodes=1, locals=3)
        >>> square = workers.map(lambda x: x * x)
        >>> square(workers.put(jnp.arange(3.0))).tolist()
        [0.0, 1.0, 4.0]
        """

        compiled = self._compile(fn, donate)
        if not self.debug:
            return compiled

        @functools.wraps(compiled)
        def checked(*args):
            outputs = compiled(*args)
            check_not_misplaced(outputs, self.fetch)
            return outputs

        return checked

    def _compile(self, fn: Callable, donate: int | Iterable[int] = ()) -> Callable:
        def as_arrays(*args):
            to_array = lambda x: x if isinstance(x, jax.Array) else jnp.asarray(x)
            return jax.tree.map(to_array, fn(*args))

        @functools.wraps(fn)
        def over_workers(*args):
            self._check(args)
            leaves, structure = jax.tree.flatten(args)
            sizes = dict(zip(WORKER_AXES, (self.nodes, self.locals)))
            outputs = _uniform.trace(as_arrays, map_flagged(_of_one_worker, args), sizes)
            flat = lambda *leaves: jax.tree.leaves(as_arrays(*structure.unflatten(leaves)))
            results = self._spmd(flat, shared_flags(args), shared_flags(outputs))(*leaves)
            return jax.tree.unflatten(jax.tree.structure(outputs), results)

        donate = (donate,) if isinstance(donate, int) else tuple(donate)
        return jax.jit(over_workers, donate_argnums=donate)

    def _spmd(self, fn: Callable, shared: list[bool], shared_out: list[bool]) -> Callable:
        """fn over all workers: shard_map over the devices, vmap over a device's slots.

        Types are not checked for varying (`check_vma`): a function written for one worker
        must not need to cast what it carries through its scans and conds.

        Args:
          fn: from arrays to a list of arrays, for one worker.
          shared: of each argument whether it is the same for all workers.
          shared_out: likewise of each result.
        """
        shapes = tuple(size for _, size in self._slots)
        specs = lambda shared: PartitionSpec() if shared else self.sharding.spec

        def unstack(x, shared):
            return x if shared else x.reshape(shapes + x.shape[1:])

        def stack(x, shared):
            # A wrapper's `where` may have made rows of what is equal on all workers: one
            # of them is all. XLA drops the copies of what had none.
            rows = x.reshape((self.workers_per_device,) + x.shape[len(shapes) :])
            return rows[0] if shared else rows

        def on_device(*leaves):
            one = fn
            for name, size in reversed(self._slots):
                axes = tuple(None if is_shared else 0 for is_shared in shared)
                one = jax.vmap(one, axes, 0, axis_name=name, axis_size=size)
            return list(map(stack, one(*map(unstack, leaves, shared)), shared_out))

        return jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=tuple(map(specs, shared)),
            out_specs=list(map(specs, shared_out)),
            check_vma=False,
        )

    def _placed(self, tree: Tree, place_rows: Callable[[Any], jax.Array]) -> Tree:
        """The tree on the devices, random keys by the numbers they hold."""

        def place_leaf(x: Any, shared: bool) -> jax.Array:
            if not is_key(x):
                return place(x, self.replicated) if shared else place_rows(x)
            numbers = place_leaf(jax.random.key_data(x), shared)
            keys = jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(x))
            # jit notes the sharding of its results' keys in a way of its own: through a
            # jit once, so that results fed back are of the same type.
            return self._pass_on(Shared(keys)).value if shared else self._pass_on(keys)

        return map_flagged(place_leaf, tree)

    def _check(self, tree: Tree) -> None:
        grid = f"W = {self.nodes} nodes x {self.locals} locals"
        check_rows(tree, self.num_workers, grid)


def _of_one_worker(x: Any, shared: bool) -> jax.ShapeDtypeStruct:
    shape = x.shape if shared else x.shape[1:]
    return jax.ShapeDtypeStruct(shape, x.dtype, weak_type=getattr(x, "weak_type", False))
