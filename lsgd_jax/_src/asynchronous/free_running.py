"""What methods have in common whose workers take their steps without waiting."""

from typing import Any

import numpy as np

from lsgd_jax._src.asynchronous.coordinator import Claim
from lsgd_jax._src.asynchronous.mailbox import finite
from lsgd_jax._src.asynchronous.mixing import own_step, pulled, shifted
from lsgd_jax._src.asynchronous.ports import Pending
from lsgd_jax._src.asynchronous.worker import Worker
from lsgd_jax._src.trees import Tree


class Claims:
    """A worker's claims to its next steps.

    Args:
      worker: whose.
      ahead: whether to ask for a step while the one before it is computed, so that no step
        waits for the answer.
    """

    def __init__(self, worker: Worker, ahead: bool):
        self._worker, self._ahead = worker, ahead
        self._asked: tuple[int, Pending] | None = None

    async def next(self) -> Claim:
        """What the worker does next."""
        worker, step = self._worker, self._worker.count + 1
        asked, self._asked = self._asked, None
        if asked is None or asked[0] != step:  # it has taken over another one's count
            asked = step, worker.ports.claim(step)
        claim = await worker.wait(asked[1])
        if self._ahead and claim.go == "step":
            self._asked = step + 1, worker.ports.claim(step + 1)
        return claim


class FreeRunning:
    """One worker that takes its share of the W · steps of all, as fast as it can.

    Args:
      worker: which one.
      ahead: see `Claims`.
    """

    def __init__(self, worker: Worker, ahead: bool = True):
        self.worker, self._claims = worker, Claims(worker, ahead)

    def step(self, x: Tree, u: Tree, loss: Any, t: int) -> Tree:
        """Where the worker stands after its own step."""
        del t
        y, self.worker.fit = own_step(x, u, loss)
        return y

    @property
    def fit(self) -> bool:
        """Whether the last loss and the parameters after that step are finite."""
        return bool(self.worker.fit)

    async def before_step(self) -> bool:
        """Whether there is another step to take; joins the rounds that are called."""
        while (claim := await self._claims.next()).go == "join":
            await self.join(claim.number)
        return claim.go == "step"

    async def join(self, number: int) -> None:
        """A round that the coordinator calls, where the method has any."""

    # How it is moved

    def pull(self, z: Any, weight: Any, fit: bool) -> bool:
        """Moves the worker towards a vector; whether that is finite."""
        if not finite(z):
            return False
        worker = self.worker
        worker.params = pulled(worker.flat, worker.params, z, weight, fit)
        return True

    def lost(self) -> Any:
        """y - Q(y), what rounding takes of this worker where that is sent; 0 if it is sick.

        Added to what comes from a peer, so that equal workers do not move: Q(y) would draw
        them to itself, and take small steps back.
        """
        mailbox = self.worker.ports.mailbox
        if not mailbox.wire.is_narrow or not self.fit:
            return np.float32(0)
        vector = self.worker.vector()
        return vector - mailbox.rounded(vector)

    def shift(self, by: Any) -> None:
        """Adds a vector to the worker."""
        self.worker.params = shifted(self.worker.flat, self.worker.params, by)

    def mixed(self, since: int) -> None:
        """Notes that the worker was mixed with what left at its own step `since`."""
        self.worker.report.staleness = self.worker.count - since
