"""Where the processes meet while Orbax writes a checkpoint."""

import time
from collections import Counter
from typing import TYPE_CHECKING


if TYPE_CHECKING:
    from train.cluster.session import Session


class Barriers:
    """The barriers of Orbax, for all runs of a process, since their names come again.

    A process that cannot write its part (its disk is full, say) goes on to the last
    barriers of the checkpoint at once. With Orbax's own barriers the others would wait for
    it at the earlier ones for 20 minutes; here the checkpoint fails for them, too.
    """

    AT = "barrier"  # the folder in which each process notes where it is
    LAST = "set_value"  # in the names of the last barriers

    def __init__(self, session: "Session"):
        self._session = session
        # How often this process has been at each barrier.
        self._visits: Counter[str] = Counter()

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Returns when all processes are there.

        Raises:
          RuntimeError: one has failed or is lost, or does not come within timeout_ms.
        """
        session = self._session
        place = f"{session.group}/{key}"  # before a loss others may have been further
        self._visits[place] += 1
        here = f"{place}/{self._visits[place]}"
        session.write(here, "")
        session.write(self.AT, here)
        deadline = time.monotonic() + timeout_ms / 1000
        while time.monotonic() < deadline:
            # In this order: who has gone on from here has seen all members here.
            has_any_failed = self._has_any_gone_on()
            if session.read(here).keys() >= set(session.members):
                return
            session.check_no_member_is_lost()
            if has_any_failed and self.LAST not in key:
                raise RuntimeError("another process could not write its part")
            time.sleep(0.02)
        raise RuntimeError(f"not all processes were at {key} within {timeout_ms / 1000} s")

    def _has_any_gone_on(self) -> bool:
        """Whether one is at a last barrier at which this process has not been yet."""
        for here in self._session.read(self.AT).values():
            place, _, visit = here.rpartition("/")
            if self.LAST in place and int(visit) > self._visits[place]:
                return True
        return False
