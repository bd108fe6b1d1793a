"""What a worker can ask of its peers and of the coordinator, whatever carries the messages.

An engine (Ray, the simulator, the one in memory) implements `Ports` for each worker. The
methods are written once, against these, as coroutines: `await` gives the result of a call
that is in flight, and the engine decides what passes meanwhile: real time, simulated time,
or the other workers' turns.
"""

import abc
from collections.abc import Coroutine, Generator, Hashable, Sequence
from typing import Any

import numpy as np

from lsgd_jax._src.asynchronous.collective import all_reduce, fetched
from lsgd_jax._src.asynchronous.coordinator import Claim, Report
from lsgd_jax._src.asynchronous.errors import Behind, Unreachable
from lsgd_jax._src.asynchronous.mailbox import Mailbox, Snapshot
from lsgd_jax._src.asynchronous.place import Place


class Pending(abc.ABC):
    """A call that is in flight; `await` gives its result.

    Raises:
      Unreachable: when awaited, there was no answer within the limit; any error that the
        call has raised.
    """

    @property
    @abc.abstractmethod
    def done(self) -> bool:
        """Whether awaiting it would not wait."""

    @abc.abstractmethod
    def __await__(self) -> Generator[Any, Any, Any]: ...


class Ports(abc.ABC):
    """What one worker can ask of others. No call blocks; what comes back is awaited.

    Attributes:
      place: where this worker stands.
      grace: seconds that it waits for a worker that does not come or answer.
      mailbox: what others may ask of this worker; the methods post there.
      waited: seconds spent waiting so far.
    """

    place: Place
    grace: float
    mailbox: Mailbox
    waited: float = 0.0

    # Time

    @abc.abstractmethod
    def now(self) -> float:
        """Seconds since the run began."""

    @abc.abstractmethod
    def stepped(self) -> Pending:
        """One step has been computed: simulated time passes, real time has."""

    @abc.abstractmethod
    def sleep(self, seconds: float) -> Pending:
        """Awaited, lets time pass."""

    @abc.abstractmethod
    def start(self, coroutine: Coroutine[Any, Any, Any]) -> Pending:
        """Runs a coroutine beside the steps; awaited, gives what it returns."""

    # Peers

    @abc.abstractmethod
    def latest(self, peer: int) -> Pending:
        """A peer's latest `Snapshot`, without the peer having to do anything."""

    @abc.abstractmethod
    def exchange(self, peer: int, vector: np.ndarray) -> Pending:
        """Moves a peer half the way to a vector: what it had before. See `Mailbox`."""

    @abc.abstractmethod
    def fetch(self, peer: int, key: Hashable, part: slice = slice(None)) -> Pending:
        """What a peer posts under a key, as soon as it has: a vector, or part of it.

        `mailbox.GONE` if the peer has posted so much since that it is forgotten.
        """

    @abc.abstractmethod
    def contribution(self, peer: int, number: int) -> Pending:
        """What a peer adds to its group's mean number so-and-so: see `Mailbox`."""

    @abc.abstractmethod
    def state(self, peer: int) -> Pending:
        """All that a worker needs to take a peer's place: see `Mailbox.state`."""

    def post(self, key: Hashable, vector: np.ndarray) -> None:
        """Leaves a vector in the mailbox, for whoever fetches it."""
        self.mailbox.post(key, vector)

    async def total(
        self,
        key: Hashable,
        vector: np.ndarray,
        gives: bool,
        group: Sequence[int],
        error: np.ndarray | None = None,
    ) -> tuple[np.ndarray, int, list[int]]:
        """The sum over a group, how many have given, who came: see `all_reduce`."""
        return await all_reduce(self, key, vector, gives, group, error)

    async def broadcast(
        self, key: Hashable, vector: np.ndarray | None, source: int, group: Sequence[int]
    ) -> np.ndarray:
        """What the source gives to its group; of all others the vector is None."""
        del group
        if vector is None:
            return await fetched(self.fetch(source, key))
        vector = self.mailbox.rounded(vector)
        self.post(key, vector)
        return vector

    # The coordinator

    @abc.abstractmethod
    def enter(self, steps: int) -> Pending:
        """Takes part from now on, with so many steps taken: see `Coordinator.enter`."""

    @abc.abstractmethod
    def claim(self, step: int) -> Pending:
        """Whether to take step number so-and-so: a `Claim`."""

    @abc.abstractmethod
    def round(self, key: Hashable, value: Any, members: list[int]) -> Pending:
        """What each of the members brings to a round: {member: value}, equal for all.

        It is closed when all members that are present have come (of those whom all who
        have come so far name), or at the latest when
        one of them has waited for `grace` seconds: who has not come by then is absent
        until it is heard of again. Who comes later gets what was closed without it.

        Raises:
          Behind: when awaited, it was closed so long ago that it is forgotten.
        """

    @abc.abstractmethod
    def missed(self, peer: int) -> Pending:
        """Tells the coordinator of a peer that did not answer within `grace`.

        It is absent until it is heard of again: rounds do not wait for it once more.
        """

    @abc.abstractmethod
    def report(self, report: Report) -> Pending:
        """Tells the coordinator how far this worker is: the `Standing` of all."""


__all__ = [
    "Behind",
    "Claim",
    "Pending",
    "Place",
    "Ports",
    "Report",
    "Snapshot",
    "Unreachable",
]
