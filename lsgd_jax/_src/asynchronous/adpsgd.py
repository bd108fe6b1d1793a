"""AD-PSGD: pairs of an active and a passive worker average, without a barrier."""

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from lsgd_jax._src.asynchronous.errors import Unreachable
from lsgd_jax._src.asynchronous.free_running import FreeRunning
from lsgd_jax._src.asynchronous.mailbox import finite
from lsgd_jax._src.asynchronous.peers import Peers
from lsgd_jax._src.asynchronous.ports import Pending
from lsgd_jax._src.asynchronous.worker import Worker
from lsgd_jax._src.checks import check_positive_int


@dataclasses.dataclass(frozen=True)
class ADPSGD:
    r"""Asynchronous decentralized parallel SGD.

    Workers with an even index are active, those with an odd one passive. Before a step an
    active worker i sends its x to a random passive one, j, and takes its step meanwhile. j
    answers between its own steps' boundaries, with what it holds then. Both move half the
    way to what the other had sent, whatever has become of them since:

    .. math::
      y_i \leftarrow y_i + \tfrac12 (x_j - x_i), \qquad
      y_j \leftarrow y_j + \tfrac12 (x_i - x_j),

    so that the sum over all workers is what their own steps make it, at any delay. Active
    workers ask and passive ones answer, so that none ever waits for one that waits. A
    passive worker that does not answer is asked less and less often, until it answers
    again; if its answer is lost on the way, it has moved alone. A worker that is not finite
    is mixed with no other, and takes a worker of the other side whole.

    Args:
      seed: of the choice of passive workers.
      window: losses in a worker's score, as others are told it.

    Raises:
      ValueError: a window below 1.

    Reference: Lian, Zhang, Zhang, Liu, Asynchronous Decentralized Parallel Stochastic
    Gradient Descent, ICML 2018, arXiv:1710.06952.

    >>> import lsgd_jax as lj
    >>> lj.asynchronous.ADPSGD(seed=1).window
    10
    """

    seed: int = 0
    window: int = 10

    period = None

    def __post_init__(self):
        check_positive_int("window", self.window)

    def bind(self, worker: Worker, steps: int) -> "Averaging":
        """The method in one worker."""
        del steps
        return Averaging(self, worker)


class Coming(NamedTuple):
    """An answer that is in flight.

    Attributes:
      peer: whose.
      since: the worker's own step after which `sent` was sent.
      sent: this worker's parameters; None: it takes the peer's whole.
      answer: the call.
    """

    peer: int
    since: int
    sent: np.ndarray | None
    answer: Pending


class Averaging(FreeRunning):
    """AD-PSGD in one worker."""

    def __init__(self, method: ADPSGD, worker: Worker):
        super().__init__(worker)
        place = worker.ports.place
        self._is_active = place.index % 2 == 0
        others = range(int(self._is_active), place.workers, 2)
        self._peers = Peers(others, (method.seed, place.index))
        self._coming: Coming | None = None

    async def before_step(self) -> bool:
        """Whether there is another step to take; an active worker sends its parameters."""
        if not await super().before_step():
            await self._end()
            return False
        if self._coming is None and (self._is_active or not self.fit):
            if (peer := self._peers.choose()) is not None:
                self._coming = self._ask(peer)
        return True

    def _ask(self, peer: int) -> Coming:
        worker, ports = self.worker, self.worker.ports
        if not self.fit:
            return Coming(peer, worker.count, None, ports.latest(peer))
        # What rounding takes away stays here, so that the sum of the two stays what it was.
        sent = ports.mailbox.rounded(worker.vector())
        return Coming(peer, worker.count, sent, ports.exchange(peer, sent))

    async def after_step(self) -> None:
        """Moves by what has arrived, and by what active workers have left."""
        if self._coming is not None and self._coming.answer.done:
            await self._land(self._coming)
        if (moved := self.worker.ports.mailbox.moved()) is not None:
            self.shift(moved)
        self.worker.publish()

    async def _land(self, coming: Coming) -> None:
        self._coming = None
        try:
            answer = await self.worker.wait(coming.answer)
        except Unreachable:
            self._peers.failed(coming.peer)
            return
        self._peers.answered(coming.peer)
        if coming.sent is None:
            if not self.fit:
                self.pull(answer.vector, 1.0, False)
                self.worker.ports.mailbox.moved()  # meant for what it has replaced
        else:
            with np.errstate(invalid="ignore", over="ignore"):
                half = (answer - coming.sent) / 2
            if not finite(half):
                return
            self.shift(half)
        self.mixed(coming.since)

    async def _end(self) -> None:
        """What was sent or left until the last step counts, and nothing after it."""
        if self._coming is not None:
            await self._land(self._coming)
        if (moved := self.worker.ports.mailbox.close()) is not None:
            self.shift(moved)
        self.worker.publish()

    def state(self) -> Any:
        """Nothing: a worker that starts again has not asked yet."""
        return ()

    def take_over(self, state: Any) -> None:
        """What was in flight, or was left here, was meant for other parameters."""
        del state
        self.worker.ports.mailbox.moved()
        self._coming = None
