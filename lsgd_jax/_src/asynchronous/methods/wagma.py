"""Asynchronous WAGMA: means of changing groups, made by the first member that arrives."""

import dataclasses
import operator
from collections.abc import Hashable, Sequence
from typing import Any

import jax

from lsgd_jax._src.asynchronous.engine.contents import (
    combined,
    finite,
    unpack,
)
from lsgd_jax._src.asynchronous.engine.errors import StaleWorkerError, UnreachableError
from lsgd_jax._src.asynchronous.engine.worker import Worker
from lsgd_jax._src.asynchronous.methods.driver import (
    Driver,
    FreeRunning,
    InFlight,
)
from lsgd_jax._src.methods.wagma import check_group_size, hops_of
from lsgd_jax._src.trees import Tree
from lsgd_jax._src.wire.wire import Wire, WireFormat


@dataclasses.dataclass(frozen=True)
class WAGMA(FreeRunning):
    r"""Wait-avoiding group model averaging.

    After its step k = 1, 2, … since the last mean of all workers, a worker averages the
    group of S workers that `lj.rules.butterfly` gives for k. It does not wait for the other
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

    In a narrow wire format Q the workers send differences to R, the last mean of all, so
    that rounding is relative to the steps taken since:

    .. math:: y \leftarrow R + \Bigl( \sum_{j \in \text{group}} (Q(y'_j - R) + e) + (y - R)
      \Bigr) / (S + 1)

    with e the worker's own quantization error, so that equal workers do not move.

    Args:
      group_size: S, a power of two.
      sync_period: steps per worker between means of all workers, τ.
      window: number of losses in a worker's score.
      wire: the format in which parameters travel, or a `Wire`.

    Raises:
      ValueError: a size that is not a power of two, a period or window below 1; at `bind`,
        a number of workers W that is not a power of two.

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

    positive = ("sync_period", "window")

    def __post_init__(self):
        super().__post_init__()
        check_group_size(self.group_size)

    @property
    def period(self) -> int:
        """Steps per worker between barriers of the coordinator."""
        return self.sync_period


class WAGMAWorker(Driver):
    """WAGMA in one worker."""

    def __init__(self, method: WAGMA, worker: Worker):
        workers = worker.transport.position.workers
        self._hops = hops_of(method.group_size, workers)
        # A step claimed ahead would keep all other workers waiting at the next barrier.
        super().__init__(worker, range(workers), ahead=False)
        self._most = workers * method.sync_period + 1  # exceeds the steps between barriers
        self.rounds = 0
        self.k = 0
        self.kept = ("rounds", "k")
        self._error: Tree = None  # of this worker's contributions to means of all
        # The last mean of all, or the start: contributions are differences to it.
        self.reference: Tree = None
        if self.transport.mailbox.wire.is_narrow:
            self.reference = worker.on_host()
            self.kept = ("rounds", "k", "reference")
        worker.measure = lambda: self._number
        worker.reference = lambda: self.reference

    @property
    def _number(self) -> int:
        """Number of this worker's current mean, which increases across barriers."""
        return self.rounds * self._most + self.k

    def stepped(self) -> None:
        """Counts the step; the group's mean is of the parameters after it."""
        self.k += 1
        self.worker.publish()

    async def done(self) -> None:
        """Takes the mean of the group."""
        group = {self.worker.index}
        for hop in self._hops[(self.k - 1) % len(self._hops)]:
            group |= {i ^ hop for i in group}
        self.peers.count_choice()
        if len(group) > 1 and all(map(self.peers.is_tried, group)):
            await self._mix(sorted(group))

    async def _mix(self, group: list[int]) -> None:
        worker = self.worker
        number = self._number
        first = self.rounds * self._most
        for i in group:
            if i != worker.index:
                answer = self.transport.ask(i, "contribution", number)
                self.in_flight[i] = InFlight(answer, worker.count, i)
        _, mine, error = self.transport.mailbox.contributed(number)
        given = [mine if i == worker.index else await self.answer(i) for i in group]
        if any(each is None for each in given):
            return
        trees = [
            each.params
            for each in given
            if each.measure // self._most == self.rounds and finite(each.params)
        ]
        counted = len(trees)
        if self.is_finite and mine.measure != number:
            trees.append(self._difference())
        if not trees:
            return
        mean = self._mean(trees)
        if self.is_finite and error is not None:
            # A worker adds its own error to every contribution: equal ones do not move.
            mean = combined(lambda x, e: x + e * counted / len(trees), mean, error)
        self.pull(mean, 1.0, self.is_finite)
        oldest = min(max(each.measure, first) for each in given)
        worker.report.staleness = max(0, number - oldest)

    def _difference(self) -> Tree:
        """Returns the parameters as they travel: y - R, or y in float32."""
        y = self.worker.on_host()
        return y if self.reference is None else combined(operator.sub, y, self.reference)

    def _mean(self, trees: Sequence[Tree]) -> Tree:
        """Returns the parameters at the mean of such differences."""
        mean = combined(lambda *x: sum(x[1:], x[0]) / len(x), *trees)
        if self.reference is None:
            return mean
        return combined(operator.add, mean, self.reference)

    async def join(self, number: int) -> None:
        """Takes the mean of all workers."""
        worker = self.worker
        transport = self.transport
        if self.reference is not None and number != self.rounds:
            raise StaleWorkerError(f"worker {worker.index} has missed a mean of all")
        everyone = list(range(transport.position.workers))
        came = await worker.wait(transport.round(("join", number), None, everyone))
        self.rounds = number + 1
        self.k = 0
        if worker.index not in came:
            raise StaleWorkerError(
                f"worker {worker.index} came too late for the mean of all workers"
            )
        mean_of_all = self._mean_of_all(("mean", number), list(came))
        try:
            mean = await worker.wait(transport.start(mean_of_all))
        except UnreachableError:
            return
        if mean is not None and self.pull(mean, 1.0, self.is_finite):
            if self.reference is not None:
                self.reference = mean
        self.worker.publish()

    async def _mean_of_all(self, key: Hashable, members: list[int]) -> Tree:
        """Returns the mean of the members that are finite, or None without any."""
        mailbox = self.transport.mailbox
        collectives = self.transport.collectives
        y = self._difference()
        gives = self.is_finite
        if not mailbox.wire.is_narrow:
            total, count, _ = await collectives.all_reduce(key, y, gives, members)
            return combined(lambda x: x / count, total) if count else None
        packed, _, error = mailbox.encoded(y, self._error) if gives else ((), (), None)
        rows = (await collectives.all_gather(key, packed, members)).values()
        self._error = error
        given = [row for row in map(unpack, rows) if jax.tree.leaves(row)]
        return self._mean(given) if given else None

    def take_over(self, state: Any) -> None:
        """Continues from another worker's barriers and steps."""
        super().take_over(state)
        self._error = None


WAGMA.driver = WAGMAWorker
