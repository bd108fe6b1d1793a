"""Asynchronous local SGD with parameter servers in the published world of HALoS.

    python benchmarks/halos.py

simulates two methods of HALoS (arXiv:2506.04531) on the links and at the speeds of its
released simulator: asynchronous local SGD with one server, and servers in each region that
exchange with a global one. A worker's round is H local steps, fewer if it is slower, then
its parameters travel to its server and the server's parameters travel back. Losses are not
simulated. It prints the seconds in which all workers take 1,600 steps together, beside
those by the formulas of the released simulator, in which messages do not share links.
"""

import dataclasses
import math
from collections.abc import Mapping

from usage import head, parser, row

import lsgd_jax as lj
from train.planning.engine import LEAVES, SIZE, TRAINING, LockStepWorker


WORLD = lj.asynchronous.WORLDS["halos"]
WORKERS = WORLD.nodes * WORLD.locals
UPDATES = 32  # of a region's server, until it exchanges with the global one
SECONDS, ENDLESS = 1000.0, 10**6  # simulated, and more steps than they have room for


def local_steps(worker: int, most: int) -> int:
    """Returns H of a worker, in proportion to its speed, as in the released simulator."""
    return math.ceil(most / WORLD.speeds.slow[worker])


@dataclasses.dataclass(frozen=True)
class Servers:
    """Asynchronous local SGD with one server, or with one in each region.

    Args:
      local_steps: H of the fastest worker.
      regional: whether each region has a server, which is with its first worker.
      updates: of each regional server since the global one has answered.
    """

    local_steps: int
    regional: bool
    updates: dict[int, int] = dataclasses.field(default_factory=dict)

    period = None
    window = 1
    wire = "float32"

    def bind(self, worker: lj.asynchronous.Worker, steps: int) -> "ServersWorker":
        """Returns the method in one worker."""
        return ServersWorker(self, worker, steps)


class ServersWorker(LockStepWorker):
    """A worker that only exchanges. The global server is with worker 0."""

    def __init__(self, method: Servers, worker: lj.asynchronous.Worker, steps: int):
        super().__init__((), worker, steps)
        place = worker.transport.position
        self._method = method
        self._server = method.regional * (place.index - place.index % place.locals)

    async def after_step(self) -> None:
        """Exchanges with the server at the end of a round."""
        method = self._method
        worker = self._worker
        server = self._server
        if worker.count % local_steps(worker.index, method.local_steps):
            return
        await worker.wait(worker.transport.ask(server, "exchange", worker.params))
        method.updates[server] = method.updates.get(server, 0) + 1
        if method.regional and method.updates[server] == UPDATES:
            worker.transport.start(self._between_servers())

    async def _between_servers(self) -> None:
        """Exchanges with the global server, for the regional one and over its links."""
        transport = self._worker.transport
        await transport.ask(0, "exchange", self._worker.params)
        self._method.updates[self._server] = 0


def simulated(method: lj.asynchronous.Method, seconds: float = SECONDS) -> float:
    """Returns the steps per second of all workers together."""
    taken: list[int] = []
    lj.asynchronous.simulator.run(
        TRAINING,
        method,
        WORLD.nodes,
        WORLD.locals,
        ENDLESS,
        WORLD.network.scaled(LEAVES * SIZE / WORLD.parameters),
        WORLD.speeds,
        timeout=math.inf,
        observe=lambda worker: taken.append(worker.index),
        until=seconds,
    )
    return len(taken) / seconds


def released(method: Servers) -> float:
    """Returns the same by the formulas of the released simulator.

    There a round takes the local steps and a message in each direction, whatever else is on
    the links (`run_local_steps` of its src/halos/simulation/common.py).
    """
    rate = 0.0
    for worker in range(WORKERS):
        region = worker // WORLD.locals
        steps = local_steps(worker, method.local_steps)
        server = region if method.regional else 0
        message = 4 * WORLD.parameters / WORLD.network.between[server][region]
        computing = steps * WORLD.speeds.step * WORLD.speeds.slow[worker]
        rate += steps / (computing + 2 * message)
    return rate


METHODS: Mapping[str, Servers] = {
    "asynchronous local SGD with a server, H = 32": Servers(32, regional=False),
    "HALoS, H = 8": Servers(8, regional=True),
}


def main() -> None:
    parser(__doc__).parse_args()
    head("method", "ours", "theirs", "ours / theirs")
    for name, method in METHODS.items():
        ours = 1600 / simulated(method)
        theirs = 1600 / released(method)
        row(name, f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.2f}")


if __name__ == "__main__":
    main()
