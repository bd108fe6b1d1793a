"""Loop: a training step for a loop on the host, which knows which step is due.

The step is compiled once, without its exchange:

    defer      the program's own step, on every step; communicates nothing
    exchange   the pulls that are due, a small program for each phase, on due steps alone

The first one writes the number of a due step as a negative count, and the second one makes
it positive again. So a state in which an exchange is missing shows that it is.

Some methods need whole steps, and then each phase is one program: if messages are to travel
while a gradient is computed, and if a rule reads the parameters before the step.

The programs of later steps are compiled while the first steps run, see `ahead`.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from lsgd_jax._src.exchange.ahead import Ahead
from lsgd_jax._src.exchange.outer import AroundState, Outer, OuterState, check_around_state
from lsgd_jax._src.exchange.phases import QUIET, Phase, Sizes
from lsgd_jax._src.layouts import keys
from lsgd_jax._src.shared import Shared
from lsgd_jax._src.trees import Tree, is_same


Phases = tuple[Phase, ...]  # of each method around a step

STEPS_AHEAD = 2048  # whose programs are compiled before they are due


class Looped(Protocol):
    """An `Around`, as far as a loop needs it."""

    @property
    def is_separable(self) -> bool: ...

    @property
    def methods(self) -> tuple[Outer, ...]: ...

    def params_of(self, state: Tree) -> list[Tree]: ...

    def at_counts(self, counts: Sequence[int], sizes: Sizes | None) -> Phases: ...

    def in_phases(self, phases: Phases) -> Callable[..., Any]: ...

    def deferring(self) -> Callable[..., tuple[Any, Any]]: ...

    def exchange(self, state: Any, counts: Any, phases: Phases) -> AroundState: ...


class Loop:
    """A step that a host loop calls; `Workers.loop` and `Around.loop` return it.

    It is called like the step and returns what the step returns. It counts the steps
    itself. A state that it did not return last, such as a restored one, tells its count:
    such a call waits until the state is there.

    Attributes:
      check: called with the results of each step, or None.
    """

    def __init__(
        self,
        train: Looped,
        compile: Callable[..., Any],
        sizes: Sizes | None,
        options: Mapping[str, Any],
    ):
        wrapped: Any = train
        functools.update_wrapper(self, wrapped, updated=())
        self.check: Callable[[Any], object] | None = None
        self._train = train
        self._compile = compile
        self._sizes = sizes
        self._options = options
        self._programs: dict[Phases | None, Callable[..., Any]] = {}
        self._ahead = Ahead()
        self._last: list[Any] = []  # the arrays in which the last state counts its steps
        self._counts: list[int] = []

    @property
    def _is_separable(self) -> bool:
        return self._train.is_separable

    def __call__(self, state: AroundState, *args: Any, **named: Any) -> Any:
        """Returns the results of the step, after the exchange if one is due.

        Args:
          state: from `Around.init` or the last call.
          args, named: the other arguments of the step.
        """
        results = self._take(state, *args, **named)
        if self.check is not None:
            self.check(results)
        return results

    def _take(self, state: AroundState, *args: Any, **named: Any) -> Any:
        """Takes the step."""
        counts = self._counts_of(state)
        phases = self._phases_at(counts)
        # Before the step: the state is still there if the compilation fails.
        self._ahead.wait_for(phases)
        if not self._is_separable:
            results = self._program(phases)(state, *args, **named)
            after = state_in(results)
            self._compile_ahead(counts, (after, *args), named)
        else:
            results, new, taking_part = self._program(None)(state, *args, **named)
            after = AroundState(state_in(results).state, changed(state.outer, new))
            if self._is_due(phases):
                after = self._exchanged(after, taking_part, phases)
            results = with_state(results, after)
            self._compile_ahead(counts, (after, taking_part), {})
        self._last = arrays_of_counts(after)
        self._counts = [count + 1 for count in counts]
        return results

    def _phases_at(self, counts: Sequence[int]) -> Phases:
        """What each method does at the step after its count."""
        return self._train.at_counts(counts, self._sizes)

    def _is_due(self, phases: Phases) -> bool:
        """Whether any method exchanges."""
        return any(phase != QUIET for phase in phases)

    def _exchanged(
        self, state: AroundState, taking_part: Any, phases: Phases
    ) -> AroundState:
        """The state after the exchange."""
        return changed(state, self._program(phases)(state, taking_part))

    def _is_last(self, state: AroundState) -> bool:
        """Whether this loop has returned the state last."""
        arrays = arrays_of_counts(state)
        known = len(arrays) == len(self._last)
        return known and all(a is b for a, b in zip(arrays, self._last))

    def _counts_of(self, state: AroundState) -> list[int]:
        """The steps that each method has taken, read from a state that is new here."""
        if self._is_last(state):
            return self._counts
        return list(map(_read, arrays_of_counts(state)))

    def _compile_ahead(
        self, counts: Sequence[int], args: Sequence[Any], named: Mapping[str, Any]
    ) -> None:
        """Begins to compile the program that is due first, of those that are missing.

        args, named: like those of the program.
        """
        phases = self._ahead.next_due(lambda: self._phases_after(counts))
        if phases is not None:
            given = self._like_those_of(phases, args)
            self._ahead.begin(phases, self._program(phases), given, named)

    def _like_those_of(self, phases: Phases, args: Sequence[Any]) -> Sequence[Any]:
        """Arguments like those of the program, from those at a step without an exchange."""
        return args

    def _phases_after(self, counts: Sequence[int]) -> Iterator[Phases | None]:
        """Yields the phases of the next steps; None at a step without an exchange."""
        for steps in range(1, STEPS_AHEAD + 1):
            phases = self._phases_at([count + steps for count in counts])
            yield phases if self._is_due(phases) else None

    def _program(self, phases: Phases | None) -> Callable[..., Any]:
        """The compiled program of these phases; None: the step without an exchange."""
        if phases not in self._programs:
            self._programs[phases] = self._compiled(phases)
        return self._programs[phases]

    def _compiled(self, phases: Phases | None) -> Callable[..., Any]:
        if phases is None:
            return self._compile(self._deferring(), **self._options)
        if not self._is_separable:
            return self._compile(self._train.in_phases(phases), **self._options)

        def exchange(state: AroundState, taking_part: Any) -> Tree:
            return changes(state, self._train.exchange(state, taking_part, phases))

        return self._compile(exchange)

    def _deferring(self) -> Callable[..., Any]:
        """The step without its exchange, which changes little of the methods' states."""
        defer = self._train.deferring()

        @functools.wraps(defer)
        def step(state: AroundState, *args: Any, **named: Any) -> tuple[Any, Tree, Any]:
            results, taking_part = defer(state, *args, **named)
            after = state_in(results)
            new = changes(state.outer, after.outer)
            bare = with_state(results, AroundState(after.state, ()))
            return bare, new, taking_part

        return step


