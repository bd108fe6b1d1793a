"""What a process knows of the other processes of its run, and how it talks to them.

All of it is among the members of the run: the processes that were started, and after a
loss that the run survives (see `train.run.recovery`) those that are left. Each such group
has folders of its own at the store, so that what the lost ones have left behind, and what
was in flight when they were lost, is of no account any more.
"""

import itertools
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from train.cluster import private_jax
from train.cluster.barriers import Barriers
from train.cluster.connections import Connections
from train.cluster.exit_status import INTERRUPTED
from train.cluster.key_value_store import KeyValueStore
from train.cluster.lost import Late, Lost
from train.cluster.work import Work


if TYPE_CHECKING:
    from train.cluster.heartbeat import Heartbeat


PATIENCE_S = 1800.0
ASKING = "finding out which processes are lost"
ASKS = "asks"  # the folder of the processes that have asked who is lost


class Session:
    """This process among the processes of its run; made by `train.cluster.rendezvous.join`.

    A process by itself has no store, and then nothing is communicated.

    Args:
      store: where the processes leave texts for one another.
      hosts: the host of each process that was started.

    Attributes:
      process_id: which process this one is, from 0.
      hosts: as given.
      barriers: where the processes meet while Orbax writes a checkpoint.
      connections: those of its devices.
      heartbeat: watches over the processes; None for a process by itself.
      work: what the main thread of this process does.
      stopping: whether any process was asked to stop.
      patience: seconds to wait for others that give heartbeats.
      where: says how far this process is and how to go on, for its last line.
    """

    def __init__(self, store: KeyValueStore | None = None, hosts: Sequence[str] = ()):
        self._store = store
        self._started = 1 if store is None else store.num_processes
        self._lost: set[int] = set()  # known to be lost
        self._without: set[int] = set()  # those of them that the run goes on without
        self._numbers = itertools.count()  # of the folders of this group
        self.process_id = 0 if store is None else store.process_id
        self.hosts = list(hosts)
        self.barriers = Barriers(self)
        self.connections = Connections(self)
        self.heartbeat: Heartbeat | None = None
        self.work, self.stopping, self.patience = Work(), False, PATIENCE_S
        self.where: Callable[[], str] = lambda: "before training began"

    @classmethod
    def single(cls) -> "Session":
        """That of a process by itself.

        >>> session = Session.single()
        >>> session.is_main, session.has_others, session.members, session.gather("a")
        (True, False, [0], ['a'])
        """
        return cls()

    # Who there is

    @property
    def is_main(self) -> bool:
        """Whether this process prints, and writes files and figures."""
        return self.process_id == 0

    @property
    def has_others(self) -> bool:
        """Whether this process was started as one of several."""
        return self._started > 1

    @property
    def members(self) -> list[int]:
        """The processes of the run, in order."""
        return [i for i in range(self._started) if i not in self._without]

    @property
    def group(self) -> str:
        """A name for the set of the members: 'all', or 'without-1-2'."""
        without = map(str, sorted(self._without))
        return "-".join(["without", *without]) if self._without else "all"

    def names(self, processes: Iterable[int]) -> str:
        """Processes as messages name them.

        >>> Session(hosts=["a", "b"]).names([1, 0])
        'process 0 (host a) and process 1 (host b)'
        """
        return " and ".join(
            f"process {i} (host {self.hosts[i]})" for i in sorted(processes)
        )

    # Texts for one another; all must ask for the same, in the same order

    def gather(self, text: str) -> list[str]:
        """Every member's text, in every process.

        Raises:
          Late: they have not all come within `patience`; Lost: one of them is lost.
        """
        self.work.begin()
        if self._store is None:
            return [text]
        folder = self.new_folder("round")
        self.write(folder, text)
        texts = self.wait_for_members(folder)
        return [text for _, text in sorted(texts.items())]

    def agree(self, text: str) -> str:
        """The main process's text, in every process."""
        return self.gather(text)[0]

    def same_everywhere(self, text: str) -> bool:
        """Whether every process has passed the same text."""
        return len(set(self.gather(text))) == 1

    def wait_for_all(self) -> None:
        """Returns when every process has come here."""
        self.gather("")

    # Texts at the store, for those with an order of their own

    def new_folder(self, name: str) -> str:
        """A folder that is new to all; they must ask for it in the same order."""
        return f"{name}-{next(self._numbers)}"

    def write(self, folder: str, text: str) -> None:
        """Leaves a text in a folder, in the place of this process's last one."""
        if self._store is not None:
            self._store.write(f"{self.group}/{folder}", text)

    def read(self, folder: str) -> dict[int, str]:
        """The texts that there are in a folder, by process."""
        return {} if self._store is None else self._store.read(f"{self.group}/{folder}")

    def write_for_all(self, folder: str, text: str) -> None:
        """The same as `write`, in a folder that stays when members are lost."""
        if self._store is not None:
            self._store.write(folder, text)

    def read_for_all(self, folder: str) -> dict[int, str]:
        """What `write_for_all` has left, by process."""
        return {} if self._store is None else self._store.read(folder)

    def wait_for_members(self, folder: str, timeout: float | None = None) -> dict[int, str]:
        """The texts in a folder, by process, once every member has left one.

        jax's own barriers do not notice that a process is lost.

        Args:
          timeout: seconds to wait; by None `patience`.

        Raises:
          Late: they are not there in time; Lost: one of the members is lost, or asks who
            is, and so does not come.
        """
        timeout = self.patience if timeout is None else timeout
        deadline, pause = time.monotonic() + timeout, 0.005
        asked: dict[int, str] = {}
        while True:
            texts = self.read(folder)
            if texts.keys() >= set(self.members):
                return texts
            self.check_no_member_is_lost()
            if asked:
                raise Lost(self.lost)
            asked = self.read(ASKS)  # one that has ended in good order asks, too
            if time.monotonic() > deadline:
                missing = self.names(set(self.members) - texts.keys())
                raise Late(f"{missing} did not come within {timeout:g} s")
            time.sleep(pause)
            pause = min(2 * pause, 0.2)

    # Losses

    @property
    def lost(self) -> set[int]:
        """The members that are known to be lost."""
        return self._lost.intersection(self.members)

    @property
    def has_lost_some(self) -> bool:
        """Whether the run goes on without some of the processes that were started."""
        return bool(self._without)

    def note_lost(self, processes: Iterable[int]) -> None:
        """Notes that processes are lost: from then on no process waits for them."""
        self._lost.update(processes)

    def check_no_member_is_lost(self) -> None:
        """Raises Lost if a member is known to be lost."""
        if self.lost:
            raise Lost(self.lost)

    def lost_members(self, timeout: float | None = None) -> set[int]:
        """The members that are lost; waits until each of the others has asked, too.

        Args:
          timeout: seconds to wait; by None `patience`.

        Raises:
          Late: one that lives does not ask in time, because it hangs, say.
        """
        if (store := self._store) is None:
            return set()
        timeout = self.patience if timeout is None else timeout
        self.work.begin(ASKING)
        self.write(ASKS, "")
        answer: queue.Queue[set[int] | Exception] = queue.Queue()

        def ask():
            try:
                answer.put(store.live(self.members))
            except Exception as error:
                answer.put(error)

        # jax's own call has no time limit, nor could a signal interrupt it.
        threading.Thread(target=ask, name="who lives", daemon=True).start()
        try:
            live = answer.get(timeout=min(timeout, threading.TIMEOUT_MAX))
        except queue.Empty:
            silent = self.names(set(self.members) - self.read(ASKS).keys())
            raise Late(
                f"{silent or 'the coordinator'} gives heartbeats, but did not say within "
                f"{timeout:g} s which processes it can reach"
            ) from None
        if isinstance(live, Exception):
            raise live
        return set(self.members) - live

    def service_port(self) -> int | None:
        """The port of the store, if it is reached through the network."""
        return None if self._store is None else self._store.service_port()

    def is_service_there(self) -> bool:
        """Whether the store can be reached, as far as a connection tells."""
        return self._store is not None and self._store.is_service_there()

    def go_on_without(self, processes: Iterable[int]) -> None:
        """Takes processes out of the run; all who stay must do so."""
        processes = set(processes)
        self.note_lost(processes)
        self.work = Work()  # the others may have come further, or less far
        self._without |= processes
        self._numbers = itertools.count()  # the same
        if len(self.members) == 1:
            private_jax.count_one_process()

    # The end

    def tell_where(self, where: Callable[[], str]) -> None:
        """Sets what a last line adds if a process is lost: how far it is, how to go on."""
        self.where = where

    def leave(self, status: int, line: str) -> int:
        """Says why there is no going on, and ends the process if it is one of several.

        One that simply went would wait for the others to come to their end, and they for
        it.

        Returns:
          The exit status, if the process is by itself.
        """
        if self.heartbeat is not None:
            self.heartbeat.leave(status, line)
        print(line if status == INTERRUPTED else f"error: {line}", file=sys.stderr)
        return status
