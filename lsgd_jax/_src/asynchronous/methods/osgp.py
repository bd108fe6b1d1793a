"""Overlap SGP: push-sum gossip beside the steps, which is D-PSGD on balanced graphs."""

import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from lsgd_jax._src.asynchronous.engine.contents import Snapshot, combined, on_host
from lsgd_jax._src.asynchronous.engine.worker import Worker
from lsgd_jax._src.asynchronous.methods.driver import (
    Driver,
    FreeRunning,
    InFlight,
)
from lsgd_jax._src.topology import Graph, exponential, for_group
from lsgd_jax._src.trees import Tree
from lsgd_jax._src.wire.wire import Wire, WireFormat


@dataclasses.dataclass(frozen=True)
class OSGP(FreeRunning):
    r"""Overlap SGP: messages of push-sum travel while the workers compute.

    Before its step t a worker i sends its parameters :math:`x_i` and its push-sum weight
    :math:`w_i`, which is 1 at first. Meanwhile it computes its update :math:`u_i` at
    :math:`x_i`:

    .. math::
      w_i \leftarrow P_{ii} w_i, \qquad x_i \leftarrow x_i + u_i / w_i

    After the step it adds every message :math:`(x_j, w_j)` that has arrived:

    .. math::
      w_i \leftarrow w_i + P_{ij} w_j, \qquad
      x_i \leftarrow x_i + \frac{P_{ij} w_j}{w_i} (x_j - x_i)

    P is the mixing matrix of the graph's round of the message's step. A worker waits for
    messages of step t at the end of its step t + σ - 1, with σ the `staleness`, so
    neighbors are never more than σ steps apart.

    A message of step t that has not arrived at the end of step t is late. Until it arrives,
    a loan of the same share stands in for it:

    .. math::
      w_i \leftarrow w_i + P_{ij}, \qquad
      x_i \leftarrow x_i + \frac{P_{ij}}{w_i} (\tilde x_i - x_i)

    with :math:`\tilde x_i` the common start in the first σ - 1 steps, and then the worker's
    own parameters before the step. Later messages that are late take over the loans of
    those that have arrived. When fewer are late, :math:`w_i` is reduced by what is left.
    Without loans w would halve in each step without a message, and updates are divided by
    it. Σ w over all workers and all messages in flight, less the loans, never changes.
    Σ w x changes by the updates and the loans only.

    With σ = 1 nothing is ever late, and the numbers are those of `lsgd_jax.osgp` in lock
    step. With messages that all take σ - 1 steps they are, too, if P takes as much from
    neighbors in each step. With a doubly stochastic P that leaves the worker the same share
    in each step, such as that of a `ring`, w is 1 after every step, and with σ = 1 the
    numbers are those of `lsgd_jax.dpsgd`.

    A neighbor that does not answer is not asked until it takes part again. In the meantime
    it counts as one with this worker's parameters and a weight of 1. A
    worker that is not finite keeps its weight, sends nothing, and takes the first message
    whole.

    Args:
      topology: any graph, or a function of W that builds it.
      staleness: σ ≥ 1, the number of steps after which a worker waits for a message.
      window: number of losses in a worker's score.
      wire: the format in which parameters travel, or a `Wire`.

    Raises:
      ValueError: a staleness or window below 1; when a run begins, a graph of another size.

    Reference: Assran et al., Stochastic Gradient Push, ICML 2019, arXiv:1811.10792,
    section 4 (overlap), and its released code, which also overlaps D-PSGD.

    >>> import lsgd_jax as lj
    >>> lj.asynchronous.OSGP(lj.topology.ring).staleness
    1
    """

    topology: Graph = exponential
    staleness: int = 1
    window: int = 10
    wire: Wire | WireFormat = "float32"

    positive = ("staleness", "window")

    def bind(self, worker: Worker, steps: int) -> "OSGPWorker":
        """Returns the method in one worker."""
        return OSGPWorker(self, worker, steps)


NOTHING = Snapshot((), 0.0)  # the message of a worker without x


