"""A worker inside a running program: two calls around any loop."""

import asyncio
import math
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from lsgd_jax._src.asynchronous.engine.transport import Transport
from lsgd_jax._src.asynchronous.engine.worker import Training, Worker
from lsgd_jax._src.asynchronous.methods.adpsgd import ADPSGD
from lsgd_jax._src.asynchronous.methods.pairwise import Pairwise
from lsgd_jax._src.trees import Tree, all_finite


Joinable = Pairwise | ADPSGD  # methods that need no coordinator


class Peer:
    r"""A worker of `Pairwise` or `ADPSGD` inside a running program; made by `join`.

    After each step the program gives its parameters y to `send`. Then `receive` returns
    them mixed. With `Pairwise` this is

    .. math:: f y_j + (1 - f) y

    with y_j the parameters that a random peer j had sent when it was asked, and f the
    weight of `Pairwise`; f = 1 if y or the loss is not finite. With `ADPSGD` y moves half
    the way to an odd rank that an even one has asked, or as even ranks have moved it.

    A peer is asked in `receive`, and its answer travels while the program computes its next
    step. `receive` waits for no peer: without an answer it returns y.

    A peer that has left or crashed is asked less and less often, until it is back.

    As a context manager it leaves at the end.
    """

    def __init__(self, method: Joinable, transport: Transport, on_leave: Callable[[], Any]):
        self._method = method
        self._transport = transport
        self._on_leave = on_leave
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
        worker = self._worker
        worker.params = params
        worker.loss = float(loss)
        worker.count += 1
        worker.is_finite = math.isfinite(worker.loss) and bool(all_finite(params))
        worker.method.stepped()
        worker.publish()

    def receive(self) -> Tree:
        """Returns the parameters sent last, mixed with a peer's if some have arrived.

        Raises:
          RuntimeError: nothing was sent yet, or the worker has left.
          ValueError: the peer's parameters have another size.
        """
        self._check_is_there()
        if self._worker is None:
            raise RuntimeError("`send` must be called before `receive`")
        self._run(self._worker.method.receive())
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
