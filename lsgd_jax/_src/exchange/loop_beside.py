"""A loop whose delayed pulls exchange on devices beside those that train."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from lsgd_jax._src.exchange.beside import (
    Beside,
    Order,
    PullsBeside,
    check_may_travel,
    with_count,
)
from lsgd_jax._src.exchange.crew import Crew
from lsgd_jax._src.exchange.loop import (
    Loop,
    Looped,
    Phases,
    arrays_of_counts,
    changed,
    changes,
    state_in,
    with_state,
)
from lsgd_jax._src.exchange.outer import AroundState, OuterState
from lsgd_jax._src.exchange.phases import Sizes
from lsgd_jax._src.exchange.step import ExchangeState
from lsgd_jax._src.shared import one_worker
from lsgd_jax._src.trees import Tree


class LoopBeside(Loop):
    """A `Loop` whose delayed pulls exchange on a twin of the devices that train.

    `Workers.loop` returns it with ``beside=True``. With its `min_workers` processes may be
    lost and come back.

    Attributes:
      steps: the steps taken, those of the others before this process came included.
      waited: seconds for which the host has waited for messages that were not there in
        time.
      num_workers: the number of workers that live; None without `min_workers`.
    """

    def __init__(
        self,
        train: Looped,
        compile: Callable[..., Any],
        sizes: Sizes | None,
        options: Mapping[str, Any],
        twin: Beside,
        crew_of: Callable[[Sequence[PullsBeside]], Crew] | None = None,
    ):
        """For `train`, `compile`, `sizes` and `options` see `Loop`.

        Args:
          twin: the devices beside.
          crew_of: makes the crew of the pulls, if processes may be lost.
        """
        super().__init__(train, compile, sizes, options)
        check_may_travel([each.method for each in train.methods])
        order = Order(twin)
        self._beside = [PullsBeside(method.pulls, twin, order) for method in train.methods]
        self.crew = None if crew_of is None else crew_of(self._beside)

    @property
    def waited(self) -> float:
        """Seconds that the loop has waited for targets that were not there in time."""
        return sum(each.waited for each in self._beside)

    @property
    def _is_separable(self) -> bool:
        return True

    @property
    def num_workers(self) -> int | None:
        """The number of workers that live; None if no process may be lost."""
        return None if self.crew is None else self.crew.num_workers

    @property
    def steps(self) -> int:
        """The steps taken, also by the others before this process came."""
        return self._counts[0] if self._counts else 0

    def begin(self, state: AroundState) -> AroundState:
        """Returns the state with which this process begins.

        It meets the other processes, as the first step would do. One that has started again
        takes from them what all workers have in common, and the step.
        """
        state = self._begin(state)
        self._counts = self._counts_of(state)
        self._last = arrays_of_counts(state)
        return state

    def settled(self, state: AroundState) -> AroundState:
        """The state once all messages in flight count.

        state: the one that the loop has returned last.

        Only with it can a state be saved while processes may be lost.
        """
        if self.crew is not None:
            self.crew.wait_for_messages()
        return self._mapped(PullsBeside.whole, self._mapped(PullsBeside.at_home, state))

    def consensus(self, tree: Tree) -> Tree:
        """Returns the mean over the workers that live, as host arrays. All call it.

        It is `lj.consensus` where processes may be lost.

        tree: leaves [W, ...], such as `state.state["params"]`.
        """
        if self.crew is None:
            raise ValueError(
                "`consensus` is for a loop with `min_workers`: call `lj.consensus`"
            )
        return self._beside[0].consensus(tree)

    def close(self) -> None:
        """Waits until all processes that live have come here.

        Process 0 holds jax's coordination service, so it must be the last one that ends.
        """
        if self.crew is not None:
            self.crew.close()

    def _take(self, state: AroundState, *args: Any, **named: Any) -> Any:
        if not self._is_last(state):
            state = self._begin(state)
        counts = self._counts_of(state)
        if self.crew is not None:
            self.crew.step(counts)
        phases = self._train.at_counts(counts, self._sizes)
        with contextlib.ExitStack() as stack:
            for each in self._beside:
                stack.enter_context(each.undone_by_errors())
            for each, t, phase in zip(self._beside, counts, phases):
                each.send(t, phase, self._ahead)
            left = self._mapped(PullsBeside.at_home, state)
            results = super()._take(left, *args, **named)
        return with_state(results, self._mapped(PullsBeside.whole, state_in(results)))

    def _begin(self, state: AroundState) -> AroundState:
        """Takes what is to be beside out of a state that this loop did not return.

        Returns:
          The state; of a process that comes in with the step of the others.
        """
        crew = self.crew
        verdict = None
        if crew is not None:
            crew.wait_for_messages()
            if crew.verdict is None:
                verdict = crew.begin(self._counts_of(state))
        structure = jax.tree.structure(state.state)

        def params_of(leaves: list[Any]) -> list[Tree]:
            return self._train.params_of(structure.unflatten(leaves))

        params = jax.eval_shape(params_of, one_worker(state.state))
        for each, outer, own in zip(self._beside, _outers(state), params):
            each.begin(outer.exchange, own)
        if crew is None or verdict is None or not verdict.newcomers:
            return state
        crew.come_in(verdict)
        return with_counts(state, verdict.place["counts"])

    def _mapped(
        self, fn: Callable[..., ExchangeState], state: AroundState, *given: Sequence[Any]
    ) -> AroundState:
        """The state with fn(pulls beside, its state, *given) of each method."""
        each = zip(self._beside, _outers(state), *given)
        return with_exchanges(
            state, [fn(own, outer.exchange, *args) for own, outer, *args in each]
        )

    def _phases_at(self, counts: Sequence[int]) -> Phases:
        """What each method does on the devices that train."""
        pairs = zip(self._beside, super()._phases_at(counts))
        return tuple(each.phase_at_home(phase) for each, phase in pairs)

    def _exchanged(self, state: AroundState, taking_part: Any, phases: Phases) -> Any:
        trained = [state.outer] * len(phases)
        ready = self._mapped(PullsBeside.ready, state, phases, trained)
        new, messages = self._program(phases)(ready, taking_part)
        after = changed(ready, new)
        return self._mapped(PullsBeside.exchanged, after, messages, phases)

    def _compiled(self, phases: Phases | None) -> Callable[..., Any]:
        if phases is None:
            return super()._compiled(None)

        def exchange(state: AroundState, taking_part: Any) -> Any:
            after = self._train.exchange(state, taking_part, phases)
            each = zip(self._beside, _outers(after), phases)
            parted = [own.recorded(outer.exchange, phase) for own, outer, phase in each]
            exchanges, messages = zip(*parted)
            return changes(state, with_exchanges(after, exchanges)), list(messages)

        return self._compile(exchange)

    def _compile_ahead(
        self, counts: Sequence[int], args: Sequence[Any], named: Mapping[str, Any]
    ) -> None:
        for each in self._beside:
            each.compile_ahead(self._ahead)
        super()._compile_ahead(counts, args, named)

    def _like_those_of(self, phases: Phases, args: Sequence[Any]) -> Sequence[Any]:
        state, taking_part = args
        return self._mapped(PullsBeside.like_ready, state, phases), taking_part


def _outers(state: AroundState) -> tuple[OuterState, ...]:
    outer = state.outer
    return (outer,) if isinstance(outer, OuterState) else tuple(outer)


def with_exchanges(state: AroundState, exchanges: Sequence[ExchangeState]) -> AroundState:
    """The state with these of its methods."""
    pairs = zip(_outers(state), exchanges, strict=True)
    outers = tuple(outer._replace(exchange=own) for outer, own in pairs)
    is_one = isinstance(state.outer, OuterState)
    return AroundState(state.state, outers[0] if is_one else outers)


def with_counts(state: AroundState, counts: Sequence[int]) -> AroundState:
    """The state in which each method has taken so many steps."""
    pairs = zip(_outers(state), counts, strict=True)
    return with_exchanges(
        state, [with_count(outer.exchange, count) for outer, count in pairs]
    )
