"""The message form of a group: the kernel's rules, cut where they speak.

A `Rule` communicates in one place, `agree`, and only through its group. `Agreement` traces
`kernel.send` up to the first message, compiles that part, has the message travel, and
traces again with the answer up to the next message. So every rule runs as it is, on any
engine, and messages are encoded and decoded in the compiled parts, on the worker's device.
"""

import dataclasses
import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from lsgd_jax._src import kernel
from lsgd_jax._src.kernel import Pull, PullState, Target
from lsgd_jax._src.layouts import on_one_device
from lsgd_jax._src.trees import Tree, mean_of, widen


Kind = Literal["gather", "broadcast", "sum", "permute", "choose"]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["content"],
    meta_fields=["kind", "static"],
)
@dataclasses.dataclass(frozen=True)
class Message:
    """A message of a rule to its group; a compiled stage of the rule may return it.

    Attributes:
      kind: 'gather' (x) -> x of all; 'broadcast' (tree, source) -> tree; 'sum'
        (tree, where) -> (sums, count); 'permute' (tree) -> tree; 'choose' (r) -> int.
      static: the permutation, which is known while tracing.
      content: its arrays.
    """

    kind: Kind
    static: Any
    content: Any


class _Spoken(Exception):
    """Ends a trace at a message that has no answer yet."""

    def __init__(self, message: Message):
        super().__init__(message.kind)
        self.message = message


class MessageChannel:
    """One worker's channel, with the answers that are there so far; see `group.Channel`.

    Args:
      size: the number of workers in the group.
      index: this worker's index.
      answers: to its messages, in order.
    """

    is_all = True  # no value is stored once for several workers

    def __init__(self, size: int, index: Any, answers: Sequence[Any]):
        self.size, self.index = size, jnp.asarray(index, jnp.int32)
        self._answers = iter(answers)

    def gather(self, x: Array) -> Array:
        return self._say("gather", x)

    def broadcast(self, tree: Tree, source: Array) -> Tree:
        return self._say("broadcast", (tree, source))

    def sum(self, tree: Tree, where: Array, mean: bool) -> tuple[Tree, Array]:
        sums, count = self._say("sum", (widen(tree), where))
        return (mean_of(sums, count) if mean else sums), count

    def permute(self, tree: Tree, permutation: Any) -> Tree:
        return self._say("permute", tree, tuple(permutation))

    def switch(self, r: Array, branches: Sequence[Callable], operand: Any) -> Any:
        return branches[self._say("choose", r)](operand)

    def _say(self, kind: Kind, content: Any, static: Any = None) -> Any:
        for answer in self._answers:
            return answer
        raise _Spoken(Message(kind, static, content))


class Agreement:
    """`kernel.send` of one worker, a message at a time.

    Args:
      pull: the pull.
      group: the indices of the workers of its group, in order.
      index: this worker's.
      grid: (nodes, locals).
    """

    def __init__(self, pull: Pull, group: Sequence[int], index: int, grid: tuple[int, int]):
        self._position = np.int32(group.index(index))
        self._stages = _stages(pull, len(group), grid)

    async def run(
        self,
        send: Callable[[int, Message], Awaitable[Any]],
        x: Tree,
        y: Tree,
        state: PullState,
        is_finite: Any,
        t: Any,
    ) -> tuple[Target, Callable[[PullState], PullState]]:
        """(target, renew): the target, and the change of the pull's state.

        renew: state -> state. Leaves that `agree` does not change stay as they are when it
        is called, because the worker has taken steps meanwhile.

        Args:
          send: sends the n-th message of this agreement, and returns its answer.
          x, y, state, is_finite, t: as for `kernel.send`.
        """
        chosen: tuple = ()  # for each answer the int that was chosen, None if it is arrays
        answers: list[Any] = []
        while True:
            stage = self._stages.after(chosen)
            result = stage(self._position, answers, x, y, state, is_finite, t)
            if not isinstance(result, Message):
                target, changed = result
                return target, _renewing(changed)
            answer = await send(len(chosen), result)
            is_choice = result.kind == "choose"
            chosen += (answer if is_choice else None,)
            answers.append(() if is_choice else answer)


class _Stages:
    """The stages of a pull's agreement, compiled once for all workers of a process."""

    def __init__(self, pull: Pull, size: int, grid: tuple[int, int]):
        self._pull, self._size, self._grid = pull, size, grid
        self._stages: dict[tuple, Callable] = {}

    def after(self, chosen: tuple) -> Callable:
        """The compiled function up to the next message, which it returns, or to the end.

        At the end it returns the target and the leaves of the state, None for each that
        has not changed.
        """
        if chosen not in self._stages:
            self._stages[chosen] = jax.jit(functools.partial(self._stage, chosen))
        return self._stages[chosen]

    def _stage(self, chosen, position, answers, x, y, state, is_finite, t):
        given = [a if c is None else c for a, c in zip(answers, chosen)]
        channel = MessageChannel(self._size, position, given)
        try:
            send = lambda: kernel.send(self._pull, channel, x, y, state, is_finite, t)
            target, renewed = alone(lambda: send()[:2], *self._grid)
        except _Spoken as spoken:
            return spoken.message
        leaves = zip(jax.tree.leaves(renewed), jax.tree.leaves(state))
        return target, [None if new is old else new for new, old in leaves]


_stages = functools.lru_cache(maxsize=64)(_Stages)


def _renewing(changed: list[Any]) -> Callable[[Any], Any]:
    def renew(state: Any) -> Any:
        leaves, treedef = jax.tree.flatten(state)
        after = [old if new is None else new for old, new in zip(leaves, changed)]
        return jax.tree.unflatten(treedef, after)

    return renew


def alone(fn: Callable[[], Any], nodes: int = 1, locals: int = 1) -> Any:
    """fn(), where the workers' axes are bound although only one worker is there."""
    along = lambda fn, name, size: jax.vmap(
        fn, in_axes=None, out_axes=None, axis_name=name, axis_size=size
    )
    inner = along(lambda _: fn(), "local", locals)
    with on_one_device():
        return along(inner, "node", nodes)(jnp.int32(0))
