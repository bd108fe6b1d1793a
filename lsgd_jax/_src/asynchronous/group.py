"""A group whose messages travel through ports: the kernel's rules, cut where they talk.

A `Rule` communicates in one place, `agree`, and only through its group. `Agreement` traces
it up to its first message, compiles what leads there, has the message travel, and traces it
again with the answer up to the next one. So every rule runs as it is, on any engine.
"""

import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from lsgd_jax._src.asynchronous.place import Place
from lsgd_jax._src.collectives import Group
from lsgd_jax._src.rule import Rule
from lsgd_jax._src.trees import Tree, mean_of


class Message(NamedTuple):
    """What a rule says to its group.

    Attributes:
      kind: 'elect' (score) -> (leader, found); 'broadcast' (tree, source) -> tree;
        'sum' (tree, where) -> (sums, count); 'permute' (tree) -> tree; 'push'
        (tree, weight, r) -> (sums, mass); 'lost' (tree) -> what rounding takes of it;
        'gather' (x) -> x of all; 'choose' (r) -> int.
      static: what of it is known while tracing, as permutations are.
      content: its arrays.
    """

    kind: str
    static: Any
    content: Any


class _Sent(Exception):
    """Ends a trace where there is no answer yet."""

    def __init__(self, message: Message):
        super().__init__(message.kind)
        self.message = message


class PortGroup(Group):
    """The group of one worker, with the answers that are there so far.

    Args:
      axes: as for `Group`.
      size: how many workers are in it.
      index: which one this is.
      answers: to its messages, in order.
      is_narrow: whether what travels is rounded.
    """

    def __init__(
        self,
        axes: str | tuple[str, ...],
        size: int,
        index: Any,
        answers: Sequence[Any],
        is_narrow: bool = False,
    ):
        super().__init__(axes)
        self._size, self._index, self._answers = size, index, list(answers)
        self._is_narrow = is_narrow

    @property
    def names(self) -> tuple[str, ...]:
        return ()

    @property
    def size(self) -> int:
        return self._size

    @property
    def index(self) -> jax.Array:
        return jnp.asarray(self._index, jnp.int32)

    @property
    def is_all(self) -> bool:
        return True  # nothing is kept for several workers at once

    def _say(self, kind: str, content: Any, static: Any = None) -> Any:
        if self._answers:
            return self._answers.pop(0)
        raise _Sent(Message(kind, static, content))

    def gather(self, x):
        return self._say("gather", x)

    def elect(self, score):
        return self._say("elect", jnp.where(jnp.isfinite(score), score, jnp.inf))

    def broadcast(self, tree, source):
        return self._say("broadcast", (tree, source))

    def masked_sum(self, tree, where=True):
        return self._say("sum", (tree, jnp.asarray(where)))

    def masked_mean(self, tree, where=True, reference=None):
        del reference
        sums, count = self.masked_sum(tree, where)
        return mean_of(sums, count), count

    def permute(self, tree, permutation, turn=0):
        del turn
        return self._say("permute", tree, tuple(permutation))

    def lost(self, tree, turn=0):
        del turn
        return self._say("lost", tree) if self._is_narrow else None

    def push(self, tree, weight, rounds, r):
        return self._say("push", (tree, weight, jnp.asarray(r)), rounds)

    def switch(self, r, branches, operand):
        if len(branches) == 1:
            return branches[0](operand)
        return branches[self._say("choose", r)](operand)

    def coordinatewise(self, rule, tree, *scalars):
        raise ValueError("what needs all workers' gradients at every step has no form here")


class Agreement:
    """`Rule.agree` of one worker, a message at a time.

    Args:
      rule: the rule.
      group: the indices of the workers of its group, in order.
      place: this worker's.
      is_narrow: whether what travels is rounded.
    """

    def __init__(
        self, rule: Rule, group: Sequence[int], place: Place, is_narrow: bool = False
    ):
        self._position = np.int32(group.index(place.index))
        self._stages = _stages(rule, len(group), place.nodes, place.locals, is_narrow)

    async def run(
        self,
        send: Callable[[int, Message], Awaitable[Any]],
        x: Tree,
        y: Tree,
        state: Any,
        fit: Any,
        t: Any,
    ) -> tuple[Tree, Any, Callable[[Any], Any]]:
        """(z, found, renew): the target, and what becomes of the rule's state.

        renew: state -> state; of what `agree` leaves alone it keeps what has become of it
        since, because `step` has run meanwhile.

        Args:
          send: has a message travel, the n-th one of this agreement; gives its answer.
          x, y, state, fit, t: as for `Rule.agree`.
        """
        chosen: tuple = ()  # of each answer the int that was chosen, None if it is arrays
        answers: list[Any] = []
        while True:
            stage, told = self._stages.after(chosen)
            result = stage(self._position, answers, x, y, state, fit, t)
            if told["message"] is None:
                z, found, renewed = result
                return z, found, _renewing(renewed, told["kept"])
            answer = await send(len(chosen), told["message"]._replace(content=result))
            is_choice = told["message"].kind == "choose"
            chosen += (answer if is_choice else None,)
            answers.append(() if is_choice else answer)


class _Stages:
    """A rule cut where it talks; compiled once for all workers of a process."""

    def __init__(self, rule: Rule, size: int, nodes: int, locals: int, is_narrow: bool):
        self._rule, self._size, self._grid = rule, size, (nodes, locals)
        self._is_narrow = is_narrow
        self._stages: dict[tuple, tuple[Callable, dict[str, Any]]] = {}

    def after(self, chosen: tuple) -> tuple[Callable, dict[str, Any]]:
        """The compiled function up to the next message, and what its trace has told."""
        if chosen not in self._stages:
            told: dict[str, Any] = {}
            stage = functools.partial(self._stage, chosen, told)
            self._stages[chosen] = jax.jit(stage), told
        return self._stages[chosen]

    def _stage(self, chosen, told, position, answers, x, y, state, fit, t):
        given = [a if c is None else c for a, c in zip(answers, chosen)]
        group = PortGroup(self._rule.axes, self._size, position, given, self._is_narrow)
        try:
            z, found, renewed = alone(
                lambda: self._rule.agree(group, x, y, state, fit, t), *self._grid
            )
        except _Sent as sent:
            told["message"] = sent.message._replace(content=None)
            return sent.message.content
        told["message"] = None
        told["kept"] = [
            a is b for a, b in zip(jax.tree.leaves(renewed), jax.tree.leaves(state))
        ]
        return z, found, renewed


_stages = functools.lru_cache(maxsize=64)(_Stages)


def _renewing(renewed: Any, kept: list[bool]) -> Callable[[Any], Any]:
    def renew(state: Any) -> Any:
        leaves, treedef = jax.tree.flatten(state)
        after = jax.tree.leaves(renewed)
        chosen = [old if keep else new for old, new, keep in zip(leaves, after, kept)]
        return jax.tree.unflatten(treedef, chosen)

    return renew


def alone(fn: Callable[[], Any], nodes: int = 1, locals: int = 1) -> Any:
    """fn(), where the workers' axes are bound although only one worker is there."""
    along = lambda fn, name, size: jax.vmap(
        fn, in_axes=None, out_axes=None, axis_name=name, axis_size=size
    )
    inner = along(lambda _: fn(), "local", locals)
    return along(inner, "node", nodes)(jnp.int32(0))
