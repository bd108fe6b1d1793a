"""Asynchronous DiLoCo: pseudo-gradients move an anchor as they come."""

import dataclasses
import itertools
from typing import Any, Literal, NamedTuple, get_args

import jax.numpy as jnp
import numpy as np

from lsgd_jax._src.asynchronous.collective import fetched
from lsgd_jax._src.asynchronous.errors import Behind, Unreachable
from lsgd_jax._src.asynchronous.free_running import FreeRunning
from lsgd_jax._src.asynchronous.mixing import delayed_nesterov
from lsgd_jax._src.asynchronous.ports import Pending
from lsgd_jax._src.asynchronous.worker import Worker
from lsgd_jax._src.checks import (
    check_fraction,
    check_not_negative,
    check_option,
    check_positive_int,
)


Weights = Literal["steps", "equal"]


@dataclasses.dataclass(frozen=True)
class DiLoCo:
    r"""DiLoCo with workers that bring their pseudo-gradients when they have them.

    A worker starts from the anchor a, takes :math:`H_i = H v_i / \max_j v_j` local steps,
    v its measured speed, brings :math:`g = w_i (a_i - y_i)`, with a_i the anchor it started
    from, and goes on from the anchor as it is then. The t-th that comes moves the anchor by
    delayed Nesterov: by plain SGD, and every N-th time the momentum, too, which is renewed
    with the mean of the last N:

    .. math::
      m &\leftarrow \beta m + \tfrac1N \sum_{s > t - N} g_s
        && \text{if } t \bmod N = 0 \\
      a &\leftarrow a - \eta \, (g_t / N + \beta m \, [t \bmod N = 0]).

    N = 1 is Nesterov's outer SGD. With `together` the pseudo-gradients come in rounds: one
    closes when all workers that are there have come, or when one has waited for the grace
    time, goes on with who is there, and g is their mean, weighted with w.

    The coordinator gives out the turns t, and no worker serves the anchor: who has turn t
    asks who had turn t - 1 for anchor and momentum, moves them, and keeps them for who has
    turn t + 1. So they pass from worker to worker, once a turn, all that was lost with a
    worker is its own last turn, and who is asked after it builds on the turn before. With a
    `delay` the worker takes local steps meanwhile and keeps them:
    :math:`y \leftarrow y + (a - y')`, y' what it was when it brought g. Who is not finite
    brings nothing and takes the anchor whole.

    Anchors are stale here by about W turns, so that the stable momentum is smaller than in
    lock step, and smaller the shorter H is: docs/asynchronous.md has a table.

    Args:
      local_steps: H, those of the fastest worker.
      learning_rate: η ≥ 0, of the outer steps.
      momentum: β in [0, 1]; the paper's 0.9 diverges where H is short.
      momentum_every: N; None: W, or 1 if they come together.
      together: whether they come in rounds.
      weights: w is 'steps', the worker's steps / H, so that every sample counts as much
        as another, or 'equal', 1.
      delay: how many steps a worker takes at most before it waits for the anchor.
      window: losses in a worker's score, as others are told it.

    Raises:
      ValueError: steps, N or a window below 1, a negative rate or delay, a momentum outside
        [0, 1], unknown weights.

    Reference: Liu, Chhaparia, Douillard, Kale, Rusu, Shen, Szlam, Ranzato, Asynchronous
    Local-SGD Training for Language Modeling, 2024, arXiv:2401.09135.

    >>> import lsgd_jax as lj
    >>> lj.asynchronous.DiLoCo(local_steps=32, momentum_every=1).learning_rate
    0.7
    """

    local_steps: int = 64
    learning_rate: float = 0.7
    momentum: float = 0.5
    momentum_every: int | None = None
    together: bool = False
    weights: Weights = "steps"
    delay: int = 0
    window: int = 10

    period = None

    def __post_init__(self):
        check_positive_int("local_steps", self.local_steps)
        check_not_negative("learning_rate", self.learning_rate)
        check_fraction("momentum", self.momentum)
        if self.momentum_every is not None:
            check_positive_int("momentum_every", self.momentum_every)
        check_option("weights", self.weights, get_args(Weights))
        check_not_negative("delay", self.delay)
        check_positive_int("window", self.window)

    def bind(self, worker: Worker, steps: int) -> "Bringing":
        """The method in one worker."""
        del steps
        return Bringing(self, worker)


class Turn(NamedTuple):
    """The anchor after a turn.

    Attributes:
      number: which; 0: as all start.
      outer: anchor, momentum and what came since that was renewed, one after the other.
    """

    number: int
    outer: np.ndarray


class Coming(NamedTuple):
    """A turn that is in flight.

    Attributes:
      since: the worker's own step after which it brought its pseudo-gradient.
      sent: its parameters then.
      turn: the call.
    """

    since: int
    sent: np.ndarray
    turn: Pending


