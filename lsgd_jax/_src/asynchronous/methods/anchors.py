"""Anchors that the workers themselves hold and move, one turn after the other.

The anchor of a fragment and its outer optimizer's state pass from the worker that has moved
them to all that ask. If a worker fails, only its own last turn is lost.
"""

import functools
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from lsgd_jax._src.asynchronous.engine.contents import combined, finite
from lsgd_jax._src.asynchronous.engine.errors import StaleWorkerError, UnreachableError
from lsgd_jax._src.asynchronous.engine.sharding import on_cpu
from lsgd_jax._src.asynchronous.engine.worker import Worker
from lsgd_jax._src.asynchronous.methods.driver import Driver
from lsgd_jax._src.exchange import parts
from lsgd_jax._src.trees import Tree


class FragmentState(NamedTuple):
    """The outer state of a fragment, in the host's memory.

    Attributes:
      anchor: a tree like the fragment, in float32 or wider.
      state: of the outer optimizer.
    """

    anchor: Tree
    state: Any


class TurnWorker(Driver):
    """One worker of a method whose workers take turns, which are numbered.

    Attributes:
      turn: the last turn that the worker knows; 0 is the start.
    """

    turn = 0

    def turns(self) -> dict[int, int]:
        """The last turn that each present worker knows, as far as it is known here."""
        status = self.worker.status
        known = {}
        if status is not None:
            known = {i: status.reports[i].rounds for i in status.present}
        return known | {self.worker.index: self.turn}

    def know(self, turn: int) -> None:
        """Notes the last turn that the worker knows."""
        self.turn = self.worker.report.rounds = turn

    def take_over(self, state: Any) -> None:
        """Continues from another worker's turn."""
        super().take_over(state)
        self.know(self.turn)


class AnchorWorker(TurnWorker):
    """One worker of a method whose turns move anchors.

    Args:
      worker, peers: as for `Driver`.
      optimizer: the outer optimizer; workers that share it share what is compiled.
      fragments: the parts of the parameters that have an anchor each.

    Attributes:
      outers: the `FragmentState` of each fragment.
    """

    behind = 8  # turns whose outer states it keeps; the older serve if a holder fails

    def __init__(
        self,
        worker: Worker,
        optimizer: optax.GradientTransformation,
        fragments: Sequence[parts.Part | None],
        peers: Iterable[int] = (),
    ):
        super().__init__(worker, peers)
        self.fragments = fragments
        self._optimizer = optimizer
        host = worker.on_host()
        start = [combined(lambda x: x, parts.select(part, host)) for part in fragments]
        states = [jax.tree.map(np.asarray, optimizer.init(anchor)) for anchor in start]
        self.outers = list(map(FragmentState, start, states))
        # Quantization errors of the outer states that this worker gave to others. They are
        # added to the next ones, so that no pseudo-gradient is lost.
        self._errors: list[Tree] = [None] * len(fragments)
        self._posted: deque[int] = deque()

    @property
    def anchor(self) -> Tree:
        """The anchors of all fragments, as one tree."""
        whole = self.worker.on_host()
        for fragment, outer in zip(self.fragments, self.outers):
            whole = parts.put_back(fragment, outer.anchor, whole)
        return whole

    def take(self, p: int, outer: FragmentState) -> None:
        """Continues from an outer state of fragment p."""
        self.outers[p] = outer
        self.has_diverged |= not finite(outer)

    def moved(self, outer: FragmentState, delta: Tree) -> FragmentState:
        """Returns the outer state after a pseudo-gradient."""
        with on_cpu(self.worker.sharding):
            after = _moved(self._optimizer, outer, delta)
        return jax.tree.map(np.asarray, after)

    def give(self, p: int, outer: FragmentState, turn: int) -> FragmentState:
        """Leaves fragment p's outer state for others; returns it as it arrives there."""
        mailbox = self.transport.mailbox
        message, arrives, self._errors[p] = mailbox.encoded(outer, self._errors[p])
        self.keep(message, turn)
        return arrives

    def keep(self, message: Any, turn: int) -> None:
        """Leaves the outer state of a turn for others, and forgets that of an old one."""
        self.transport.mailbox.post(("anchor", turn), message)
        self._posted.append(turn)
        if len(self._posted) > self.behind:
            self.transport.mailbox.drop(("anchor", self._posted.popleft()))

    async def fetch(self, holder: int, turn: int) -> FragmentState | None:
        """Returns the outer state of a turn; None if its holder has failed."""
        return await or_none(self.transport.ask(holder, "fetch", ("anchor", turn)))

    def take_over(self, state: Any) -> None:
        """Continues from another worker's turn and outer states."""
        super().take_over(state)
        self.has_diverged = not all(map(finite, self.outers))
        self._errors = [None] * len(self._errors)


async def or_none(request: Any) -> Any:
    """The answer to a fetch; None if the peer has failed, or has forgotten the content."""
    try:
        return await request
    except (UnreachableError, StaleWorkerError):
        return None


@functools.partial(jax.jit, static_argnums=0)
def _moved(
    optimizer: optax.GradientTransformation,
    outer: FragmentState,
    delta: Tree,
) -> FragmentState:
    step, state = optimizer.update(delta, outer.state, outer.anchor)
    return FragmentState(optax.apply_updates(outer.anchor, step), state)


@functools.lru_cache(maxsize=32)
def nesterov(learning_rate: float, momentum: float) -> optax.GradientTransformation:
    """SGD with Nesterov momentum, one object for all workers of a process."""
    return optax.sgd(learning_rate, momentum, nesterov=True)
