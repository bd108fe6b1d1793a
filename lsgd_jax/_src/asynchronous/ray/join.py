"""Joins a running program to others on Ray."""

import asyncio
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import ray
from ray.exceptions import RayError

from lsgd_jax._src.asynchronous.engine.contents import Buffered, buffered, unbuffered
from lsgd_jax._src.asynchronous.engine.mailbox import Mailbox
from lsgd_jax._src.asynchronous.engine.transport import GridPosition
from lsgd_jax._src.asynchronous.methods.peer import Joinable, Peer
from lsgd_jax._src.asynchronous.ray.actors import RayTransport, worker_name
from lsgd_jax._src.asynchronous.ray.cluster import ClusterOptions, beside, cluster
from lsgd_jax._src.checks import check_positive_int
from lsgd_jax._src.trees import Tree


NAMESPACE = "lsgd"


def join(
    method: Joinable,
    name: str,
    rank: int,
    num_workers: int,
    *,
    address: str | None = "auto",
    timeout: float = 10.0,
) -> Peer:
    """Joins this program to others that average their parameters in pairs, on Ray.

    Every program calls it under the same name with a rank of its own. Programs may join and
    leave at any time. A process beside this one, which ends with it, serves the parameters.
    If Ray is not initialized in this program, `join` does so, and leaving shuts it down.

    Args:
      method: `Pairwise` or `ADPSGD`. Others need a coordinator: see `ray_engine.run`.
      name: of the run, the same in all programs.
      rank: of this program, in 0..W-1; it may join again after it has left or crashed.
      num_workers: W, the largest number of programs.
      address: of the cluster, such as "10.0.0.1:6379"; "auto" for the one on this machine;
        None starts one that ends with this program. Not used if Ray is initialized.
      timeout: seconds that a request waits for a peer, and `join` for a crashed
        predecessor's name.

    Returns:
      A `Peer` with `send` and `receive`, to be used as a context manager.

    Raises:
      ValueError: another method, a rank outside 0..W-1, a name and rank in use.
      RuntimeError: no cluster answers.

    For example::

      with join(Pairwise(), name="run", rank=0, num_workers=2) as peer:
          for batch in batches:
              params, loss = step(params, batch)
              peer.send(params, loss)
              params = peer.receive()
    """
    if not isinstance(method, Joinable):
        raise ValueError(f"`method` must be a `Pairwise` or an `ADPSGD`, got {method=}")
    check_positive_int("num_workers", num_workers)
    if rank not in range(num_workers):
        raise ValueError(f"`rank` must be in 0..{num_workers - 1}, got {rank=}")
    position = GridPosition(rank, 1, num_workers)
    with ExitStack() as stack:
        stack.enter_context(cluster(ClusterOptions(address=address, timeout=timeout), 1))
        actor = _started(name, rank, method, timeout)
        stack.callback(ray.kill, actor)
        mailbox = ServedMailbox(method, rank, actor, timeout)
        transport = JoinedTransport(
            actor,
            run=name,
            position=position,
            timeout=timeout,
            mailbox=mailbox,
            begun=time.time(),
            namespace=NAMESPACE,
        )
        # All went well: the exit stack ends with the peer and not here.
        return Peer(method, transport, stack.pop_all().close)


def _started(name: str, rank: int, method: Joinable, timeout: float) -> Any:
    """Starts the actor of a rank, once its name is free."""
    actor = beside(
        MailboxActor,
        name=worker_name(name, rank),
        namespace=NAMESPACE,
        max_restarts=-1,
    )
    # Ray frees the name of a crashed program once it notices, which takes a while.
    until = time.monotonic() + timeout
    while True:
        try:
            return actor.remote(method.wire, rank)
        except ValueError as error:
            if time.monotonic() > until:
                raise ValueError(
                    f"another program has joined {name!r} under this rank, got {rank=}"
                ) from error
            time.sleep(0.1)


class MailboxActor:
    """The mailbox of a program, in a process that serves it."""

    def __init__(self, wire: Any, rank: int):
        self._mailbox = Mailbox(wire, rank)

    def show(self, params: Buffered, measure: float) -> None:
        self._mailbox.show(lambda: unbuffered(params), measure)

    def moved(self) -> Buffered:
        return buffered(self._mailbox.moved())

    def serve(self, call: str, arguments: Buffered) -> Buffered:
        return buffered(getattr(self._mailbox, call)(*unbuffered(arguments)))


class ServedMailbox(Mailbox):
    """The program's end of its mailbox, which an actor serves."""

    def __init__(self, method: Joinable, rank: int, actor: Any, timeout: float):
        super().__init__(method.wire, rank)
        self._actor = actor
        self._timeout = timeout
        self._latest: Any = None

    def show(
        self, params: Callable[[], Tree], measure: float = 0.0, reference: Tree = None
    ) -> None:
        """Publishes the worker in the actor, one state at a time."""
        if self._latest is not None:
            ray.wait([self._latest], timeout=self._timeout)
        self._latest = self._actor.show.remote(buffered(params()), measure)


class JoinedTransport(RayTransport):
    """A program's transport: peers find its mailbox in an actor.

    Args:
      actor: the actor.
      **others: as for `RayTransport`.
    """

    def __init__(self, actor: Any, **others: Any):
        super().__init__(**others)
        self._mailbox_actor = actor
        self._coming: asyncio.Task | None = None

    async def moved(self) -> Tree:
        """Asks the actor, see `Mailbox.moved`.

        None if it has crashed: Ray starts it again, without any moves. An answer that is
        late is returned by a later call, because the actor has forgotten the moves in it.
        """
        coming = self._coming or self.start(self._asked())
        done, _ = await asyncio.wait([coming], timeout=self.timeout)
        if not done:
            self._coming = coming
            return None
        self._coming = None
        return coming.result()

    async def _asked(self) -> Tree:
        try:
            moved = self._mailbox_actor.moved.remote()
            return unbuffered(await asyncio.wrap_future(moved.future()))
        except RayError:
            return None
