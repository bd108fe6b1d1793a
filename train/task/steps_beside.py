"""Steps of all workers whose delayed exchanges travel beside them, see `lj.Workers.beside`.

A message leaves before a step, on CPU devices beside those that train, and whole steps run
until its target lands. All numbers are those of the same delay inside the step.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import Array

import lsgd_jax as lj
from train.task import optimizers
from train.task.separate_steps import SeparateSteps, operands_of
from train.task.state import TrainState


STEPS_AHEAD = 2048  # whose exchanges are compiled before a process meets the others


class StepsBeside(SeparateSteps):
    """Takes steps of all workers.

    Args:
      workers, defer, arrive, phase, last: see `SeparateSteps`.
      pulls: the delayed pulls, beside.
    """

    # The state of the method holds targets, which become no result.
    donated = (1, 2)

    def __init__(
        self,
        workers: lj.Workers,
        defer: Callable[..., Any],
        arrive: Callable[..., Any],
        phase: Callable[[int], lj.Phase],
        last: int,
        pulls: Any,
    ):
        def arrive_and_record(
            before: Any, params: Any, stats: Any, own: Any, counts: Any, phase: lj.Phase
        ) -> tuple[Any, Any, Any, Any]:
            params, stats, own = arrive(before, params, stats, own, counts, phase=phase)
            return params, stats, *pulls.recorded(own, phase)

        def phase_at_home(step: int) -> lj.Phase:
            return pulls.phase_at_home(phase(step))

        self._workers = workers
        super().__init__(workers, defer, arrive_and_record, phase_at_home, last)
        self._pulls = pulls
        self._whole_phase = phase
        self._last_step: Any = None  # the array that counts the steps of the last state

    def __call__(
        self, state: TrainState, data: Any, batch: Any, step: int
    ) -> tuple[TrainState, Array]:
        """See `SeparateSteps`."""
        pulls = self._pulls
        own = state.opt_state[-1]
        if pulls.crew is not None:
            pulls.crew.step([step - 1])
        elif state.step.value is not self._last_step:
            pulls.begin(own, jax.tree.map(_of_one_worker, state.params))
        with pulls.undone_by_errors():
            pulls.send(step - 1, self._whole_phase(step), self._ahead)
            at_home = with_own(state, pulls.at_home(own))
            after, loss = super().__call__(at_home, data, batch, step)
        self._last_step = after.step.value
        return with_own(after, pulls.whole(after.opt_state[-1])), loss

    def compile_first(self, state: TrainState, data: Any, batch: Any, step: int) -> None:
        """Compiles the step, and exchanges that follow, before the others are met.

        They would wait for this process at the next landing.

        Args:
          state, data, batch: as for the step after `step`. They are not changed.
          step: the steps taken.
        """
        own = state.opt_state[-1]
        self._pulls.begin(own, jax.tree.map(_of_one_worker, state.params))
        at_home = with_own(state, self._pulls.at_home(own))
        lowered = self._defer.lower(at_home, data, batch)
        shardings = lowered.compile().output_shardings
        counts = jax.tree.map(_placed, lowered.out_info[-1], shardings[-1])
        phases = itertools.islice(self._phases_after(step), STEPS_AHEAD)
        for phase in dict.fromkeys(phases):
            if phase is not None:
                args = self._like_those_of(phase, at_home, counts)
                self._arrive.lower(*args, phase=phase).compile()

    def meet(self, state: TrainState, step: int) -> tuple[TrainState, int]:
        """Begins together with the other processes, see `PullsBeside.meet`.

        Returns:
          (state, step), those of the others if they train already.
        """
        one = jax.tree.map(_of_one_worker, state.params)
        own, begins = self._pulls.meet(state.opt_state[-1], one, step)
        if begins == step:
            return with_own(state, own), step
        *base, _ = state.opt_state
        count = self._workers.share(np.int32(begins))
        base = optimizers.at_step(tuple(base), begins)
        return state._replace(opt_state=(*base, own), step=count), begins

    def _exchanged(
        self, before: Any, state: TrainState, counts: Any, phase: lj.Phase
    ) -> TrainState:
        params, stats, own = operands_of(state)
        try:
            ready = self._pulls.ready(own, phase, params)
        except lj.LoopEnded:
            return state  # the next step raises it: the state before this one is gone
        params, stats, own, messages = self._arrive(
            before, params, stats, ready, counts, phase=phase
        )
        own = self._pulls.exchanged(own, messages, phase)
        return with_own(state._replace(params=params, stats=stats), own)

    def _like_those_of(self, phase: lj.Phase, state: TrainState, counts: Any) -> Any:
        params, stats, own = operands_of(state)
        return params, params, stats, self._pulls.like_ready(own, phase), counts

    def _compile_ahead(self, state: TrainState, counts: Any, step: int) -> None:
        self._pulls.compile_ahead(self._ahead)
        super()._compile_ahead(state, counts, step)


def _placed(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _of_one_worker(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape[1:], x.dtype)


def with_own(state: TrainState, own: Any) -> TrainState:
    """The state with another one of the method."""
    return state._replace(opt_state=(*state.opt_state[:-1], own))
