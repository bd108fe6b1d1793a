"""The message form of a group: the kernel's rules among asynchronous workers.

A `Rule` communicates in one place, `agree`, and only through its group. `Agreement` traces
`kernel.send` with a group whose messages are equations of a `SegmentedJaxpr`.
`Conversation` runs its parts and sends its messages. So every rule runs unchanged on any
engine, and messages are encoded and decoded in compiled parts, on the worker's device.
"""

import functools
import itertools
from collections.abc import Awaitable, Callable, Hashable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lsgd_jax._src.asynchronous.engine.sharding import placed_like
from lsgd_jax._src.asynchronous.engine.transport import Transport
from lsgd_jax._src.asynchronous.methods.driver import Peers
from lsgd_jax._src.asynchronous.methods.program import Message, SegmentedJaxpr, ask
from lsgd_jax._src.exchange import kernel
from lsgd_jax._src.exchange.kernel import Pull, PullState, Target
from lsgd_jax._src.layouts import on_one_device
from lsgd_jax._src.trees import Tree, mean_of, widened
from lsgd_jax._src.wire.collectives import Permutation
from lsgd_jax._src.wire.group import sources_of


SMALL = 64  # elements; arrays up to this size travel with the coordinator's round


class MessageChannel:
    """One worker's channel, while the program of its messages is traced; see `Channel`.

    Args:
      size: the number of workers in the group.
      index: this worker's index.
    """

    is_all = True  # no value is stored once for several workers
    transposes = False

    def __init__(self, size: int, index: Any):
        self.size = size
        self.index = jnp.asarray(index, jnp.int32)

    def gather(self, tree: Tree) -> Tree:

        def row(x):
            return jax.ShapeDtypeStruct((self.size, *x.shape), x.dtype)

        return ask("gather", tree, jax.tree.map(row, tree))

    def broadcast(self, tree: Tree, source: Array) -> Tree:
        return ask("broadcast", (tree, source), tree)

    def sum(self, tree: Tree, where: Array, *, mean: bool) -> tuple[Tree, Array]:
        wide = widened(tree)
        sums, count = ask("sum", (wide, where), (wide, jnp.float32(0)))
        return (mean_of(sums, count) if mean else sums), count

    def permute(self, tree: Tree, permutation: Permutation) -> Tree:
        if not isinstance(permutation, Array):
            ((permutation,),) = sources_of([[permutation]], self.size)
        return ask("permute", (tree, permutation), tree)


class Agreement:
    """The programs of a pull's `kernel.send`, shared by all workers of a process.

    Attributes:
      send: `kernel.send` for a worker's index in the group and the further arguments. It
        can only be traced. It returns the target and the leaves of the state, None for each
        left unchanged.
    """

    def __init__(self, pull: Pull, size: int, grid: tuple[int, int]):
        self._pull = pull
        self._size = size
        self._grid = grid
        self.send = jax.jit(self._traced)
        self._programs: dict[Any, tuple[SegmentedJaxpr, Any]] = {}

    async def __call__(
        self, answered: Callable[[Message], Awaitable[Tree]], *given: Any
    ) -> tuple[Target, list[Any]]:
        """Returns the result of `send`; `answered` sends a message, returns its answer."""
        traced = self.send.trace(*given)
        if traced.jaxpr not in self._programs:
            structure = jax.tree.structure(traced.out_info)
            self._programs[traced.jaxpr] = SegmentedJaxpr(traced.jaxpr), structure
        program, structure = self._programs[traced.jaxpr]
        return structure.unflatten(await program.run(jax.tree.leaves(given), answered))

    def _traced(self, position, x, y, state, is_finite, t):
        channel = MessageChannel(self._size, position)

        def send() -> tuple[Target, PullState]:
            target, renewed, _ = kernel.send(self._pull, channel, x, y, state, is_finite, t)
            return target, renewed

        target, renewed = alone(send, *self._grid)
        leaves = zip(jax.tree.leaves(renewed), jax.tree.leaves(state))
        return target, [None if new is old else new for new, old in leaves]


_agreement = functools.lru_cache(maxsize=64)(Agreement)


def alone(fn: Callable[[], Any], nodes: int = 1, locals: int = 1) -> Any:
    """Returns fn(), with the workers' axes bound although only one worker is there."""

    def along(fn, name, size):
        return jax.vmap(fn, in_axes=None, out_axes=None, axis_name=name, axis_size=size)

    inner = along(lambda _: fn(), "local", locals)
    with on_one_device():
        return along(inner, "node", nodes)(jnp.int32(0))


