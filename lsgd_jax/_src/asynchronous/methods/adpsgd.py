"""AD-PSGD: pairs of an active and a passive worker average, without a barrier."""

import dataclasses
from typing import Any

from lsgd_jax._src.asynchronous.engine.contents import finite
from lsgd_jax._src.asynchronous.engine.mailbox import half_way
from lsgd_jax._src.asynchronous.engine.worker import Worker
from lsgd_jax._src.asynchronous.methods.driver import (
    Driver,
    FreeRunning,
    InFlight,
)
from lsgd_jax._src.trees import Tree
from lsgd_jax._src.wire.wire import Wire, WireFormat


@dataclasses.dataclass(frozen=True)
class ADPSGD(FreeRunning):
    r"""Asynchronous decentralized parallel SGD.

    Workers with an even index are active, workers with an odd index passive. Before a step
    an active worker i sends its parameters x_i to a random passive worker j and computes
    its step in the meantime. Worker j answers with the parameters x_j that it holds then.
    Both move half the distance between these, whatever steps they have taken since:

    .. math::
      y_i \leftarrow y_i + \tfrac12 (x_j - x_i), \qquad
      y_j \leftarrow y_j + \tfrac12 (x_i - x_j).

    The sum over all workers therefore changes by local steps only, at any delay. There is
    no deadlock, because active workers only ask and passive workers only answer.

    A passive worker that does not answer is asked less and less often, until it answers
    again. If its answer is lost in transit, only the passive worker has moved. A worker
    that is not finite is not mixed with others; it takes the parameters of a worker of the
    other side as they are.

    Args:
      seed: seed of the choice of passive workers.
      window: number of losses in a worker's score.
      wire: the format in which parameters travel, or a `Wire`.

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
    wire: Wire | WireFormat = "float32"


class ADPSGDWorker(Driver):
    """AD-PSGD in one worker."""

    def __init__(self, method: ADPSGD, worker: Worker):
        self._is_active = worker.index % 2 == 0
        self._was_replaced = False  # since the last moves by peers
        others = range(int(self._is_active), worker.transport.position.workers, 2)
        super().__init__(worker, others, seed=(method.seed, worker.index))

    async def land_arrived(self) -> None:
        """Moves by an answer that has arrived, and as active workers have left it."""
        await super().land_arrived()
        self._follow(await self.transport.moved())

    def _follow(self, moved: Tree) -> None:
        """Moves as peers have moved the parameters, unless these have been replaced."""
        was_replaced = self._was_replaced
        self._was_replaced = False
        if moved is not None and not was_replaced:
            self.shift(moved)

    def ask(self) -> None:
        """Asks a random peer; a passive worker does so only if it is not finite."""
        asks = self._is_active or not self.is_finite
        if self.in_flight or not asks:
            return
        peer = self.peers.choose()
        if peer is None:
            return
        if not self.is_finite:
            self.ask_snapshot(peer)
            return
        # The quantization error stays here, so that the sum of the two does not change.
        packed, sent, _ = self.transport.mailbox.encoded(self.worker.on_host())
        self.transport.mailbox.count(packed)
        answer = self.transport.ask(peer, "exchange", packed)
        self.in_flight[0] = InFlight(answer, self.worker.count, peer, sent)

    def landed(self, slot: int, request: InFlight, answer: Any) -> bool:
        """Moves half the way to a peer; takes the peer's snapshot if not finite."""
        if request.sent is None:
            if self.is_finite or not self.pull(answer.params, 1.0, False):
                return False
            self._was_replaced = True
            return True
        half = half_way(request.sent, answer)
        is_finite = finite(half)
        if is_finite:
            self.shift(half)
        return is_finite

    async def finish(self) -> None:
        """Lands the last request and the last moves; later exchanges move no worker."""
        if self.in_flight:
            await self.land()
        self._follow(self.transport.mailbox.moved(last=True))

    def take_over(self, state: Any) -> None:
        """Discards moves that were meant for other parameters."""
        super().take_over(state)
        self.transport.mailbox.moved()


ADPSGD.driver = ADPSGDWorker