class OSGPWorker(Driver):
    """Overlap SGP in one worker."""

    kept = ("weight",)

    def __init__(self, method: OSGP, worker: Worker, steps: int):
        workers = worker.transport.position.workers
        super().__init__(worker, range(workers), steps=steps)
        graph = for_group(method.topology)(workers)
        self._mixing = graph.mixing
        self._rounds = np.asarray(graph.round_at(jnp.arange(1, steps + 1)))
        self.patience = method.staleness
        self._workers = workers
        self.weight = np.float32(1)
        self._lent = 0.0  # the weight that stands in for messages that are late
        self._start: Tree = None  # the common start, as long as it is lent
        self._unread = most_unread(self._mixing, worker.index, method.staleness)
        self.transport.mailbox.keep(self._unread)
        self._has_x = True  # False from a step that is not finite until a message lands
        self._error: Tree = None  # the quantization error of what this step gives away

    async def finish(self) -> None:
        """Lands the last messages."""
        for slot in sorted(self.in_flight):
            await self.land(slot)
        self._settle()

    def ask(self) -> None:
        """Sends the message of the step and asks for those of the in-neighbors."""
        t = self.worker.count + 1
        me = self.worker.index
        status = self.worker.status
        mixing = self._mixing[self._rounds[t - 1]]
        self._error = None
        if t == 1 and self.patience > 1:
            self._start = self.worker.on_host()
        readers = len(self._neighbors(mixing[:, me]))
        if readers:
            message = NOTHING
            if self._has_x:
                mailbox = self.transport.mailbox
                kept = float(mixing[me, me])
                packed, _, error = mailbox.encoded(self.worker.on_host())
                message = Snapshot(packed, float(self.weight))
                if error is not None:
                    given = (1 - kept) * self.weight
                    self._error = combined(lambda e: given * e, error)
                self.weight *= kept
            self.transport.mailbox.post(("gossip", t), message, readers)
        # Workers that take part, or have done so to the end, as far as is known.
        there = range(self._workers)
        if status is not None:
            there = {*status.present, *status.finished}
        self.peers.count_choice()
        for peer in self._neighbors(mixing[me]):
            if self.peers.is_tried(peer) and peer in there:
                answer = self.transport.ask(peer, "fetch", ("gossip", t))
                slot = t * self._workers + peer
                self.in_flight[slot] = InFlight(answer, self.worker.count, peer)
            else:
                self.weight += float(mixing[me, peer])

    def stepped(self) -> None:
        """Takes back the quantization error of what the step has given away."""
        self._has_x = self.is_finite
        if self._error is not None and self._has_x:
            self.shift(combined(lambda e: e / self.weight, self._error))

    async def done(self) -> None:
        """Lends for what is late."""
        if self.worker.count >= self.patience:
            self._start = None  # the messages of the first step have arrived
        self._settle()

    def _settle(self) -> None:
        """Makes the loans equal to the shares of the messages in flight."""
        due = sum(self._share(request) for request in self.in_flight.values())
        if math.isclose(due, self._lent, rel_tol=1e-6, abs_tol=1e-6):
            return
        if due > self._lent:
            self._lend(due - self._lent)
        else:
            self._pay_back(self._lent - due)

    def _lend(self, late: float) -> None:
        """Adds parameters from before the step in place of messages, to a finite x."""
        before = on_host(self.worker.x) if self._start is None else self._start
        weight = self.weight + late
        if self._has_x and self.pull(before, late / weight, is_finite=True):
            self.weight = weight
            self._lent += late

    def _pay_back(self, excess: float) -> None:
        """Takes weight away, and leaves x as it is.

        It is all of the excess if w is 1 without loans. A smaller w stays positive, and the
        rest is paid in later steps.
        """
        paid = min(excess, float(self.weight) * excess / (1 + excess))
        self.weight -= paid
        self._lent -= paid

    def _share(self, request: InFlight) -> float:
        """Returns the share P_ij of the message for which a request waits."""
        mixing = self._mixing[self._rounds[request.since]]
        return float(mixing[self.worker.index, request.peer])

    async def land(self, slot: int = 0) -> None:
        """Waits for a message and adds it."""
        request = self.in_flight[slot]
        share = self._share(request)
        message = await self.answer(slot)
        if message is None:
            self.weight += share
            self.transport.tell("missed", request.peer)  # so that no other waits for it
            return
        mass = share * message.measure
        if mass:
            weight = self.weight + mass
            if self.pull(message.params, mass / weight, self._has_x):
                self.weight = weight
                self._has_x = True
                self.worker.report.staleness = self.worker.count - request.since

    def _neighbors(self, shares: np.ndarray) -> list[int]:
        """The other workers with a share, given a row or a column of P."""
        return [i for i in np.flatnonzero(shares).tolist() if i != self.worker.index]

    def take_over(self, state: Any) -> None:
        """Continues from another worker's weight."""
        super().take_over(state)
        self._has_x = True
        self._error = None
        # Nothing is in flight any more.
        self._lent = 0.0
        self._start = None
        count = self.worker.count
        for t in range(max(1, count - self._unread + 1), count + 1):
            # Workers that are behind do not wait for what it never sends.
            self.transport.mailbox.post(("gossip", t), NOTHING)


def most_unread(mixing: np.ndarray, index: int, staleness: int) -> int:
    """Returns how many messages of a worker can be unread at a time.

    A worker waits for messages that are σ steps old, and each of the m rounds has other
    edges, so it is at most σ + m - 1 steps ahead of an in-neighbor. It is ahead of a reader
    of its messages by at most as many times this as a path from the reader back to it has
    edges. Requests of the reader's last σ steps can still be on their way.

    Args:
      mixing: the mixing matrices P, [m, W, W].
      index: of the worker.
      staleness: σ.

    >>> import lsgd_jax as lj
    >>> ring = lj.topology.from_edges([[(0, 1), (1, 2), (2, 3), (3, 0)]])
    >>> most_unread(ring.mixing, index=0, staleness=1)
    5
    """
    joined = mixing.max(axis=0) > 0  # [to, from]
    readers = np.flatnonzero(joined[:, index])
    reached = np.arange(len(joined)) == index
    edges = 0
    while not reached[readers].all():
        further = reached | joined[reached].any(axis=0)
        if (further == reached).all():
            break  # no path: nothing keeps the worker from going on
        reached = further
        edges += 1
    return edges * (staleness + len(mixing) - 1) + staleness + 1
