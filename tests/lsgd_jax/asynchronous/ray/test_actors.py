"""Requests that a worker's process serves, without Ray."""

import threading
import time
from types import SimpleNamespace

import numpy as np

from lsgd_jax._src.asynchronous.engine.contents import buffered, unbuffered
from lsgd_jax._src.asynchronous.ray.actors import BUSY, WAITING, WorkerActor


def test_requests_that_wait_leave_threads_for_those_that_need_not():
    method = SimpleNamespace(wire="float32")
    job = SimpleNamespace(
        name="run", nodes=1, locals=2, timeout=30.0, begun=time.time(), method=method
    )
    actor = WorkerActor(job, 0, is_restarted=False)
    ask = lambda key: unbuffered(actor.serve("fetch", buffered((key,))))
    waiting = [threading.Thread(target=ask, args=("sum",)) for _ in range(WAITING)]
    for thread in waiting:
        thread.start()
    while actor._waiting._value:
        time.sleep(0.01)
    actor.transport.mailbox.post("part", np.arange(3))
    assert ask("part").tolist() == [0, 1, 2] and ask("sum") == BUSY
    actor.transport.mailbox.post("sum", np.arange(2))
    for thread in waiting:
        thread.join()
    assert ask("sum").tolist() == [0, 1]
