"""Workers: a node × local grid of workers over the available devices.

While tracing, `Workers.map` refuses a function in which workers would wait for each other
forever, and a `Shared` output that may differ between workers. `uniform.py` describes
the analysis and its one optimistic rule.
"""

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, get_args

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as Spec

from lsgd_jax._src.checks import check_option, check_positive_int
from lsgd_jax._src.exchange.around import Around
from lsgd_jax._src.exchange.beside import Order, PullsBeside, check_may_travel
from lsgd_jax._src.exchange.crew import Crew, Verdict
from lsgd_jax._src.exchange.diagnostics import check_not_misplaced
from lsgd_jax._src.exchange.exchange import Exchange
from lsgd_jax._src.exchange.loop import Loop
from lsgd_jax._src.exchange.loop_beside import LoopBeside
from lsgd_jax._src.layouts import Specs, spread
from lsgd_jax._src.shared import (
    WORKER_AXES,
    Shared,
    check_numbers,
    check_rows,
    one_worker,
    shared_flags,
)
from lsgd_jax._src.trees import Tree
from lsgd_jax._src.words import telling_words
from lsgd_jax._src.workers import by_default
from lsgd_jax._src.workers.device_grid import (
    check_inside,
    check_mesh,
    check_no_process_is_idle,
    device_grid,
    named_mesh,
    warn_of_idle_devices,
)
from lsgd_jax._src.workers.devices import reserve_threads
from lsgd_jax._src.workers.meetings import Meetings
from lsgd_jax._src.workers.members import Members, check_may_lose
from lsgd_jax._src.workers.spmd import Grid, compiled
from lsgd_jax._src.workers.transfer import (
    gathered,
    is_key,
    of_members,
    place,
    read,
    split,
)
from lsgd_jax._src.workers.twin import Twin, among, processes_of, turns


Keys = Literal["split", "copy"]