class Bringing(FreeRunning):
    """Asynchronous DiLoCo in one worker."""

    def __init__(self, method: DiLoCo, worker: Worker):
        super().__init__(worker)
        workers = worker.ports.place.workers
        self._method = method
        self._every = method.momentum_every or (1 if method.together else workers)
        start = worker.vector()
        rest = np.zeros([start.size if self._every == 1 else 2 * start.size], np.float32)
        self._turn = Turn(0, np.concatenate([start, rest]))
        # What rounding took away from the anchors that this worker gave to others: it adds
        # it to the next one, so that none of what was brought is lost.
        self._error: Any = np.float32(0)
        self._begun = 0  # the own step after which it started from the anchor
        self._brought = 0  # the own step after which it has last brought something
        self._coming: Coming | None = None
        self._posted: list[int] = []

    @property
    def _anchor(self) -> np.ndarray:
        return self._turn.outer[: self.worker.flat.size]

    async def after_step(self) -> None:
        """Lands what has arrived, brings what is due."""
        count = self.worker.count
        if self._coming is None and count - self._brought >= self._local_steps:
            self._bring()
        if (coming := self._coming) is not None:
            if coming.turn.done or count - coming.since >= self._method.delay:
                await self._land(coming)
        self.worker.publish()

    @property
    def _local_steps(self) -> int:
        """H_i, by the speeds that are known."""
        mine, standing = self.worker.report.speed, self.worker.standing
        known = [standing.reports[i].speed for i in standing.present] if standing else []
        fastest = max([mine, *known])
        part = mine / fastest if fastest else 1.0
        return max(1, round(self._method.local_steps * part))

    def _bring(self) -> None:
        worker, method = self.worker, self._method
        sent, weight = worker.vector(), 0.0
        if self.fit:
            taken = worker.count - self._begun
            weight = taken / method.local_steps if method.weights == "steps" else 1.0
        standing = worker.standing
        turns = {worker.index: self._turn.number}
        if standing is not None:
            turns |= {i: standing.reports[i].rounds for i in standing.present}
        turns[worker.index] = self._turn.number
        holder = max(turns, key=turns.__getitem__)
        going = self._take_turn(self._anchor - sent, weight, turns[holder], holder)
        self._coming = Coming(worker.count, sent, worker.ports.start(going))
        self._brought = worker.count

    async def _land(self, coming: Coming) -> None:
        worker, before = self.worker, self._turn.number
        self._coming = None
        try:
            turn = await worker.wait(coming.turn)
        except Unreachable:
            return  # its steps since the old anchor stay, and are brought the next time
        self._turn, self._begun = turn, coming.since
        if worker.count == coming.since or not self.fit:
            self.pull(self._anchor, 1.0, self.fit)
        else:
            self.shift(self._anchor - coming.sent)
        worker.report.rounds = turn.number
        worker.report.staleness = turn.number - 1 - before

    # A turn, while the worker goes on

    async def _take_turn(
        self, gradient: np.ndarray, weight: float, known: int, holder: int
    ) -> Turn:
        """Brings a pseudo-gradient: the anchor after the turn in which it has come.

        Args:
          gradient, weight: the pseudo-gradient and its w; 0: it brings none.
          known, holder: a turn that was over, and who has the anchor after it.
        """
        ports, me = self.worker.ports, self.worker.index
        everyone = list(range(ports.place.workers))
        holders = {known: holder}
        for number in itertools.count(known + 1):
            if self._method.together:
                ports.post(("brought", number), gradient)
            members = everyone if self._method.together else [me]
            came = await ports.round(("turn", number), weight, members)
            if me in came:
                break
            ports.mailbox.drop(("brought", number))
            holders[number] = min(came)
        if (first := min(came)) != me:
            outer = await fetched(ports.fetch(first, ("anchor", number)))
        else:
            outer = await self._moved(number, gradient, came, holders)
            if ports.mailbox.wire.is_narrow:
                exact = outer + self._error
                outer = ports.mailbox.rounded(exact)
                self._error = exact - outer
        ports.mailbox.drop(("brought", number))
        ports.post(("anchor", number), outer)
        self._posted.append(number)
        if len(self._posted) > 2:  # of use only to whoever had no answer from the last one
            ports.mailbox.drop(("anchor", self._posted.pop(0)))
        return Turn(number, outer)

    async def _moved(
        self,
        number: int,
        gradient: np.ndarray,
        came: dict[int, float],
        holders: dict[int, int],
    ) -> np.ndarray:
        """The anchor, moved by what has come to a turn."""
        ports, me = self.worker.ports, self.worker.index
        outer = await self._latest(holders)
        asked = {
            i: ports.fetch(i, ("brought", number))
            for i, weight in came.items()
            if weight > 0 and i != me
        }
        brought = [(came[me], gradient)] if came[me] > 0 else []
        for i, pending in asked.items():
            try:
                brought.append((came[i], await fetched(pending)))
            except (Unreachable, Behind):
                continue  # lost, or it has given up waiting
        if not brought:
            return outer
        total = sum(weight * vector for weight, vector in brought)
        if self._method.together:
            total = total / sum(weight for weight, _ in brought)
        return self._step(outer, np.asarray(total, np.float32), number)

    async def _latest(self, holders: dict[int, int]) -> np.ndarray:
        """The anchor after the last turn whose holder answers, at worst this worker's."""
        for number, holder in sorted(holders.items(), reverse=True):
            if number <= self._turn.number:
                break
            try:
                return await fetched(self.worker.ports.fetch(holder, ("anchor", number)))
            except (Unreachable, Behind):
                continue
        return self._turn.outer

    def _step(self, outer: np.ndarray, gradient: np.ndarray, number: int) -> np.ndarray:
        size, method = gradient.size, self._method
        anchor, m, gathered = outer[:size], outer[size : 2 * size], outer[2 * size :]
        moved = delayed_nesterov(
            (anchor, m, gathered if gathered.size else np.zeros_like(m)),
            gradient,
            np.int32(number),
            np.float32(method.learning_rate),
            np.float32(method.momentum),
            every=self._every,
        )
        return np.asarray(jnp.concatenate(moved))[: outer.size]

    # What passes to a worker that starts again

    def state(self) -> Any:
        """The anchor, its momentum, and which turn they are of."""
        number, outer = self._turn
        return {"turn": number, "outer": outer, "begun": self._begun}

    def take_over(self, state: Any) -> None:
        """Goes on from another worker's."""
        self._turn = Turn(int(state["turn"]), np.asarray(state["outer"]))
        self.worker.report.rounds = self._turn.number
        self._begun = self._brought = int(state["begun"])
        self._coming, self._error = None, np.float32(0)