# The state among the results of a step


def _is_state(node: Any) -> bool:
    return isinstance(node, AroundState)


def state_in(results: Any) -> AroundState:
    """The state among the results."""
    nodes = jax.tree.leaves(results, is_leaf=_is_state)
    return next(node for node in nodes if _is_state(node))


def with_state(results: Any, state: AroundState) -> Any:
    """The results with another state in place of theirs."""
    nodes, treedef = jax.tree.flatten(results, is_leaf=_is_state)
    place = next(i for i, node in enumerate(nodes) if _is_state(node))
    nodes[place] = state
    return treedef.unflatten(nodes)


def arrays_of_counts(state: AroundState) -> list[Any]:
    """The array in which each method counts the steps."""
    check_around_state(state)
    outer = state.outer
    each = (outer,) if isinstance(outer, OuterState) else outer
    return [own.exchange.count.value for own in each]


def _read(count: Any) -> int:
    """The steps taken, from this process' part of a count that is equal on all workers."""
    if isinstance(count, jax.core.Tracer):
        raise ValueError(
            "a loop counts its steps on the host and compiles them itself: call it outside "
            "of `jax.jit` and other transformations"
        )
    if isinstance(count, jax.Array):
        count = count.addressable_shards[0].data
    # Below 0 its exchange is missing, which the next step counts as misplaced.
    return abs(int(np.ravel(count)[0]))


# What a program changes
#
# It returns that alone. So a step neither copies nor reads anchors and momenta, and an
# exchange does so with the state of the optimizer. It does not reuse any buffer either: the
# state before the exchange stays whole until the next one is there.


def _nodes(tree: Tree) -> tuple[list[tuple[Any, Any]], Any]:
    """Arrays with their paths, and each `Shared` as one, which says how it lies."""
    return jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: isinstance(node, Shared)
    )


def changes(before: Tree, after: Tree) -> dict[str, Tree]:
    """The nodes that differ, by number; each below its path, by which layouts are found."""
    found = {}
    pairs = zip(_nodes(before)[0], _nodes(after)[0], strict=True)
    for number, ((path, old), (_, node)) in enumerate(pairs):
        if is_same(old, node):
            continue
        for key in reversed(keys(path)):
            node = {key: node}
        found[str(number)] = node
    return found


def changed(before: Tree, changes: dict[str, Tree]) -> Tree:
    """The tree after the changes."""
    nodes, treedef = _nodes(before)
    after = []
    for number, (path, old) in enumerate(nodes):
        node = old
        if str(number) in changes:
            node = changes[str(number)]
            for key in keys(path):
                node = node[key]
        after.append(node)
    return treedef.unflatten(after)
