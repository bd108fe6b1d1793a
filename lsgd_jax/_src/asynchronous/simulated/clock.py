"""An asyncio event loop of virtual time, whose clock jumps instead of waiting."""

import asyncio
import concurrent.futures
import math
import selectors
import time
from collections.abc import Coroutine
from typing import Any


RESOLUTION = time.get_clock_info("monotonic").resolution  # seconds


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Runs all ready callbacks; its time then jumps to the next timer.

    The order in which coroutines and timers are started decides everything, so that two
    runs of one program are the same.

    >>> import asyncio
    >>> with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
    ...     runner.run(asyncio.sleep(3600))
    ...     runner.get_loop().time()
    3600.0
    """

    def __init__(self):
        self.now = 0.0
        super().__init__(_Clock(self))

    def time(self) -> float:
        return self.now


class _Clock(selectors.SelectSelector):
    """A selector that advances the clock instead of waiting."""

    def __init__(self, loop: VirtualTimeLoop):
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list:
        if timeout is None:
            raise RuntimeError("all workers wait for each other, and no timer is set")
        # No task is ready before this time, so nothing is missed by going there at once.
        now = self._loop.now + max(timeout, 0.0)
        # asyncio runs the timers that are due before `now + RESOLUTION`. After 2^24 s this
        # sum is rounded to `now`, so that none would ever be due.
        if now + RESOLUTION == now:
            now = math.nextafter(now, math.inf)
        self._loop.now = now
        return []


def run_virtual(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine in virtual time, also inside a running loop, as in a notebook."""

    def run() -> Any:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            return runner.run(coroutine)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return run()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()
