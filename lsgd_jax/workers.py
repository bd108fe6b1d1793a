"""Workers: a node × local grid of workers over the devices at hand."""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lsgd_jax._types import Shared, Tree, is_shared
from lsgd_jax.checks import check_positive_int
from lsgd_jax.collectives import DEVICE, SLOT, WORKER_AXES
from lsgd_jax.devices import reserve_threads


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

    >>> workers = Workers(nodes=2, locals=4)
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
    ):
        check_positive_int("nodes", nodes)
        reserve_threads()
        if locals is None:
            available = len(jax.devices() if devices is None else devices)
            locals = max(1, available // nodes)
        check_positive_int("locals", locals)
        self.nodes, self.locals = int(nodes), int(locals)
        self.num_workers = self.nodes * self.locals
        grid = _device_grid(self.nodes, self.locals, devices)
        if devices is None:
            _check_nobody_is_idle(grid, jax.process_count())
        self._slots: list[tuple[str, int]] = []
        self.mesh = self._name_axes(grid)
        self.sharding = NamedSharding(self.mesh, _leading_axis_over(self.mesh))
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
        self._pass_on = self.map(lambda tree: tree)
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
        return self._map_placed(self._place, stacked)

    def put_owned(self, rows: Tree) -> Tree:
        """Places a tree of which each process passes only its own workers' rows.

        Args:
          rows: arrays of shape [len(owned), ...]: the rows of the workers in `owned`.

        Returns:
          The placed tree with leading axis W.

        Raises:
          ValueError: a leaf without a leading axis of len(owned).
        """
        self._check(rows, len(self.owned))

        def place(x: Any, sharding: NamedSharding) -> jax.Array:
            if sharding is self.replicated:
                return self._place(x, sharding)
            shape = (self.num_workers, *np.shape(x)[1:])
            return jax.make_array_from_process_local_data(sharding, np.array(x), shape)

        return self._map_placed(place, rows)

    def replicate(self, tree: Tree) -> Tree:
        """Gives every worker a copy of one tree: leaves [...] become [W, ...].

        What stands in a `Shared` stays one.
        """

        def place(x: Any, sharding: NamedSharding) -> jax.Array:
            if sharding is self.replicated:
                return self._place(x, sharding)
            rows = np.broadcast_to(np.asarray(x), (self.num_workers, *np.shape(x)))
            return self._place(rows, sharding)

        return self._map_placed(place, tree)

    def share(self, tree: Tree) -> Shared:
        """Puts one tree on every device, as it is, for all workers to read."""
        return self.put(Shared(tree))

    def fetch(self, tree: Tree) -> Tree:
        """The tree as host arrays, all workers' rows, in every process.

        Communicates if there are several processes, which then must all call it.
        """
        if jax.process_count() > 1:
            tree = self._replicate_rows(tree)

        def read(x: Any) -> np.ndarray:
            if isinstance(x, jax.Array) and not x.is_fully_addressable:
                x = x.addressable_data(0)
            return np.asarray(x)

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
          has a leading axis of W, in and out, except those in a `Shared`. `fn` is traced
          twice per compilation: once to see which outputs are shared.

        Raises:
          ValueError: at the call, an argument without a leading axis of W.

        >>> workers = Workers(nodes=1, locals=3)
        >>> square = workers.map(lambda x: x * x)
        >>> square(workers.put(jnp.arange(3.0))).tolist()
        [0.0, 1.0, 4.0]
        """

        @functools.wraps(fn)
        def over_workers(*args):
            self._check(args)
            outputs = jax.eval_shape(self._spmd(fn, args), *args)
            return self._spmd(fn, args, outputs)(*args)

        donate = (donate,) if isinstance(donate, int) else tuple(donate)
        return jax.jit(over_workers, donate_argnums=donate)

    def _name_axes(self, grid: np.ndarray) -> Mesh:
        """The device grid, its axes named so that 'node' and 'local' mean all workers.

        An axis that lies on the devices as a whole keeps its name there. One that lies
        inside the devices as a whole is a vmapped axis of that name. One that is split
        gets two new names, which `collectives.names` puts together again; a bare
        `lax.psum` over it then fails instead of summing a part.
        """
        device_names = []
        for axis, devices, workers in zip(
            WORKER_AXES, grid.shape, (self.nodes, self.locals)
        ):
            whole, inside = devices == workers, devices == 1
            device_names.append(axis if whole else DEVICE.format(axis))
            if not whole:
                name = axis if inside else SLOT.format(axis)
                self._slots.append((name, workers // devices))
        types = (AxisType.Auto,) * len(WORKER_AXES)
        return Mesh(grid, device_names, axis_types=types)

    def _spmd(self, fn: Callable, args: Any, outputs: Any = None) -> Callable:
        """fn over all workers: shard_map over the devices, vmap over a device's slots.

        outputs: what the result looks like; None: every leaf of it is stacked. Types are
        not checked for varying (`check_vma`): a function written for one worker must not
        need to cast what it carries through its scans and conds.
        """
        shapes = tuple(size for _, size in self._slots)
        stacked = _leading_axis_over(self.mesh)
        specs = lambda tree: _mark(tree, PartitionSpec(), stacked)
        axes = lambda tree: _mark(tree, None, 0)
        all_stacked = outputs is None

        def unstack(x):
            return x.reshape(shapes + x.shape[1:])

        def stack(x):
            return x.reshape((self.workers_per_device,) + x.shape[len(shapes) :])

        def on_device(*args):
            one = fn
            for name, size in reversed(self._slots):
                one = jax.vmap(
                    one,
                    axes(args),
                    0 if all_stacked else axes(outputs),
                    axis_name=name,
                    axis_size=size,
                )
            result = one(*_map_stacked(unstack, args))
            return (jax.tree.map if all_stacked else _map_stacked)(stack, result)

        return jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=specs(args),
            out_specs=stacked if all_stacked else specs(outputs),
            check_vma=False,
        )

    def _map_placed(self, place: Callable, tree: Tree) -> Tree:
        """place(leaf, sharding) on every leaf, random keys by the numbers they hold."""

        def place_leaf(x, shared):
            sharding = self.replicated if shared else self.sharding
            if not (
                isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            ):
                return place(x, sharding)
            numbers = place(jax.random.key_data(x), sharding)
            keys = jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(x))
            # jit notes the sharding of its results' keys in a way of its own: through a
            # jit once, so that results fed back are of the same type.
            return self._pass_on(Shared(keys)).value if shared else self._pass_on(keys)

        def place_node(node):
            return jax.tree.map(lambda x: place_leaf(x, is_shared(node)), node)

        return jax.tree.map(place_node, tree, is_leaf=is_shared)

    def _place(self, x: Any, sharding: NamedSharding) -> jax.Array:
        if isinstance(x, jax.Array) and sharding.is_fully_addressable:
            return jax.device_put(x, sharding, may_alias=False)
        host = np.array(x)  # a copy: a CPU device works on the very memory it is handed
        if sharding.is_fully_addressable:
            return jax.device_put(host, sharding)
        return jax.make_array_from_callback(host.shape, sharding, host.__getitem__)

    def _check(self, tree: Tree, rows: int | None = None) -> None:
        """Raises ValueError unless every per-worker leaf has its leading axis."""
        whose = f"W = {self.nodes} nodes x {self.locals} locals"
        if rows is not None:
            whose = "the workers of this process"
        wanted = self.num_workers if rows is None else rows
        leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_shared)
        for path, leaf in leaves:
            if not is_shared(leaf) and np.shape(leaf)[:1] != (wanted,):
                raise ValueError(
                    f"every leaf must have a leading axis of {wanted} ({whose}), got "
                    f"shape {np.shape(leaf)} at {jax.tree_util.keystr(path) or 'the top'}"
                    "; `replicate` gives every worker a copy of one tree, `share` marks "
                    "what has no such axis"
                )


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _leading_axis_over(mesh: Mesh) -> PartitionSpec:
    """Shards the leading axis over the whole mesh, written as XLA writes it back."""
    names = tuple(name for name in mesh.axis_names if mesh.shape[name] > 1)
    if not names:
        return PartitionSpec()
    return PartitionSpec(names if len(names) > 1 else names[0])


def _mark(tree: Any, shared: Any, stacked: Any) -> Any:
    """A prefix of the tree: `shared` for its `Shared` nodes, `stacked` for other leaves."""
    return jax.tree.map(
        lambda node: shared if is_shared(node) else stacked, tree, is_leaf=is_shared
    )


def _map_stacked(f: Callable, tree: Any) -> Any:
    """f on every leaf that is not in a `Shared`."""
    return jax.tree.map(
        lambda node: node if is_shared(node) else f(node), tree, is_leaf=is_shared
    )


def _device_grid(
    nodes: int, locals: int, devices: Sequence[jax.Device] | None
) -> np.ndarray:
    """The devices as an array [node, local] whose shape divides nodes × locals."""
    available = list(jax.devices() if devices is None else devices)
    shape = max(_grids(nodes, locals, len(available)), key=math.prod)
    used = math.prod(shape)
    if devices is not None and used != len(available):
        fitting = sorted(set(map(math.prod, _grids(nodes, locals, nodes * locals))))
        raise ValueError(
            f"{nodes * locals} workers ({nodes} nodes x {locals} locals) do not divide "
            f"over the {len(available)} devices given; "
            f"{', '.join(map(str, fitting))} devices would fit"
        )
    return np.array(_pick(available, shape), dtype=object).reshape(shape)


def _check_nobody_is_idle(grid: np.ndarray, processes: int) -> None:
    """Raises ValueError if a process has no device in the grid: it could not take part."""
    busy = {device.process_index for device in grid.flat}
    idle = [str(process) for process in range(processes) if process not in busy]
    if idle:
        raise ValueError(
            f"every process must have a worker, but of {processes} processes these have "
            f"none: {', '.join(idle)}; take more workers, or fewer processes"
        )


def _grids(nodes: int, locals: int, available: int) -> list[tuple[int, int]]:
    """Device grids on which every device holds workers that follow one another."""
    divisors = lambda n: [d for d in range(1, n + 1) if n % d == 0]
    grids = itertools.chain(
        ((nodes, d) for d in divisors(locals)), ((d, 1) for d in divisors(nodes))
    )
    return [(a, b) for a, b in grids if a * b <= available]


def _pick(devices: Sequence[jax.Device], shape: tuple[int, int]) -> list[jax.Device]:
    """The devices for the grid, host by host, as many from each host if it can be."""
    used = math.prod(shape)
    hosts: dict[Any, list[jax.Device]] = {}
    for device in devices:
        hosts.setdefault(_host(device), []).append(device)
    share, rest = divmod(used, len(hosts))
    if rest or any(len(members) < share for members in hosts.values()):
        return list(itertools.chain(*hosts.values()))[:used]
    return [device for members in hosts.values() for device in members[:share]]


def _host(device: jax.Device) -> int:
    """What devices that are close to one another have in common.

    XLA numbers TPU slices, and the machines (or NVLink domains) of GPUs and CPUs by their
    boot ids, so that processes on one machine have one number, however many there are.
    """
    close = getattr(device, "slice_index", None)
    return device.process_index if close is None else close
