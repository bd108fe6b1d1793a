"""WAGMA without waiting: means of changing groups, which whoever comes first makes."""

import dataclasses
from typing import Any

import numpy as np

from lsgd_jax._src.asynchronous.errors import Behind, Unreachable
from lsgd_jax._src.asynchronous.free_running import FreeRunning
from lsgd_jax._src.asynchronous.mailbox import Snapshot, finite
from lsgd_jax._src.asynchronous.peers import Peers
from lsgd_jax._src.asynchronous.worker import Worker
from lsgd_jax._src.checks import check_positive_int
from lsgd_jax._src.methods.group import check_group_size, hops_of


@dataclasses.dataclass(frozen=True)
class WAGMA:
    r"""Wait-avoiding group model averaging.

    After its step k = 1, 2, … since the last mean of all, a worker makes the mean of the
    group of S workers that `lsgd_jax.butterfly` gives it for k. It does not wait for the
    others: those who have not taken their step k yet contribute what they showed last, and
    have then contributed to this mean: all who come later find the same parts in it. If its
    own fresh y is not among them, because others were there before, a worker takes

    .. math:: y \leftarrow \left(\sum_{j \in \text{group}} y'_j + y\right) / (S + 1),

    with y' what the members have contributed. Once all workers together have taken W τ
    steps since the last time, τ the `sync_period`, all come together and take the mean of
    all; who has not come within the grace time takes over from one who has. Parts from
    before that mean count no more, so that it bounds the staleness.

    A group with a member that does not answer makes no mean, and for a while no group with
    this member does. Who is not finite is left out and takes the mean whole.

    Args:
      group_size: S, a power of two.
      sync_period: steps per worker between means of all, τ.
      window: losses in a worker's score, as others are told it.

    Raises:
      ValueError: a size that is no power of two, a period or window below 1; when it is
        bound, W is no power of two.

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

    def __post_init__(self):
        check_group_size(self.group_size)
        check_positive_int("sync_period", self.sync_period)
        check_positive_int("window", self.window)

    @property
    def period(self) -> int:
        """Steps per worker between the rounds that the coordinator calls."""
        return self.sync_period

    def bind(self, worker: Worker, steps: int) -> "Grouping":
        """The method in one worker."""
        del steps
        return Grouping(self, worker)


class Grouping(FreeRunning):
    """WAGMA in one worker."""

    def __init__(self, method: WAGMA, worker: Worker):
        # A step that is claimed ahead would have all others wait for it at the next mean.
        super().__init__(worker, ahead=False)
        wire = worker.ports.mailbox.wire
        if wire.is_narrow and not wire.is_stochastic:
            raise ValueError(
                "`wire` must be 'float32' or round at random for WAGMA, whose small steps "
                f"rounding to nearest takes back, such as '{wire.format}-stochastic'; got "
                f"wire='{wire.format}'"
            )
        place = worker.ports.place
        self._hops = hops_of(method.group_size, place.workers)
        self._peers = Peers(range(place.workers))
        self._most = place.workers * method.sync_period + 1  # more than steps of a round
        self._rounds, self._k = 0, 0
        self._error: np.ndarray | None = None  # see `all_reduce`

    @property
    def _number(self) -> int:
        """Of the step: all that comes after a mean of all has higher ones."""
        return self._rounds * self._most + self._k

    async def after_step(self) -> None:
        """The mean of the group."""
        self._k += 1
        self._show()
        group = self._group()
        self._peers.turn()
        if len(group) > 1 and all(map(self._peers.is_tried, group)):
            parts = await self._parts(group)
            if parts is not None:
                self._mix(parts)
        self._show()

    def _show(self) -> None:
        self.worker.measure = self._number
        self.worker.publish()

    def _group(self) -> list[int]:
        group = {self.worker.index}
        for hop in self._hops[(self._k - 1) % len(self._hops)]:
            group |= {i ^ hop for i in group}
        return sorted(group)

    async def _parts(self, group: list[int]) -> dict[int, Snapshot] | None:
        """What each member has contributed; None if one of them does not answer."""
        ports, me, number = self.worker.ports, self.worker.index, self._number
        asked = {i: ports.contribution(i, number) for i in group if i != me}
        parts: dict[int, Any] = {me: ports.mailbox.contributed(number)}
        for i in asked:
            try:
                parts[i] = await self.worker.wait(asked[i])
                self._peers.answered(i)
            except Unreachable:
                self._peers.failed(i)
                return None
        return dict(sorted(parts.items()))

    def _mix(self, parts: dict[int, Snapshot]) -> None:
        worker, first = self.worker, self._rounds * self._most
        vectors = [
            part.vector
            for part in parts.values()
            if part.measure >= first and finite(part.vector)
        ]
        if self.fit and parts[worker.index].measure != self._number:
            vectors.append(worker.vector())
        if not vectors:
            return
        mean = sum(vectors[1:], vectors[0]) / np.float32(len(vectors))
        mine, is_narrow = parts[worker.index], worker.ports.mailbox.wire.is_narrow
        if is_narrow and self.fit and mine.measure == self._number:
            mean = mean + (worker.vector() - mine.vector)  # what rounding took of it
        self.pull(mean, 1.0, self.fit)
        oldest = min(max(part.measure, first) for part in parts.values())
        worker.report.staleness = max(0, self._number - oldest)

    async def join(self, number: int) -> None:
        """The mean of all."""
        worker, ports = self.worker, self.worker.ports
        everyone = list(range(ports.place.workers))
        came = await worker.wait(ports.round(("join", number), None, everyone))
        self._rounds, self._k = number + 1, 0
        if worker.index not in came:
            raise Behind(f"worker {worker.index} came too late for the mean of all")
        vector = worker.vector()
        if self._error is None and ports.mailbox.wire.is_narrow:
            self._error = np.zeros_like(vector)
        mean = ports.total(("mean", number), vector, self.fit, list(came), self._error)
        try:
            sums, count, _ = await worker.wait(ports.start(mean))
        except Unreachable:
            return
        if count:
            self.pull(sums / np.float32(count), 1.0, self.fit)
        self._show()

    def state(self) -> Any:
        """What passes to a worker that starts again."""
        return {"rounds": self._rounds, "k": self._k}

    def take_over(self, state: Any) -> None:
        """Goes on from another worker's."""
        self._rounds, self._k, self._error = int(state["rounds"]), int(state["k"]), None
        self.worker.measure = self._number