class Workers:
    """W = nodes × locals workers, placed on the devices of all processes.

    Worker i is local worker i mod locals of node i // locals. A tree of the workers has a
    leading axis of W on every leaf, sharded over the devices. Values that are equal on all
    workers stand in a `Shared` and have no such axis. With fewer devices than workers, each
    device holds several consecutive workers, and the numbers stay the same.

    Args:
      nodes: the number of groups of workers that are close to each other, usually hosts.
      locals: the number of workers per node. Defaults to as many as there are devices for.
      devices: the devices to use, all of them. Defaults to the largest grid of all
        processes' devices that divides nodes × locals, with each node's devices on one host
        if possible. A UserWarning names better counts if devices stay idle and steps are
        slower for it.
      mesh: a mesh of your own, in place of all of the above. Workers stand along its
        `axes`, and all its other axes are inside a worker. All axes are explicit
        (`jax.make_mesh`) or all are automatic. On explicit axes the types of arrays tell
        how they are sharded inside a worker, and the function of one worker sees these
        types.
      axes: one axis of the mesh, or two: nodes, and the workers of a node. Methods accept
        these names and the default names 'node' and 'local'.
      inside: the names and sizes of further mesh axes over which each worker is sharded.
        With ``{"fsdp": 4}`` each worker has 4 devices. These axes are automatic: the
        function of one worker is written as for one large device, with or without
        `jax.lax.with_sharding_constraint`, and `put` takes the specs of its leaves.
      debug: whether mapped functions check the states that they return, after each call,
        for an exchange whose parameters were changed behind it (`misplaced`). The check
        waits for every step to end, so steps no longer overlap with the host's work.

    Attributes:
      nodes, locals, num_workers: the grid and W.
      sizes: the sizes of the axes of the workers, by the names that methods may have.
      inside: the names and sizes of the axes inside a worker.
      mesh: the grid of devices, with the axes 'node', 'local' and those inside a worker. An
        axis along which devices hold several workers is called 'node_device' or
        'local_device'.
      sharding: the sharding of per-worker leaves (leading axis W).
      shared_sharding: the sharding of shared leaves.
      workers_per_device: how many workers each device (or group of devices) holds.
      owned: the workers with at least one device of this process, as a range.

    Raises:
      ValueError: a mesh beside counts or devices, a mesh with axes of several types, axes
        that the mesh does not have; a count below 1, devices that the workers do not divide
        over, a process without a worker, an axis inside a worker with a reserved name.

    >>> import jax.numpy as jnp
    >>> import lsgd_jax as lj
    >>> workers = lj.Workers(nodes=2, locals=4)
    >>> workers
    Workers(nodes=2, locals=4) on 8 cpu devices (2 x 4), 1 worker per device
    >>> params = workers.replicate({"w": jnp.ones(3)})
    >>> params["w"].shape
    (8, 3)
    """

    @telling_words
    def __init__(
        self,
        nodes: int = 1,
        locals: int | None = None,
        *,
        devices: Sequence[jax.Device] | None = None,
        inside: Mapping[str, int] | None = None,
        mesh: Mesh | None = None,
        axes: str | Sequence[str] | None = None,
        debug: bool = False,
    ):
        reserve_threads()
        if mesh is None and axes is None:
            self._grid, used = _over_devices(nodes, locals, devices, inside)
        elif (nodes, locals, devices, inside) == (1, None, None, None):
            self._grid, used = _on_mesh(mesh, axes)
        else:
            raise ValueError(
                "`mesh` and `axes` must stand in place of `nodes`, `locals`, `devices` and "
                "`inside`, which follow from the mesh"
            )
        self.debug = debug
        self._stand(used)

    def _stand(self, used: np.ndarray) -> None:
        """Sets what follows from the grid and its devices."""
        self.mesh = self._grid.mesh
        self.inside = dict(self._grid.inside)
        self.nodes = self._grid.nodes
        self.locals = self._grid.locals
        self.num_workers = self.nodes * self.locals
        self.sizes = {**self._grid.sizes, "node": self.nodes, "local": self.locals}
        self.sharding = self._grid.sharding()
        self.shared_sharding = self._grid.sharding(shared=True)
        each = math.prod(self.inside.values())
        self.workers_per_device = self.num_workers * each // used.size
        of_process = [d.process_index == jax.process_index() for d in used.flat]
        mine = np.reshape(of_process, [-1, each]).any(axis=1)
        rows = np.repeat(mine, self.workers_per_device).nonzero()[0]
        self.owned = range(rows[0], rows[-1] + 1) if rows.size else range(0)
        if len(self.owned) != rows.size:
            raise ValueError(
                "the devices of a process must stand next to one another in the grid, "
                f"got processes {[d.process_index for d in used.flat]}"
            )
        self._meetings = Meetings()
        self._twin: Twin | None = None  # of the loops that exchange beside
        self._crew: Crew | None = None  # of the loop whose processes may be lost
        self._connects_processes = len(processes_of(self.mesh.devices)) > 1
        self._pass_on = self._compile(lambda tree: tree)
        self._replicate_rows = jax.jit(lambda t: t, out_shardings=self.shared_sharding)

    def __repr__(self) -> str:
        per_device = self.workers_per_device
        each = math.prod(self.inside.values())
        inside = f", inside={self.inside}" if self.inside else ""
        return (
            f"Workers(nodes={self.nodes}, locals={self.locals}{inside}) on "
            f"{self.mesh.size} {self.mesh.devices.flat[0].platform} "
            f"device{'s' * (self.mesh.size > 1)} "
            f"({' x '.join(map(str, self.mesh.devices.shape))}), "
            f"{per_device} worker{'s' * (per_device > 1)} per "
            f"{f'{each} devices' if each > 1 else 'device'}"
        )

    def own(self) -> "Workers":
        """Returns the workers of this process, as a grid of their own.

        Its worker i is worker ``owned[i]``. No program of it sends a message to another
        process.

        Raises:
          ValueError: they are no nodes x locals.

        >>> import lsgd_jax as lj
        >>> lj.Workers(nodes=2, locals=2).own().num_workers
        4
        """
        own: Workers = object.__new__(Workers)
        own._grid = among(self._grid, {jax.process_index()})
        own.debug = self.debug
        own._stand(_devices_of(own._grid))
        return own

    # Placing trees

    def put(self, stacked: Tree, specs: Specs = None) -> Tree:
        """Places a tree with leading axis W: row i goes to the devices of worker i.

        With several processes every process passes all rows, or uses `put_owned`.

        Args:
          stacked: arrays (host or device, any dtype) of shape [W, ...]; a `Shared`
            inside is copied to every worker.
          specs: how leaves are sharded inside a worker: a `PartitionSpec` of the worker's
            own axes (``P(None, "fsdp")`` for a leaf of shape [W, a, b]), a prefix tree of
            such specs, or a function of (path, leaf) with the path written 'dense/kernel'
            and the leaf of one worker, such as `largest_dimension`. The shardings of a
            program, each a `NamedSharding` of one replica, may stand in place of specs: the
            axes of the workers in them are dropped. None: not sharded. The results of
            mapped functions follow: an optimizer's moments get the layout of the
            parameters.

        Returns:
          The same tree, placed on the devices in buffers of its own.

        Raises:
          ValueError: a leaf without a leading axis of W; specs that name no axis inside a
            worker or do not fit a leaf.
        """
        self._grid.check(stacked)
        return self._placed(stacked, specs, place)

    def put_owned(self, rows: Tree, specs: Specs = None) -> Tree:
        """Places a tree, with each process passing the rows of its own workers only.

        Args:
          rows: arrays of shape [len(owned), ...]: the rows of the workers in `owned`. If a
            worker is spread over several processes, each of them passes all of its row.
          specs: as for `put`.

        Returns:
          The placed tree with leading axis W.

        Raises:
          ValueError: a leaf without a leading axis of len(owned); specs as for `put`.
        """
        check_rows(rows, len(self.owned), "the workers of this process")

        def place_rows(x: Any, sharding: NamedSharding) -> jax.Array:
            shape = (self.num_workers, *np.shape(x)[1:])
            local = np.array(x)
            return jax.make_array_from_process_local_data(sharding, local, shape)

        return self._placed(rows, specs, place_rows)

    def replicate(self, tree: Tree, specs: Specs = None, keys: Keys | None = None) -> Tree:
        """Gives every worker a copy of one tree: leaves [...] become [W, ...].

        A `Shared` inside stays one.

        Args:
          tree: arrays and numbers of any shapes and dtypes.
          specs: as for `put`.
          keys: for random keys (`jax.random.key`): "split" gives worker i a key of its own,
            ``jax.random.split(key, W)[i]``, for dropout, noise and sampling. "copy" gives
            all workers the same one. Keys of uint32, as `jax.random.PRNGKey` makes them,
            cannot be told from numbers and are always copied.

        Raises:
          ValueError: other `keys`; as for `put`.
          UserWarning: without `keys`, a random key that is copied.

        >>> import jax, lsgd_jax as lj
        >>> workers = lj.Workers(nodes=1, locals=2)
        >>> state = workers.replicate({"rng": jax.random.key(0), "step": 0}, keys="split")
        >>> bool(state["rng"][0] == state["rng"][1])
        False
        """
        if keys is not None:
            check_option("keys", keys, get_args(Keys))
        elif self.num_workers > 1:
            _warn_of_copied_keys(tree)

        def place_copies(x: Any, sharding: NamedSharding) -> jax.Array:
            copies = np.broadcast_to(np.asarray(x), (self.num_workers, *np.shape(x)))
            return place(copies, sharding)

        def place_keys(x: jax.Array, sharding: NamedSharding) -> jax.Array:
            return place(jax.random.key_data(split(x, self.num_workers)), sharding)

        own = place_keys if keys == "split" else None
        return self._placed(tree, specs, place_copies, leading_axes=0, place_keys=own)

    def share(self, tree: Tree, specs: Specs = None) -> Shared:
        """Puts one tree on every worker, for all workers to read."""
        return self.put(Shared(tree), specs)

    def fetch(self, tree: Tree) -> Tree:
        """Returns the tree as host arrays, with all workers' rows, in every process.

        Random keys come as key arrays, which `put` accepts. With several processes the call
        communicates, so all processes must make it.

        In a loop that goes on when processes are lost (see `loop`), it returns the rows of
        the workers that live, and takes losses and other small arrays.
        """
        if self._crew is not None and self._crew.verdict is not None:
            return of_members(self._crew.gather, tree)
        if self._connects_processes:
            if self._twin is not None:
                tree = self._twin.back(tree)
            tree = gathered(tree, self._replicate_rows)
        return jax.tree.map(read, tree)

    # Running per-worker functions

    def map(
        self,
        fn: Callable,
        donate: int | Iterable[int] = (),
        static: str | Iterable[str] = (),
    ) -> Callable:
        """Turns a function written for one worker into a jitted one over all workers.

        One rule of the check for deadlocks is optimistic: it assumes that integer and bool
        SCALARS of each worker, and the scalars of `optax.inject_hyperparams`, are equal on
        all workers, because optax's wrappers count steps in such leaves.

        Args:
          fn: takes and returns trees of ONE worker's arrays. The axis names 'node' and
            'local' are bound inside, so that `lsgd_jax` transformations and collectives
            work. A `Shared` argument arrives as `Shared`.
          donate: the positions of arguments whose buffers may be reused.
          static: the names of arguments that are hashable Python values instead of arrays,
            equal in all processes, such as ``"train"``. fn is compiled for each value.

        Returns:
          A `jax.jit` function of the same signature. Every array has a leading axis of W,
          in and out, except those in a `Shared`. Python scalars that fn returns become
          arrays. Each compilation traces fn once, for one worker, and checks that it cannot
          hang. A UserWarning says once that the workers of a node never meet, though an
          exchange reaches other nodes.

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

        return self._checked(self._compile(fn, donate, static))

    def loop(
        self,
        step: Around,
        donate: int | Iterable[int] = (),
        static: str | Iterable[str] = (),
        beside: bool | None = None,
        min_workers: int | None = None,
    ) -> Callable:
        """Turns a step with a method around it into one for a loop over the steps.

        The step is compiled once, as it was before. Each exchange is a small program of its
        own, which runs after the steps on which it is due; equal ones share a program. The
        numbers and states are those of ``map(step)``.

        The loop counts the steps on the host: from the state of the first call, and of any
        call whose state is not the one that was returned last, such as a restored one. A
        method with a `delay`, or whose rule reads the parameters before the step (`dpsgd`,
        `sgp`, `parle`, …, or ``check="every_step"``), needs whole steps: one program for
        each phase.

        Programs are compiled in a thread while earlier steps run, the next one first. If a
        compilation fails, the step that needs the program raises its error before it
        begins. A process that ends meanwhile waits for the program that is being compiled.

        With ``beside=True`` the messages of pulls with a `delay` travel on CPU devices
        beside those that train, one for each, while whole steps run. The state of such a
        pull stands there: anchor, momentum and target leave the memory of the accelerator.
        No step waits for a message before it lands, and the attribute `waited` of the loop
        has the seconds for which the host has waited then. The numbers are those of the
        same delay inside the step, up to roundings of another program. On CPUs, give each
        process twice as many devices as it trains on (`emulate_devices`,
        ``jax_num_cpu_devices``). A single process without such devices exchanges on those
        that train.

        With `min_workers`, too, a process that is lost does not end the others. jax calls
        it lost, all agree that its message does not count, and the message leaves again
        among those that live; means, leaders and medians are theirs. A process that starts
        again with its number comes in after the next message: it takes anchors, momenta and
        the step from the others, keeps its own optimizer state, and moves to the next
        target whole. Steps go on meanwhile, up to the landing of the message. `LoopBeside`
        has what else such a loop needs. It takes several processes with
        ``jax_enable_recoverability``, whose process 0, with jax's service, must live, and a
        delay for all pulls between processes. Each change takes CPU devices that no message
        has connected: with k for each device that trains, n processes go on after k^n - 1
        changes. A process trains on one device, and a node is lost as a whole.

        Args:
          step: what `around` returned.
          donate: as for `map`; the exchanges never reuse their arguments' buffers.
          static: as for `map`.
          beside: whether messages of pulls with a `delay` travel beside the steps. Defaults
            to `travels_beside`.
          min_workers: goes on when processes are lost, with at least so many workers, and
            takes back those that start again; with `beside`. Otherwise a lost process ends
            all of them.

        Returns:
          A function of the same signature as ``map(step)``, not to be called under
          `jax.jit`.

        Raises:
          ValueError: a step that is not from `around`, or of a method with steps without a
            gradient (`palsgd`); with `beside`, a method without a delay, a rule that needs
            the parameters before the step, fragments that share a program, a process with
            too few CPU devices; with `min_workers`, processes that jax ends with a lost
            one, messages between processes that have no delay, a graph of rounds.

        >>> import jax.numpy as jnp
        >>> import lsgd_jax as lj
        >>> workers = lj.Workers(nodes=1, locals=2)
        >>> update = lambda x, goal: (x - 0.5 * (x - goal), (x - goal) ** 2)
        >>> train = lj.around(update, lj.local_sgd(period=2), params=(), result=0, loss=1)
        >>> run = workers.loop(train)
        >>> state = workers.map(train.init)(workers.put(jnp.array([0.0, 8.0])))
        >>> for _ in range(2):
        ...     state, loss = run(state, workers.put(jnp.array([2.0, 4.0])))
        ...     print(state.state.tolist())
        [1.0, 6.0]
        [3.25, 3.25]
        """
        if not isinstance(step, Around):
            raise ValueError(
                "`step` must be a step with a method around it, `lj.around(step, method)`, "
                f"got {step!r}; `map` compiles any other function"
            )
        options = {"donate": donate, "static": static}
        crew_of = None
        if min_workers is not None:
            if not beside:
                raise ValueError(
                    "`min_workers` must be left out unless messages travel beside the "
                    f"steps (`beside=True`), got min_workers={min_workers}"
                )
            methods = [method.method for method in step.methods]
            crew_of = self._crew_of(methods, self._grid, min_workers)
        if beside is None:
            methods = [method.method for method in step.methods]
            beside = by_default.travels_beside(methods, self._grid)
        if beside:
            twin = self._devices_beside()
            run: Loop = LoopBeside(step, self._compile, self.sizes, options, twin, crew_of)
        else:
            run = step.loop(self._compile, sizes=self.sizes, **options)
        if self.debug:
            run.check = functools.partial(check_not_misplaced, read_all=self.fetch)
        return run

    def beside(self, method: Exchange, min_workers: int | None = None) -> PullsBeside:
        """Returns the delayed pulls of a method, to exchange beside the steps of a chain.

        `loop` does so for a step from `around`. This is for a loop of one's own, which
        takes steps with `Exchange.defer` and exchanges with `Exchange.arrive`.

        Args:
          method: the last member of an optax chain.
          min_workers: as for `loop`. Each process then steps with the workers of `own`
            alone, and `PullsBeside.meet` begins.

        Raises:
          ValueError: a method without a delay, or that needs whole steps; a process with
            too few CPU devices; as for `min_workers` of `loop`.

        >>> import jax
        >>> import jax.numpy as jnp
        >>> import lsgd_jax as lj
        >>> workers = lj.Workers(nodes=1, locals=2)
        >>> method = lj.local_sgd(period=2, delay=1)
        >>> x = workers.put(jnp.array([0.0, 8.0]))
        >>> state = workers.map(method.init)(x)
        >>> pulls = workers.beside(method)
        >>> pulls.begin(state, x[0])
        >>> at_home = pulls.at_home(state)
        >>> jax.tree.structure(pulls.whole(at_home)) == jax.tree.structure(state)
        True
        """
        check_may_travel([method])
        if min_workers is None:
            twin = self._devices_beside()
            return PullsBeside(method.pulls, twin, Order(twin))
        home = among(self._grid, {jax.process_index()})
        crew_of = self._crew_of([method], home, min_workers)
        twin = Twin(home, self._meetings, self._grid)
        pulls = PullsBeside(method.pulls, twin, Order(twin))
        crew_of([pulls])
        return pulls

    def travels_beside(self, method: Exchange) -> bool:
        """Whether delayed messages of a method travel beside the steps by default.

        They do if they take a link between processes, the method allows it, and each
        process has a CPU device for each of its devices that train. On CPUs a process must
        train on one device: XLA starts no step on several of them while a message waits.
        On accelerators all delayed messages must take a link between hosts, or slices of
        TPUs, and have a delay of more than one step: XLA hides others inside the step.

        >>> import lsgd_jax as lj
        >>> lj.Workers(nodes=1, locals=2).travels_beside(lj.diloco(period=8, delay=4))
        False
        """
        return by_default.travels_beside([method], self._grid)

    def _devices_beside(self) -> Twin:
        if self._twin is None:
            self._twin = Twin(self._grid, self._meetings)
        return self._twin

    def _crew_of(
        self, methods: Sequence[Exchange], home: Grid, min_workers: int
    ) -> Callable[[Sequence[PullsBeside]], Crew]:
        """Returns what makes the crew of a loop whose processes may be lost.

        home: the workers that the programs of the devices that train have.

        Raises:
          ValueError: they may not.
        """
        check_positive_int("min_workers", min_workers)
        if min_workers > self.num_workers:
            raise ValueError(
                f"`min_workers` must be at most the number of workers, {self.num_workers}, "
                f"got min_workers={min_workers}"
            )
        check_may_lose(methods, self._grid)
        members = Members.of_jax()

        def twin_of(verdict: Verdict) -> Twin | None:
            own = among(self._grid, verdict.members)
            if verdict.changes >= turns(own.mesh.devices):
                return None
            self._twin = Twin(home, self._meetings, own, verdict.changes)
            return self._twin

        def crew_of(senders: Sequence[PullsBeside]) -> Crew:
            self._crew = Crew(members, twin_of, Order, min_workers, senders)
            return self._crew

        return crew_of

    def _checked(self, mapped: Callable) -> Callable:
        """The function, with a check of the states that it returns, if `debug` says so."""
        if not self.debug:
            return mapped

        @functools.wraps(mapped)
        def checked(*args, **named):
            outputs = mapped(*args, **named)
            check_not_misplaced(outputs, self.fetch)
            return outputs

        return checked

    def _compile(
        self,
        fn: Callable,
        donate: int | Iterable[int] = (),
        static: str | Iterable[str] = (),
    ) -> Callable:
        donate = (donate,) if isinstance(donate, int) else tuple(donate)
        static = (static,) if isinstance(static, str) else tuple(static)
        return compiled(fn, self._grid, self._meetings, donate, static)

    def _placed(
        self,
        tree: Tree,
        specs: Specs,
        place_rows: Callable[[Any, NamedSharding], jax.Array],
        leading_axes: int = 1,
        place_keys: Callable[[jax.Array, NamedSharding], jax.Array] | None = None,
    ) -> Tree:
        """Places the tree on the devices; random keys travel as the numbers they hold.

        place_keys: places the numbers of all workers' keys. Defaults to `place_rows` of the
          numbers of the given ones.
        """

        def place_leaf(x: Any, shared: bool, spec: Spec | None = None) -> jax.Array:
            if not is_key(x):
                sharding = self._grid.sharding(spec, shared)
                return place(x, sharding) if shared else place_rows(x, sharding)
            if place_keys is None or shared:
                numbers = place_leaf(jax.random.key_data(x), shared)
            else:
                numbers = place_keys(x, self._grid.sharding())
            keys = jax.random.wrap_key_data(numbers, impl=jax.random.key_impl(x))
            # The keys that a jit returns have a sharding of a special type. Passing these
            # keys through a jit makes their type equal to that of later results.
            return self._pass_on(Shared(keys)).value if shared else self._pass_on(keys)

        check_numbers(tree)
        leaves, treedef = jax.tree.flatten(tree)
        shapes = one_worker(tree, leading_axes)
        each = spread(specs, tree, self.inside, self._grid.axes, shapes)
        return treedef.unflatten(map(place_leaf, leaves, shared_flags(tree), each))


def _warn_of_copied_keys(tree: Tree) -> None:
    """Warns of the first random key of which all workers would have the same one."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    for (path, leaf), shared in zip(leaves, shared_flags(tree)):
        if is_key(leaf) and not shared:
            warnings.warn(
                "`replicate` gives all workers the same random key at "
                f"{jax.tree_util.keystr(path) or 'the top'}, with which they draw the same "
                "dropout masks and the same noise: keys='split' gives each worker its own "
                "key, keys='copy' means it",
                stacklevel=3,  # the call of `replicate`
            )
            return


