"""Pairwise averaging without waiting (dpwa): a random peer is fetched meanwhile."""

import dataclasses
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lsgd_jax._src.asynchronous.errors import Unreachable
from lsgd_jax._src.asynchronous.free_running import FreeRunning
from lsgd_jax._src.asynchronous.peers import Peers
from lsgd_jax._src.asynchronous.ports import Pending
from lsgd_jax._src.asynchronous.worker import Worker
from lsgd_jax._src.checks import (
    check_fraction,
    check_not_negative,
    check_option,
    check_positive_int,
)
from lsgd_jax._src.methods.pairwise import Interpolation, part_taken
from lsgd_jax._src.trees import value_at


@dataclasses.dataclass(frozen=True)
class Pairwise:
    r"""Pairwise averaging (dpwa) at each worker's own pace.

    Before a step, with probability p, a worker asks a random peer j for its latest
    parameters and takes its step meanwhile. After the first step at whose end they have
    arrived,

    .. math:: y_i \leftarrow f y_j + (1 - f) y_i,

    with f by `interpolation` as in `lsgd_jax.pairwise`: 'constant', 'clock' or 'loss', from
    this worker's clock or loss as it is then and the peer's as it was with the snapshot.
    With 'clock' the clocks are mixed with the same f. A peer that does not answer is asked
    less and less often, until it answers again. If what arrives is not finite a worker
    keeps its own; if its own is not, it takes the peer's whole.

    Args:
      interpolation: how the weight f of the peer is found.
      value: the peer's weight with 'constant', f in [0, 1], or a schedule of the worker's
        own steps.
      divergence_threshold: loss below which less is taken from the peer with 'loss', θ ≥ 0.
      fetch_probability: probability p of asking a peer, in [0, 1], or a schedule.
      seed: of the choices.
      window: losses in a worker's score, as others are told it.

    Raises:
      ValueError: an unknown interpolation, a fraction outside [0, 1], a negative threshold,
        a window below 1.

    Reference: the dpwa library (pair-wise averaging), after Jin, Yuan, Iandola, Keutzer,
    How to Scale Distributed Deep Learning?, 2016, arXiv:1611.04581.

    >>> import lsgd_jax as lj
    >>> lj.asynchronous.Pairwise("loss", divergence_threshold=0.1).fetch_probability
    1.0
    """

    interpolation: Interpolation = "constant"
    value: optax.ScalarOrSchedule = 0.5
    divergence_threshold: float = 0.0
    fetch_probability: optax.ScalarOrSchedule = 1.0
    seed: int = 0
    window: int = 10

    period = None

    def __post_init__(self):
        check_option("interpolation", self.interpolation, get_args(Interpolation))
        for name in ("value", "fetch_probability"):
            if not callable(given := getattr(self, name)):
                check_fraction(name, given)
        check_not_negative("divergence_threshold", self.divergence_threshold)
        check_positive_int("window", self.window)

    def bind(self, worker: Worker, steps: int) -> "Mixing":
        """The method in one worker."""
        del steps
        return Mixing(self, worker)


class Coming(NamedTuple):
    """A peer's snapshot that is in flight.

    Attributes:
      peer: whose.
      since: the worker's own step at which it was asked for.
      lost: what rounding took of this worker then.
      snapshot: the call.
    """

    peer: int
    since: int
    lost: Any
    snapshot: Pending


_weight = jax.jit(part_taken, static_argnums=(0, 4))


class Mixing(FreeRunning):
    """Pairwise averaging in one worker."""

    def __init__(self, method: Pairwise, worker: Worker):
        super().__init__(worker)
        place = worker.ports.place
        others = [i for i in range(place.workers) if i != place.index]
        self._method, self._peers = method, Peers(others, (method.seed, place.index))
        self._clock = 0.0
        self._coming: Coming | None = None
        worker.measure = self._measure

    async def before_step(self) -> bool:
        """Whether there is another step to take; asks a peer."""
        if not await super().before_step():
            return False
        worker = self.worker
        probability = value_at(self._method.fetch_probability, jnp.int32(worker.count + 1))
        if self._coming is None and self._peers.draw(float(probability)):
            if (peer := self._peers.choose()) is not None:
                snapshot = worker.ports.latest(peer)
                self._coming = Coming(peer, worker.count, self.lost(), snapshot)
        return True

    async def after_step(self) -> None:
        """Mixes in what has arrived."""
        self._clock += 1
        if self._coming is not None and self._coming.snapshot.done:
            coming, self._coming = self._coming, None
            await self._land(coming)
        self._show()

    def _show(self) -> None:
        self.worker.measure = self._measure
        self.worker.publish()

    @property
    def _measure(self) -> float:
        """The clock, or the loss; nan before the first one."""
        measures = {"clock": self._clock, "loss": self.worker.loss, "constant": 0.0}
        return measures[self._method.interpolation]

    async def _land(self, coming: Coming) -> None:
        try:
            snapshot = await coming.snapshot
        except Unreachable:
            self._peers.failed(coming.peer)
            return
        self._peers.answered(coming.peer)
        method, mine, fit = self._method, self._measure, self.fit
        if not np.isfinite(snapshot.measure):
            return  # its loss is not finite, or it has none yet
        weight = _weight(
            method.interpolation,
            jnp.float32(mine),
            jnp.float32(snapshot.measure),
            jnp.float32(value_at(method.value, jnp.int32(self.worker.count))),
            method.divergence_threshold,
        )
        f = float(weight) if fit else 1.0
        if self.pull(snapshot.vector + coming.lost, f, fit):
            if method.interpolation == "clock":
                self._clock += f * (snapshot.measure - self._clock)
            self.mixed(coming.since)

    def state(self) -> Any:
        """What passes to a worker that starts again."""
        return {"clock": self._clock}

    def take_over(self, state: Any) -> None:
        """Goes on from another worker's."""
        self._clock, self._coming = float(state["clock"]), None
        self.worker.measure = self._measure
