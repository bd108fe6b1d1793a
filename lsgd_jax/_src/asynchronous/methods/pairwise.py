"""Asynchronous pairwise averaging (dpwa): a random peer is fetched during each step."""

import dataclasses
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lsgd_jax._src.asynchronous.engine.worker import Worker
from lsgd_jax._src.asynchronous.methods.driver import (
    Driver,
    FreeRunning,
    InFlight,
)
from lsgd_jax._src.checks import check_option
from lsgd_jax._src.methods.pairwise import Interpolation, part_taken
from lsgd_jax._src.trees import value_at
from lsgd_jax._src.wire.wire import Wire, WireFormat


@dataclasses.dataclass(frozen=True)
class Pairwise(FreeRunning):
    r"""Asynchronous pairwise averaging (dpwa).

    Before a step, with probability p, a worker asks a random peer j for its latest
    parameters and computes its step in the meantime. After the first step by whose end they
    have arrived,

    .. math:: y_i \leftarrow f y_j + (1 - f) y_i.

    The weight f follows from `interpolation` as in `lsgd_jax.pairwise`: 'constant', 'clock'
    or 'loss'. It compares this worker's current clock or loss with the peer's clock or loss
    at the time of the snapshot. With 'clock' the clocks are mixed with the same f.

    A peer that does not answer is asked less and less often, until it answers again. A
    snapshot that is not finite is ignored. A worker that is not finite takes the peer's
    parameters as they are.

    Args:
      interpolation: rule for the peer's weight f.
      value: the peer's weight with 'constant', f in [0, 1], or a schedule of the worker's
        own steps.
      divergence_threshold: loss below which less is taken from the peer with 'loss', θ ≥ 0.
      fetch_probability: probability p of asking a peer, in [0, 1], or a schedule.
      seed: seed of the random choices.
      window: number of losses in a worker's score.
      wire: the format in which parameters travel, or a `Wire`.

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
    wire: Wire | WireFormat = "float32"

    not_negative = ("divergence_threshold",)
    fractions = schedules = ("value", "fetch_probability")

    def __post_init__(self):
        super().__post_init__()
        check_option("interpolation", self.interpolation, get_args(Interpolation))


_weight = jax.jit(part_taken, static_argnums=(0, 4))


class PairwiseWorker(Driver):
    """Pairwise averaging in one worker."""

    kept = ("clock",)

    def __init__(self, method: Pairwise, worker: Worker):
        index = worker.index
        workers = worker.transport.position.workers
        others = [i for i in range(workers) if i != index]
        super().__init__(worker, others, seed=(method.seed, index))
        self._method = method
        self.clock = 0.0
        worker.measure = self._measure

    def _measure(self) -> float:
        """The clock, or the loss, which is nan before the first step."""
        measures = {"clock": self.clock, "loss": self.worker.loss, "constant": 0.0}
        return measures[self._method.interpolation]

    def stepped(self) -> None:
        """Counts the step."""
        self.clock += 1

    def ask(self) -> None:
        """Asks a random peer with probability p, if no request is in flight."""
        t = jnp.int32(self.worker.count + 1)
        probability = float(value_at(self._method.fetch_probability, t))
        if not self.in_flight and self.peers.random.random() < probability:
            peer = self.peers.choose()
            if peer is not None:
                self.ask_snapshot(peer)

    def landed(self, slot: int, request: InFlight, answer: Any) -> bool:
        """Mixes in a peer's snapshot."""
        if not np.isfinite(answer.measure):
            return False  # the peer's loss is not finite, or not known yet
        method = self._method
        is_finite = self.is_finite
        weight = _weight(
            method.interpolation,
            jnp.float32(self._measure()),
            jnp.float32(answer.measure),
            jnp.float32(value_at(method.value, jnp.int32(self.worker.count))),
            method.divergence_threshold,
        )
        f = float(weight) if is_finite else 1.0
        is_mixed = self.pull(answer.params, f, is_finite)
        if is_mixed and method.interpolation == "clock":
            self.clock += f * (answer.measure - self.clock)
        return is_mixed


Pairwise.driver = PairwiseWorker