def _over_devices(
    nodes: int,
    locals: int | None,
    devices: Sequence[jax.Device] | None,
    inside: Mapping[str, int] | None,
) -> tuple[Grid, np.ndarray]:
    """The grid of nodes x locals workers, and its devices [node, local, *inside]."""
    check_positive_int("nodes", nodes)
    inside = check_inside(inside)
    each = math.prod(inside.values())
    if locals is None:
        available = len(jax.devices() if devices is None else devices)
        locals = max(1, available // (nodes * each))
    check_positive_int("locals", locals)
    nodes = int(nodes)
    locals = int(locals)
    chosen = device_grid(nodes, locals, devices, tuple(inside.values()))
    if devices is None:
        check_no_process_is_idle(chosen, jax.process_count())
        warn_of_idle_devices(nodes, locals, chosen, jax.device_count())
    mesh, slots = named_mesh(chosen, nodes, locals, inside)
    axes = mesh.axis_names[: len(WORKER_AXES)]
    return Grid(mesh, axes, slots, nodes, locals, inside), chosen


def _on_mesh(mesh: Any, axes: Any) -> tuple[Grid, np.ndarray]:
    """Returns the grid of workers along some axes of a mesh, and its devices."""
    names = check_mesh(mesh, axes)
    nodes = mesh.shape[names[0]]
    locals = mesh.shape[names[1]] if names[1:] else 1
    inside = {name: n for name, n in mesh.shape.items() if name not in names}
    called = dict(zip(WORKER_AXES, names))
    grid = Grid(mesh, names, [], nodes, locals, inside, called)
    return grid, _devices_of(grid)


def _devices_of(grid: Grid) -> np.ndarray:
    """The devices of a grid: [*axes of workers, *inside]."""
    mesh = grid.mesh
    order = [mesh.axis_names.index(name) for name in (*grid.axes, *grid.inside)]
    return mesh.devices.transpose(order)
