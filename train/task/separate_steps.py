"""Steps of all workers whose exchanges are programs of their own.

The step is compiled once, without an exchange, and runs at every step. Each phase in which
something is due is a small program, which runs after the steps at which it is due. It is
compiled while the first steps run. All numbers are those of the whole step.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

import lsgd_jax as lj
from train.task.state import TrainState


QUIET = lj.Phase()


class SeparateSteps:
    """Takes steps of all workers.

    Args:
      workers: the grid.
      defer: one worker's step without its exchange, see `Task.defer`.
      arrive: one worker's exchange, see `Task.arrive`.
      phase: the phase of each step, counted from 1.
      last: the last step for which programs are compiled before it is due.
    """

    # The parameters before the step cannot become any result of an exchange.
    donated: tuple[int, ...] = (1, 2, 3)

    def __init__(
        self,
        workers: lj.Workers,
        defer: Callable[..., Any],
        arrive: Callable[..., Any],
        phase: Callable[[int], lj.Phase],
        last: int,
    ):
        self._defer: Any = workers.map(defer, donate=0)
        self._arrive: Any = workers.map(arrive, donate=self.donated, static="phase")
        self._copy = jax.jit(lambda params: jax.tree.map(jnp.copy, params))
        self._phase = phase
        self._last = last
        self._ahead = lj.aot.Ahead()

    def __call__(
        self, state: TrainState, data: Any, batch: Any, step: int
    ) -> tuple[TrainState, Array]:
        """Takes a step: (state, losses [W]), after the exchange if one is due.

        Args:
          state: the state before the step, which is donated.
          data, batch: as for `Experiment.step`.
          step: the number of the step, from 1.
        """
        phase = self._phase(step)
        # Before the step: the state is still there if the compilation fails.
        self._ahead.wait_for(phase)
        before = self._copy(state.params) if phase != QUIET else None
        state, loss, counts = self._defer(state, data, batch)
        if phase != QUIET:
            state = self._exchanged(before, state, counts, phase)
        self._compile_ahead(state, counts, step)
        return state, loss

    def _exchanged(
        self, before: Any, state: TrainState, counts: Any, phase: lj.Phase
    ) -> TrainState:
        """The state after the exchange."""
        operands = operands_of(state)
        return _after(state, *self._arrive(before, *operands, counts, phase=phase))

    def _compile_ahead(self, state: TrainState, counts: Any, step: int) -> None:
        """Begins to compile the exchange that is due first, of those that are missing."""
        phase = self._ahead.next_due(lambda: self._phases_after(step))
        if phase is not None:
            args = self._like_those_of(phase, state, counts)
            self._ahead.begin(phase, self._arrive, args, {"phase": phase})

    def _phases_after(self, step: int) -> Iterator[lj.Phase | None]:
        """Yields the phases of the next steps; None at a step without an exchange."""
        for later in range(step + 1, self._last + 1):
            phase = self._phase(later)
            yield phase if phase != QUIET else None

    def _like_those_of(self, phase: lj.Phase, state: TrainState, counts: Any) -> Any:
        """Arguments like those of an exchange, from those after any step."""
        return state.params, *operands_of(state), counts


def operands_of(state: TrainState) -> tuple[Any, Any, Any]:
    """All that an exchange may change: parameters, statistics, state of the method."""
    return state.params, state.stats, state.opt_state[-1]


def _after(state: TrainState, params: Any, stats: Any, own: Any) -> TrainState:
    """The state with the results of an exchange."""
    opt_state = (*state.opt_state[:-1], own)
    return state._replace(params=params, stats=stats, opt_state=opt_state)
