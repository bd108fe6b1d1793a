"""Rounds of a budget of steps in each of several processes, counted at a store.

For processes that one launcher starts and `jax.distributed` joins: each steps on its own
devices, without any collective, and all meet in one program over all devices.
"""

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from lsgd_jax._src.asynchronous.budget import BudgetState, OnBudget
from lsgd_jax._src.transfer import is_key, map_flagged
from lsgd_jax._src.trees import Tree
from lsgd_jax._src.workers import Workers


class Store(Protocol):
    """Where the processes count the steps that they take."""

    def increment(self, key: str, amount: int) -> int:
        """Adds to a count, which begins at 0, at once for all: what it is then."""
        ...


class Counts:
    """The store of a process by itself.

    >>> counts = Counts()
    >>> counts.increment("a", 2), counts.increment("a", 1)
    (2, 3)
    """

    def __init__(self):
        self._counts: dict[str, int] = {}

    def increment(self, key: str, amount: int) -> int:
        """See `Store`."""
        self._counts[key] = self._counts.get(key, 0) + amount
        return self._counts[key]


class Rounds:
    """What one process does in the rounds of a budget.

    A round ends when all workers together have taken W times the steps per worker that it
    is for: each process claims every step before it takes it, and once the budget is used
    up it goes to the meeting, where it waits for those that are in a step. Where rounds end
    and which is the last one is the same in all processes and depends on no step count of
    their own, so that none is left waiting. In each round a process takes a step at least.

    Each round has a key of its own at the store.

    Args:
      workers: the grid, over the devices of all processes; not sharded inside a worker.
      tx: the exchange, of `on_budget`.
      store: where steps are counted, reached by all processes; None: by one process.
      name: what the keys begin with; another one for every `Rounds` of a store.

    Attributes:
      local: this process's workers alone, on its own devices: what steps are mapped over.

    >>> import jax.numpy as jnp
    >>> import optax
    >>> import lsgd_jax as lj
    >>> exchange = lj.asynchronous.on_budget(lj.lsgd(0.5, 0.5, 2, 2, loss_window=1))
    >>> tx = optax.chain(optax.sgd(1.0), exchange)
    >>> workers = lj.Workers(nodes=1, locals=2)
    >>> rounds = lj.asynchronous.Rounds(workers, exchange)
    >>> def step(x, state, loss):
    ...     u, state = tx.update(jnp.ones_like(x), state, x, value=loss)
    ...     return lj.apply_updates(x, u), state
    >>> step = rounds.local.map(step)
    >>> x, loss = workers.put((jnp.array([8.0, 4.0]), jnp.array([1.0, 2.0])))
    >>> state, loss = workers.map(tx.init)(x), rounds.enter(loss)
    >>> for until in rounds.ends(0, steps=4):
    ...     mine = rounds.enter((x, state))
    ...     for _ in rounds.claims(until):
    ...         mine = jax.block_until_ready(step(*mine, loss))
    ...     x, state = rounds.meet(*rounds.leave(mine), until)
    ...     print(until, x.tolist())
    2 [6.0, 5.0]
    4 [4.0, 3.75]
    """

    def __init__(
        self,
        workers: Workers,
        tx: OnBudget,
        store: Store | None = None,
        name: str = "budget",
    ):
        if workers.inside:
            raise ValueError(
                "workers that share a budget of steps must not be sharded inside, got "
                f"inside={workers.inside}"
            )
        self._workers, self._tx, self._name = workers, tx, name
        self._store: Store = Counts() if store is None else store
        mine = [
            device
            for device in workers.mesh.devices.flat
            if device.process_index == jax.process_index()
        ]
        self.local = Workers(1, len(workers.owned), devices=mine)
        self._begun, self._before = 0, 0  # how often, and where the round in progress began
        self._meetings: dict[tuple[bool, ...], Callable] = {}

    # The rounds

    def ends(self, step: int, steps: int) -> Iterator[int]:
        """After how many steps per worker each round ends that is left after some.

        All processes ask for it equally often.
        """
        self._begun += 1
        while step < steps:
            self._before = step
            step = min(steps, step - step % self._tx.period + self._tx.period)
            yield step

    def claims(self, until: int) -> Iterator[int]:
        """Yields as often as this process may take a step in the round that ends there.

        A step must be over before the next one is claimed.
        """
        each, taken = len(self.local.owned), 0
        budget = (until - self._before) * self._workers.num_workers
        key = f"{self._name}/{self._begun}/{until}"
        while self._store.increment(key, each) - each < budget or not taken:
            yield taken
            taken += 1

    def is_due(self, until: int) -> bool:
        """Whether anything is exchanged at the meeting at the end of a round."""
        return any(until % pull.every == 0 for pull in self._tx.pulls)

    def meet(self, params: Tree, opt_state: Any, until: int) -> tuple[Tree, Any]:
        """All workers' parameters and state after the meeting at the end of a round.

        All processes call it; takes the buffers of what it is given.
        """
        due = tuple(until % pull.every == 0 for pull in self._tx.pulls)
        if due not in self._meetings:

            def meeting(params, opt_state, t):
                return self._tx.meet(params, opt_state, until, t)

            self._meetings[due] = self._workers.map(meeting, donate=(0, 1))
        t = self._workers.share(jnp.int32(until))
        return self._meetings[due](params, opt_state, t)

    # Between the devices of all and those of this process

    def enter(self, tree: Tree) -> Tree:
        """Of a tree over all workers this process's rows, on the same memory."""
        local = self.local

        def rows(x: jax.Array, shared: bool) -> jax.Array:
            if is_key(x):
                raise ValueError("random keys cannot change hands, pass their data")
            shape = x.shape if shared else (local.num_workers, *x.shape[1:])
            return _of_shards(x, shape, local.replicated if shared else local.sharding)

        return map_flagged(rows, tree)

    def leave(self, tree: Tree) -> Tree:
        """Of a tree over this process's workers that over all, on the same memory.

        All processes pass theirs; what is shared must be the same.
        """
        workers = self._workers

        def all_rows(x: jax.Array, shared: bool) -> jax.Array:
            shape = x.shape if shared else (workers.num_workers, *x.shape[1:])
            return _of_shards(x, shape, workers.replicated if shared else workers.sharding)

        return map_flagged(all_rows, tree)


def _of_shards(x: jax.Array, shape: tuple[int, ...], sharding: Any) -> jax.Array:
    shards = {shard.device: shard.data for shard in x.addressable_shards}
    mine = [shards[d] for d in sharding.addressable_devices_indices_map(shape)]
    return jax.make_array_from_single_device_arrays(shape, sharding, mine)


def steps_taken(opt_state: Any) -> Any:
    """int32 [W], the steps that each worker has taken itself on a budget; None without one.

    Works under `jax.jit` as well.
    """
    mine = lambda node: isinstance(node, BudgetState)
    found = filter(mine, jax.tree.leaves(opt_state, is_leaf=mine))
    return next((state.taken for state in found), None)
