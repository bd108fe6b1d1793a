"""Asynchronous WAGMA: means of changing groups, made by the first member that arrives."""

import dataclasses
from typing import Any

import numpy as np

from lsgd_jax._src.asynchronous.collective import all_reduce
from lsgd_jax._src.asynchronous.free_running import FreeRunningWorker, InFlight
from lsgd_jax._src.asynchronous.transport import StaleWorkerError, UnreachableError
from lsgd_jax._src.asynchronous.vectors import check_wire, finite
from lsgd_jax._src.asynchronous.worker import Worker
from lsgd_jax._src.checks import check_positive_int
from lsgd_jax._src.methods.group import check_group_size, hops_of
from lsgd_jax._src.wire import Wire, WireFormat


@dataclasses.dataclass(frozen=True)
class WAGMA:
    r"""Wait-avoiding group model averaging.

    After its step k = 1, 2, … since the last mean of all workers, a worker averages the
    group of S workers that `lsgd_jax.butterfly` gives for k. It does not wait for the other
    members: workers that have not reached step k contribute their most recently published
    parameters y'. A contribution to a mean is fixed, so that all members average the same
    parameters. If other members arrived first, a worker's fresh y is not among them. It
    then takes

    .. math:: y \leftarrow \left(\sum_{j \in \text{group}} y'_j + y\right) / (S + 1).

    Every W τ steps of all workers together, with τ the `sync_period`, all workers take the
    mean of all. A worker that has not come within the timeout takes over from one that has.
    Contributions from before that mean no longer count, which bounds the staleness.

    A group with a member that does not answer takes no mean, and groups with this member
    are skipped for a while. A worker that is not finite contributes nothing and takes the
    mean as it is.

    Args:
      group_size: S, a power of two.
      sync_period: steps per worker between means of all workers, τ.
      window: number of losses in a worker's score.
      wire: the format in which vectors travel, or a `Wire`.

    Raises:
      ValueError: a size that is not a power of two, a period or window below 1, a wire
        format that rounds to nearest; at `bind`, a number of workers W that is not a power
        of two.

    Reference: Li, Ben-Nun, Dryden, Di Girolamo, Hoefler, Breaking (Global) Barriers in
    Parallel Stochastic Optimization with Wait-Avoiding Group Averaging, 2020,
    arXiv:2005.00124.

    >>> import lsgd_jax as lj
    >>> lj.asynchronous.WAGMA(group_size=2, sync_period=8).period
    8
    """

    group_size: int = 2
    sync_period: int = 10
    window: int = 10
    wire: Wire | WireFormat = "float32"

    def __post_init__(self):
        check_wire(self.wire)
        wire = Wire.of(self.wire)
        if wire.format != "float32" and wire.rounding == "nearest":
            raise ValueError(
                "`wire` must be 'float32' or round at random for WAGMA, because "
                "rounding to nearest takes its small steps back, such as "
                f"'{wire.format}-stochastic'; got wire='{wire.format}'"
            )
        check_group_size(self.group_size)
        check_positive_int("sync_period", self.sync_period)
        check_positive_int("window", self.window)

    @property
    def period(self) -> int:
        """Steps per worker between barriers of the coordinator."""
        return self.sync_period

    def bind(self, worker: Worker, steps: int) -> "WAGMAWorker":
        """Returns the method in one worker."""
        return WAGMAWorker(self, worker)


class WAGMAWorker(FreeRunningWorker):
    """WAGMA in one worker."""

    kept = ("rounds", "k")

    def __init__(self, method: WAGMA, worker: Worker):
        workers = worker.transport.position.workers
        self._hops = hops_of(method.group_size, workers)
        # A step claimed ahead would keep all other workers waiting at the next barrier.
        super().__init__(worker, range(workers), ahead=False)
        self._most = workers * method.sync_period + 1  # exceeds the steps between barriers
        self.rounds, self.k = 0, 0
        self._error: np.ndarray | None = None  # quantization error, see `all_reduce`

    @property
    def _number(self) -> int:
        """Number of this worker's current mean, which increases across barriers."""
        return self.rounds * self._most + self.k

    async def after_step(self) -> None:
        """Takes the mean of the group."""
        self.k += 1
        self._publish()
        group = self._group()
        self.peers.turn()
        if len(group) > 1 and all(map(self.peers.is_tried, group)):
            self._mix(await self._contributions(group))
        self._publish()

    def _publish(self) -> None:
        self.worker.measure = self._number
        self.worker.publish()

    def _group(self) -> list[int]:
        group = {self.worker.index}
        for hop in self._hops[(self.k - 1) % len(self._hops)]:
            group |= {i ^ hop for i in group}
        return sorted(group)

    async def _contributions(self, group: list[int]) -> dict[int, Any]:
        """Contribution of each member; None for a member that does not answer."""
        me, number = self.worker.index, self._number
        for i in group:
            if i != me:
                answer = self.transport.ask(i, "contribution", number)
                self.in_flight[i] = InFlight(answer, self.worker.count, i)
        mine = self.transport.mailbox.contributed(number)
        return {i: mine if i == me else await self.answer(i) for i in group}

    def _mix(self, contributions: dict[int, Any]) -> None:
        if None in contributions.values():
            return
        worker, first = self.worker, self.rounds * self._most
        mine, given = contributions[worker.index], list(contributions.values())
        vectors = [
            each.vector for each in given if each.measure >= first and finite(each.vector)
        ]
        is_fresh = mine.measure == self._number
        if self.is_finite and not is_fresh:
            vectors.append(worker.vector())
        if not vectors:
            return
        mean = sum(vectors[1:], vectors[0]) / np.float32(len(vectors))
        if self.transport.mailbox.is_narrow and self.is_finite and is_fresh:
            mean = mean + (worker.vector() - mine.vector)  # its quantization error
        self.pull(mean, 1.0, self.is_finite)
        oldest = min(max(each.measure, first) for each in given)
        worker.report.staleness = max(0, self._number - oldest)

    async def join(self, number: int) -> None:
        """Takes the mean of all workers."""
        worker, transport = self.worker, self.transport
        everyone = list(range(transport.position.workers))
        came = await worker.wait(transport.round(("join", number), None, everyone))
        self.rounds, self.k = number + 1, 0
        if worker.index not in came:
            raise StaleWorkerError(
                f"worker {worker.index} came too late for the mean of all workers"
            )
        vector = worker.vector()
        if self._error is None and transport.mailbox.is_narrow:
            self._error = np.zeros_like(vector)
        total = all_reduce(
            transport, ("mean", number), vector, self.is_finite, list(came), self._error
        )
        try:
            sums, count, _ = await worker.wait(transport.start(total))
        except UnreachableError:
            return
        if count:
            self.pull(sums / np.float32(count), 1.0, self.is_finite)
        self._publish()

    def take_over(self, state: Any) -> None:
        """Continues from another worker's barriers and steps."""
        super().take_over(state)
        self._error, self.worker.measure = None, self._number
