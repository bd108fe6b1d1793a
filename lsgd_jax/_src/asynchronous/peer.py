"""A worker inside a running program: two calls around any loop."""

import asyncio
import math
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from lsgd_jax._src.asynchronous.pairwise import Pairwise
from lsgd_jax._src.asynchronous.transport import Transport
from lsgd_jax._src.asynchronous.worker import Training, Worker
from lsgd_jax._src.trees import Tree, all_finite


class Peer:
    r"""A worker of pairwise averaging inside a running program; made by `join`.

    After each step the program gives its parameters y to `send`. Then `receive` returns

    .. math:: f y_j + (1 - f) y

    with y_j the parameters that a random peer j had sent when it was asked, and f the
    weight of `Pairwise`. A peer is asked in `receive`, and its answer travels while the
    program computes its next step. `receive` never waits: without an answer it returns y.
    If y or the loss is not finite, f = 1.

    A peer that has left or crashed is asked less and less often, until it is back.

    As a context manager it leaves at the end.
    """

    def __init__(self, method: Pairwise, transport: Transport, on_leave: Callable[[], Any]):
        self._method, self._transport, self._on_leave = method, transport, on_leave
        self._worker: Worker | None = None
        self._has_left = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def send(self, params: Tree, loss: Any) -> None:
        """Publishes this worker's parameters after a step; peers may take them from now on.

        Args:
          params: a tree of arrays, the same structure and shapes in every process.
          loss: float scalar, of the step.

        Raises:
          RuntimeError: the worker has left.
        """
        self._check_is_there()
        if self._worker is None:
            nothing: Any = None  # the program itself takes the steps
            training = Training(lambda rank: (params, None, None), nothing)
            self._worker = Worker(training, self._method, self._transport, steps=0)
        worker, pairwise = self._worker, self._pairwise
        worker.params, worker.loss, worker.count = params, float(loss), worker.count + 1
        worker.is_finite = math.isfinite(worker.loss) and bool(all_finite(params))
        pairwise.clock += 1
        pairwise.publish()

    def receive(self) -> Tree:
        """Returns the parameters sent last, mixed with a peer's if some have arrived.

        Raises:
          RuntimeError: nothing was sent yet, or the worker has left.
          ValueError: the peer's parameters have another size.
        """
        self._check_is_there()
        if self._worker is None:
            raise RuntimeError("`send` must be called before `receive`")
        self._run(self._exchange())
        return self._worker.params

    def leave(self) -> None:
        """Leaves: peers get no answer any more. A second call does nothing."""
        if self._has_left:
            return
        self._has_left = True
        try:
            self._on_leave()
        finally:
            self._run(_cancel_others())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.leave()

    @property
    def _pairwise(self) -> Any:
        """The method in this worker, a `PairwiseWorker`."""
        return None if self._worker is None else self._worker.method

    async def _exchange(self) -> None:
        """Mixes in what has arrived, and asks for more."""
        await self._pairwise.land_arrived()
        self._pairwise.ask()

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Runs a coroutine on the loop of the requests, and waits for it."""
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def _check_is_there(self) -> None:
        if self._has_left:
            raise RuntimeError("this worker has left; `join` again")


async def _cancel_others() -> None:
    """Cancels all tasks of this loop but this one."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
