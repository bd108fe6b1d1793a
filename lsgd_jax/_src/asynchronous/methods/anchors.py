"""Anchors that the workers themselves hold and move, one turn after the other.

The anchor of a fragment and its outer optimizer's state pass from the worker that has moved
them to all that ask. If a worker fails, only its own last turn is lost.
"""

import functools
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from lsgd_jax._src.asynchronous.engine.contents import combined, finite
from lsgd_jax._src.asynchronous.engine.errors import StaleWorkerError, UnreachableError
from lsgd_jax._src.asynchronous.engine.sharding import on_cpu
from lsgd_jax._src.asynchronous.engine.worker import Worker
from lsgd_jax._src.asynchronous.methods.driver import Driver
from lsgd_jax._src.exchange import parts
from lsgd_jax._src.trees import Tree, zeros


class FragmentState(NamedTuple):
    """The outer state of a fragment, in the host's memory.

    Attributes:
      anchor: a tree like the fragment, in float32 or wider.
      state: of the outer optimizer.
    """

    anchor: Tree
    state: Any


class AnchorWorker(Driver):
    """One worker of a method whose turns move anchors.

    Args:
      worker, peers: as for `Driver`.
      optimizer: the outer optimizer; workers that share it share what is compiled.
      fragments: the parts of the parameters that have an anchor each.

    Attributes:
      turn: the last turn that the worker knows; 0 is the start.
      outers: the `FragmentState` of each fragment.
    """

    behind = 2  # turns whose outer states it keeps; the older serve if a holder fails

    def __init__(
        self,
        worker: Worker,
        optimizer: optax.GradientTransformationExtraArgs,
        fragments: Sequence[parts.Part | None],
        peers: Iterable[int] = (),
    ):
        super().__init__(worker, peers)
        self.fragments = fragments
        self._optimizer = optimizer
        self.turn = 0
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

    def take(self, p: int, outer: FragmentState) -> None:
        """Continues from an outer state of fragment p."""
        self.outers[p] = outer
        self.has_diverged |= not finite(outer)

    def moved(self, outer: FragmentState, delta: Tree, turn: int) -> FragmentState:
        """Returns the outer state after a pseudo-gradient."""
        with on_cpu(self.worker.sharding):
            after = _moved(self._optimizer, outer, delta, np.int32(turn))
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
        self.know(self.turn)
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
    optimizer: optax.GradientTransformationExtraArgs,
    outer: FragmentState,
    delta: Tree,
    turn: Any,
) -> FragmentState:
    step, state = optimizer.update(delta, outer.state, outer.anchor, turn=turn)
    return FragmentState(optax.apply_updates(outer.anchor, step), state)


class DelayedNesterovState(NamedTuple):
    """The momentum m, and the sum s of the pseudo-gradients since it was renewed."""

    momentum: Tree
    total: Tree


@functools.lru_cache(maxsize=32)
def delayed_nesterov(
    learning_rate: float, momentum: float, every: int
) -> optax.GradientTransformationExtraArgs:
    r"""SGD whose Nesterov momentum is renewed and applied on every N-th turn t = 1, 2, ….

    .. math::
      s &\leftarrow s + g \\
      m &\leftarrow \beta m + s / N, \quad s \leftarrow 0 && \text{if } t \bmod N = 0 \\
      a &\leftarrow a - \eta \, (g / N + \beta m \, [t \bmod N = 0])

    With N = 1 it is `optax.sgd` with Nesterov momentum.

    Args:
      learning_rate, momentum, every: η, β, N.

    Returns:
      A transformation whose `update` takes ``turn=`` t.

    Reference: Liu et al., Asynchronous Local-SGD Training for Language Modeling, 2024,
    arXiv:2401.09135.
    """
    if every == 1:
        sgd = optax.sgd(learning_rate, momentum, nesterov=True)
        return optax.with_extra_args_support(sgd)

    def init(params):
        return DelayedNesterovState(zeros(params), zeros(params))

    def update(updates, state, params=None, **extra):
        del params
        renews = extra["turn"] % every == 0
        total = jax.tree.map(jnp.add, state.total, updates)

        def renewed(m: Array, s: Array) -> Array:
            return jnp.where(renews, momentum * m + s / every, m)

        def step(g: Array, m: Array) -> Array:
            return -learning_rate * (g / every + jnp.where(renews, momentum * m, 0))

        m = jax.tree.map(renewed, state.momentum, total)
        left = jax.tree.map(lambda s: jnp.where(renews, 0, s), total)
        return jax.tree.map(step, updates, m), DelayedNesterovState(m, left)

    return optax.GradientTransformationExtraArgs(init, update)
