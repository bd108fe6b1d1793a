"""Members: the processes of a loop that live, as jax's coordination service knows them.

jax calls a process lost when its heartbeats stay out. The processes talk through the
service's key-value store, so no word of theirs needs a process that is lost. Process 0,
which holds the service, decides; the others follow its verdicts, in their order.
"""

import atexit
import contextlib
import itertools
import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import distributed  # the service has no public name

from lsgd_jax._src.exchange.crew import LOOK_S, LoopEnded, Verdict, error_of
from lsgd_jax._src.exchange.exchange import Exchange
from lsgd_jax._src.trees import Tree
from lsgd_jax._src.wire.group import Group
from lsgd_jax._src.workers.spmd import Grid
from lsgd_jax._src.workers.twin import among, name_of, processes_of


WATCH_S = 0.5  # between two questions about who lives
KEPT = 100  # verdicts, and what was heard: a newcomer may be late
PATIENCE_MS = 60_000  # of one question to the service; it is asked again
LEAVING_S = 60.0  # how long process 0 waits for the others to leave
_numbers = itertools.count()  # loops begin in the same order in all processes


class Members:
    """The processes of one loop that live. All call the same methods in the same order.

    Args:
      client: of the coordination service.
      me: the number of this process.
      processes: the number of processes.
    """

    def __init__(self, client: Any, me: int, processes: int):
        self._client = client
        self._name = f"lsgd_jax/members/{next(_numbers)}"
        self._me = me
        self._processes = range(processes)
        self._incarnation = client.get_live_nodes([me])[me]
        self._live: dict[int, int] = {}  # the processes at the last look
        self._members: dict[int, int] = {}  # the incarnation of each process
        self._number = 0  # of the next verdict
        self._changes = 0  # how often the members have changed
        self._names: deque[str] = deque()  # of what was heard
        # Threads that talk with the service, and how each is told to end.
        self._others: list[tuple[threading.Thread, Callable[[], None]]] = []
        self._stops = ""  # why all stop
        self.is_closed = False
        self._watching = threading.Thread(target=self._watch, daemon=True)
        self._watching.start()

    @classmethod
    def of_jax(cls) -> "Members":
        """The processes of `jax.distributed`.

        Raises:
          ValueError: jax ends all of them with a lost one, or there is one process only.
        """
        client = distributed.global_state.client
        if client is None or not jax.config.jax_enable_recoverability:  # type: ignore
            raise ValueError(
                "`min_workers` needs several processes that may be lost: call "
                '`jax.config.update("jax_enable_recoverability", True)` before '
                "`jax.distributed.initialize`"
            )
        members = cls(client, jax.process_index(), jax.process_count())
        atexit.register(members.leave)
        return members

    def _watch(self) -> None:
        """Asks again and again who lives; all that live must ask, too."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # the process ends
            while True:
                live = self._client.get_live_nodes(list(self._processes))
                self._live = dict(sorted(live.items()))
                time.sleep(WATCH_S)

    # What the members agree on

    def meet(self, counts: Sequence[int]) -> Verdict:
        """The first members; or those that this process joins, if they have begun.

        It waits until all processes have begun, or until the members let it in. Process 0
        says where the training begins; processes that begin elsewhere are newcomers.

        counts: the steps that each method has taken in this process.

        Raises:
          LoopEnded: the members have come to their end.
        """
        own = self._incarnation
        if self._read("now") is None:
            self._tell([own, list(counts)], "begun", self._me)
            if self._me == 0:
                self._wait_until(self._have_all_begun)
                self._tell(self._first(counts), "now")
            told = self._awaited("now")
            if told["members"].get(str(self._me)) == self._incarnation:
                return self._enter(told)
        self._tell(own, "join", self._me)
        told = None
        while told is None:
            end = self._read("end")
            if end:
                raise LoopEnded(f"the others have stopped: {end}")
            if end == "":
                raise LoopEnded("the others have taken their last step", is_over=True)
            time.sleep(LOOK_S)
            told = self._read("entry", self._me, own)
        self._delete("entry", self._me, own)
        return self._enter(told)

    def judge(
        self,
        before: Mapping[str, Any],
        after: Mapping[str, Any],
        results: Tree,
        admits: bool = True,
    ) -> Verdict:
        """Agrees on whether a message counts, and on who lives after it.

        Args:
          before: where in the training newcomers begin if the message does not count; as
            JSON.
          after: likewise if it counts.
          results: the arrays that the message makes.
          admits: whether newcomers may come in.
        """
        number = self._number
        has_told = False
        while True:
            if not has_told and is_known(results):
                self._tell(str(error_of(results) or ""), "done", number, self._me)
                has_told = True
            if self._may_decide(number, has_told):
                break
            time.sleep(LOOK_S)
        if self._me == 0:
            done = self._told("done", number)
            failed = next((error for error in done.values() if error), "")
            lost = self._lost()
            stay = {p: x for p, x in self._members.items() if p not in lost}
            counts = not failed and len(stay) == len(self._members)
            place = after if counts else before
            told = self._decided(stay, place, failed, admits)
            self._tell(told, "verdict", number)
            for process in self._processes:
                self._delete("done", number, process)
            # By then all members have read it.
            self._delete("verdict", number - KEPT)
        return self._enter(self._awaited("verdict", number))

    def _may_decide(self, number: int, has_told: bool) -> bool:
        """Whether process 0 can decide, or another one may wait for its verdict."""
        if self._me:
            return has_told or self._read("verdict", number) is not None
        return (
            bool(self._lost()) or self._told("done", number).keys() >= self._members.keys()
        )

    def stop_all(self, why: str) -> None:
        """Tells all members in the next verdict to stop; in process 0."""
        self._stops = why

    def say(self, name: str, value: Any) -> None:
        """Says something to all members.

        Args:
          name: tells what is said, in all processes.
          value: JSON.
        """
        self._tell(value, "said", name, self._me)

    def heard(self, name: str, members: Mapping[int, int]) -> dict[int, Any] | None:
        """What each process has said, by its number; None if it is not known yet.

        members: the processes for which process 0 waits, as long as they live.
        """
        if self._me == 0:
            said = self._told("said", name)
            awaited = {p for p, x in members.items() if self._live.get(p) == x}
            if not said.keys() >= awaited:
                return None
            self._tell(said, "heard", name)
            for process in self._processes:
                self._delete("said", name, process)
            self._names.append(name)
            if len(self._names) > KEPT:
                self._delete("heard", self._names.popleft())
        heard = self._read("heard", name)
        return heard and {int(process): said for process, said in heard.items()}

    def start(self, work: Callable[[], None], end: Callable[[], None]) -> None:
        """Runs `work` in a thread. The end of the process calls `end`, and waits for it."""
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        self._others.append((thread, end))

    def close(self) -> None:
        """Waits until all members that live have called this."""
        self._tell("", "closed", self._me)
        if self._me == 0:

            def are_all() -> bool:
                return self._told("closed").keys() >= self._members.keys() - self._lost()

            self._wait_until(are_all)
            self._tell(self._stops, "end")
        self._awaited("end")
        self.is_closed = True

    def leave(self) -> None:
        """The end of the process, at which Python must not take a thread from C++."""
        if self._me == 0 and self.is_closed:
            # jax aborts those who lose its service.
            end = time.monotonic() + LEAVING_S
            self._wait_until(lambda: len(self._live) == 1 or time.monotonic() > end)
        jax.distributed.shutdown()  # answers all questions
        self._watching.join(LEAVING_S)
        for thread, end in self._others:
            end()
            thread.join(LEAVING_S)

    # Decisions of process 0

    def _have_all_begun(self) -> bool:
        begun = {process: own for process, (own, _) in self._told("begun").items()}
        return bool(self._live) and begun == self._live

    def _first(self, counts: Sequence[int]) -> dict[str, Any]:
        """The first verdict."""
        told = self._decided(self._live, {"counts": list(counts), "sent": 0}, failed="")
        begun = self._told("begun").items()
        told["newcomers"] = {p: own for p, (own, theirs) in begun if theirs != list(counts)}
        return told

    def _lost(self) -> set[int]:
        """The members that do not live, or have started again."""
        return {p for p, x in self._members.items() if self._live.get(p) != x}

    def _decided(
        self,
        stay: Mapping[int, int],
        place: Mapping[str, Any],
        failed: str,
        admits: bool = False,
    ) -> dict[str, Any]:
        """The next verdict; newcomers are told.

        Args:
          stay: the members that live.
          place, admits: see `judge`.
          failed: why the message has failed, or ''.
        """
        newcomers = self._admitted() if admits else {}
        members = dict(sorted({**stay, **newcomers}.items()))
        lost = {p: x for p, x in self._members.items() if p not in stay}
        is_change = bool(lost or newcomers or failed)
        told = {
            "members": members,
            "lost": lost,
            "newcomers": newcomers,
            "failed": failed,
            "changes": self._changes + is_change,
            "place": dict(place),
            "stops": self._stops,
            "number": self._number,
        }
        for process, incarnation in newcomers.items():
            self._tell(told, "entry", process, incarnation)
        return told

    def _admitted(self) -> dict[int, int]:
        """The processes that want to come in and live."""
        found = {}
        for process, incarnation in self._told("join").items():
            # Otherwise it is lost, or was not seen yet.
            if self._live.get(process) == incarnation:
                self._delete("join", process)
                found[process] = incarnation
        return found

    def _enter(self, told: Mapping[str, Any]) -> Verdict:
        """This process after a verdict.

        Raises:
          LoopEnded: the others call this process lost.
        """
        self._members = _with_numbers(told["members"])
        if self._members.get(self._me) != self._incarnation:
            raise LoopEnded(
                "the others have gone on without this process, which was silent for too "
                "long: start it again"
            )
        self._number = told["number"] + 1
        self._changes = told["changes"]
        return Verdict(
            members=self._members,
            lost=_with_numbers(told["lost"]),
            newcomers=_with_numbers(told["newcomers"]),
            failed=told["failed"],
            changes=self._changes,
            place=told["place"],
            stops=told["stops"],
        )

    # The service

    def _key(self, *words: object) -> str:
        return "/".join(map(str, (self._name, *words)))

    def _tell(self, told: Any, *words: object) -> None:
        self._client.key_value_set(self._key(*words), json.dumps(told), True)

    def _delete(self, *words: object) -> None:
        self._client.key_value_delete(self._key(*words))

    def _read(self, *words: object) -> Any:
        """What was told, or None."""
        try:
            return json.loads(self._client.key_value_try_get(self._key(*words)))
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return None
            raise

    def _told(self, *words: object) -> dict[int, Any]:
        """What each process has told, by its number."""
        found = self._client.key_value_dir_get(self._key(*words))
        told = [(int(key.rpartition("/")[2]), json.loads(text)) for key, text in found]
        return dict(sorted(told))

    def _awaited(self, *words: object) -> Any:
        while True:
            try:
                text = self._client.blocking_key_value_get(self._key(*words), PATIENCE_MS)
                return json.loads(text)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise

    def _wait_until(self, is_over: Callable[[], Any]) -> None:
        while not is_over():
            time.sleep(LOOK_S)


def is_known(results: Tree) -> bool:
    """Whether arrays are there, or have failed."""
    return all(x.is_ready() for x in jax.tree.leaves(results))


def _with_numbers(members: Mapping[Any, int]) -> dict[int, int]:
    """Members out of JSON, whose keys are texts."""
    return {int(process): incarnation for process, incarnation in members.items()}


def check_may_lose(methods: Sequence[Exchange], grid: Grid) -> None:
    """Raises ValueError unless a loop with these methods can lose a process."""
    devices = grid.mesh.devices
    processes = processes_of(devices)
    if devices.size > len(processes):
        # XLA starts no program of several CPU devices of a process while an earlier one
        # waits, such as for a lost process.
        raise ValueError(
            "`min_workers` must be left out unless each process trains on one device, got "
            f"{devices.size} devices in {len(processes)} processes"
        )
    for process in processes:
        among(grid, set(processes) - {process} or {process})
    for pull in (pull for method in methods for pull in method.pulls):
        if pull.rule.rounds(2) != ():
            raise ValueError(
                "`min_workers` must be left out for a method whose graph has rounds: it "
                "depends on the number of workers"
            )
        if not pull.delay and _connects_processes(pull.rule.axes, grid):
            raise ValueError(
                "`min_workers` must be left out unless all messages between processes have "
                "a `delay` and so travel beside the steps"
            )


def _connects_processes(axes: Any, grid: Grid) -> bool:
    """Whether a group along some axes of workers has several processes."""
    mesh = grid.mesh
    own = Group(axes).axes
    along = [i for i, name in enumerate(mesh.axis_names) if name_of(name, grid) in own]
    numbers = np.vectorize(lambda device: device.process_index)(mesh.devices)
    first = numbers.min(axis=tuple(along), keepdims=True)
    return bool((numbers != first).any())