class Conversation:
    """The messages of one pull between this worker and its group.

    Args:
      transport: this worker's.
      pull: the pull.
      number: of the pull in its exchange; the same for the whole group.
    """

    def __init__(self, transport: Transport, pull: Pull, number: int):
        position = transport.position
        self._transport = transport
        self._group = position.group(pull.rule.axes)
        self._name = (number, self._group[0])
        self._me = position.index
        grid = position.nodes, position.locals
        self._agreement = _agreement(pull, len(self._group), grid)
        self._peers = Peers(self._group)

    async def agree(
        self,
        number: int,
        here: set[int],
        x: Tree,
        y: Tree,
        state: PullState,
        is_finite: Any,
        t: Any,
    ) -> tuple[Target, Callable[[PullState], PullState]]:
        """Runs `kernel.send`; returns the target, and the change of the pull's state.

        The change is a function of the state, because the worker may have taken steps in
        the meantime: leaves that `kernel.send` does not change stay as they are then.

        Args:
          number: of this agreement.
          here: the workers that take part. Absent workers are removed from it, so that no
            later message of the same agreement waits for a worker that comes back in
            between.
          x, y, state, is_finite, t: as for `kernel.send`.
        """
        sent = itertools.count()

        async def answered(message: Message) -> Tree:
            key = (self._name, number, next(sent))
            members = [i for i in self._group if i in here]
            answer, came = await self._sent(key, members, message)
            here.difference_update(set(members).difference(came))
            return answer

        position = np.int32(self._group.index(self._me))
        target, changed = await self._agreement(
            answered, position, x, y, state, is_finite, t
        )
        return target, functools.partial(_renewed, changed)

    async def _sent(self, key: Hashable, members: list[int], message: Message) -> Any:
        """Sends a message; returns its answer, and the members that took part."""
        content = message.content
        collectives = self._transport.collectives
        if message.kind == "gather":
            return await self._gather(key, members, jax.tree.map(np.asarray, content))
        like = content[0]
        tree, how = jax.tree.map(np.asarray, content)
        if message.kind == "sum":
            total, count, came = await collectives.all_reduce(key, tree, bool(how), members)
            return (placed_like(like, total), np.float32(count)), came
        if message.kind == "broadcast":
            source = self._group[int(how)]
            got = await collectives.broadcast(key, tree, source, members)
        else:
            got = await self._permute(key, tree, how)
        return placed_like(like, got), members

    async def _gather(
        self, key: Hashable, members: list[int], tree: Tree
    ) -> tuple[Tree, dict[int, Any]]:
        collectives = self._transport.collectives
        # A round of the coordinator carries small content, and saves a request to each
        # peer.
        is_small = sum(x.size for x in jax.tree.leaves(tree)) <= SMALL
        gather = collectives.gather_small if is_small else collectives.all_gather
        rows = await gather(key, tree, members)

        # The row of a worker that has failed: nan, or 0 for integers.
        def fill(x):
            return 0 if x.dtype == bool or x.dtype.kind in "iu" else np.nan

        absent = jax.tree.map(lambda x: np.full_like(x, fill(x)), tree)
        trees = [rows.get(i, absent) for i in self._group]
        return jax.tree.map(lambda *x: np.stack(x), *trees), rows

    async def _permute(self, key: Hashable, tree: Tree, sources: np.ndarray) -> Tree:
        position = self._group.index(self._me)
        got = None
        # Posted before anything is fetched: two workers that fetch from each other would
        # wait.
        if position in sources:
            self._transport.mailbox.post(key, tree)
        if sources[position] >= 0:
            peer = self._group[sources[position]]
            self._peers.count_choice()
            if self._peers.is_tried(peer):
                fetch = self._transport.ask(peer, "fetch", key)
                got = await self._peers.answer(peer, fetch)
        return jax.tree.map(np.zeros_like, tree) if got is None else got


def _renewed(changed: list[Any], state: PullState) -> PullState:
    """Returns the state with the leaves that an agreement has changed."""
    leaves, treedef = jax.tree.flatten(state)
    after = [old if new is None else new for old, new in zip(leaves, changed)]
    return jax.tree.unflatten(treedef, after)
