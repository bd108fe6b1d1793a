"""Asynchronous DiLoCo: pseudo-gradients move an anchor as they arrive."""

import asyncio
import dataclasses
import operator
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from lsgd_jax._src.asynchronous.engine.contents import combined, finite, unpack
from lsgd_jax._src.asynchronous.engine.errors import UnreachableError
from lsgd_jax._src.asynchronous.engine.worker import Worker
from lsgd_jax._src.asynchronous.methods.anchors import TurnWorker, or_none
from lsgd_jax._src.asynchronous.methods.driver import FreeRunning, InFlight
from lsgd_jax._src.asynchronous.methods.pieces import (
    NONE,
    DelayedNesterov,
    Piece,
    Pieces,
    PieceState,
    Renewals,
)
from lsgd_jax._src.checks import check_option, check_positive_int
from lsgd_jax._src.wire.wire import Wire, WireFormat


BEHIND = 3  # turns that a worker keeps for others; the older serve if a holder fails
MESSAGES = 16  # for each piece, at most

Weights = Literal["steps", "equal"]


@dataclasses.dataclass(frozen=True)
class DiLoCo(FreeRunning):
    r"""DiLoCo whose workers send their pseudo-gradients without waiting for each other.

    Worker i starts from the anchor a and takes :math:`H_i = H v_i / \max_j v_j` local
    steps, with v its measured speed. It then sends the pseudo-gradient
    :math:`g = w_i (a_i - y_i)`, where a_i is the anchor it started from, and continues from
    the current anchor. The t-th pseudo-gradient moves the anchor by delayed Nesterov: plain
    SGD on every turn, and the momentum on every N-th turn, after it has been renewed with
    the mean of the last N pseudo-gradients:

    .. math::
      m &\leftarrow \beta m + \tfrac1N \sum_{s > t - N} g_s
        && \text{if } t \bmod N = 0 \\
      a &\leftarrow a - \eta \, (g_t / N + \beta m \, [t \bmod N = 0]).

    N = 1 is outer SGD with Nesterov momentum. With `together`, pseudo-gradients are
    combined in rounds: g is the mean over the round's workers, weighted with w. A round
    closes once all live workers have arrived, or once one of them has waited for the
    timeout.

    The coordinator numbers the turns t. There is no parameter server: the worker with turn
    t fetches the sum of the pseudo-gradients since the last renewal of the momentum from
    the worker with turn t - 1, adds its own, and keeps it for the worker with turn t + 1.
    With the last sum before a renewal, which it needs once, each worker renews anchor and
    momentum by itself. Sums travel in pieces, so that a worker passes the first ones on
    while others arrive. Equal workers with N ≥ W, or `together`, send about as many bytes
    as in lock step, :math:`2 (W - 1) / W` times the parameters in H steps. With a smaller N
    workers miss several renewals between two turns, and send up to 2.5 times the
    parameters.

    If a worker fails, only its own last turn is lost, or those pieces of it that were not
    fetched before, and the next worker builds on the turn before. With a `delay` a worker
    takes local steps during the exchange and keeps them:
    :math:`y \leftarrow y + (a - y')`, with y' its parameters when it sent g. A worker that
    is not finite contributes nothing and restarts from the anchor. If the anchor itself is
    not finite, training has diverged, and all workers that receive it report a loss that is
    not finite.

    Anchors are stale by about W turns, so that the stable momentum is smaller than in lock
    step, and smaller the shorter H is: docs/methods/averaging.md has a table.

    Args:
      local_steps: H, the local steps of the fastest worker.
      learning_rate: η ≥ 0, of the outer steps.
      momentum: β in [0, 1]; the paper's 0.9 diverges where H is short.
      momentum_every: N turns. Defaults to W, or to 1 with `together`.
      together: whether pseudo-gradients are combined in rounds.
      weights: 'steps' sets w to the worker's steps / H, so that all samples count equally;
        'equal' sets w to 1.
      delay: local steps that a worker takes at most before it waits for the anchor.
      window: number of losses in a worker's score.
      wire: the format in which parameters travel, or a `Wire`.

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
    wire: Wire | WireFormat = "float32"

    positive = ("local_steps", "window")
    not_negative = ("learning_rate", "delay")
    fractions = ("momentum",)

    def __post_init__(self):
        super().__post_init__()
        if self.momentum_every is not None:
            check_positive_int("momentum_every", self.momentum_every)
        check_option("weights", self.weights, get_args(Weights))


class PieceMessage(NamedTuple):
    """A piece after a turn, as it travels.

    Attributes:
      renewals: see `PieceState`; its sender has the base after the last one, and the sums
        before the last two.
      total: s, encoded; None if the turn has renewed the momentum.
    """

    renewals: Renewals
    total: Any


class Encoded(NamedTuple):
    """A sum as it travels, which may so be passed on without another rounding."""

    total: Any


@dataclasses.dataclass
class Turn:
    """A turn that a worker takes.

    Attributes:
      number: t.
      came: {worker: weight} of the workers whose pseudo-gradients are combined.
      holders: {earlier turn: worker that has taken it}, as far as the worker needs them.
      failed: the workers that did not answer, which are not asked again.
    """

    number: int
    came: dict[int, float]
    holders: dict[int, int]
    failed: set[int] = dataclasses.field(default_factory=set)

    def mover(self, c: int) -> int:
        """Returns the worker that moves a piece. Workers that come together share them."""
        return list(self.came)[c % len(self.came)]


class DiLoCoWorker(TurnWorker):
    """Asynchronous DiLoCo in one worker.

    A worker leaves three things about a piece for others: ("piece", t), its `PieceMessage`
    after turn t; and of a turn t that has renewed the momentum ("total", t), the sum before
    that, and ("base", t), b and m after it.

    Attributes:
      outers: the `PieceState` of each piece.
      begun: own step after which the worker started from the anchor.
      anchor: the anchor that it started from, a tree.
    """

    kept = ("turn", "outers", "begun")

    def __init__(self, method: DiLoCo, worker: Worker):
        super().__init__(worker)
        every = method.momentum_every
        if every is None:
            every = 1 if method.together else worker.transport.position.workers
        self._method = method
        self._outer = DelayedNesterov(method.learning_rate, method.momentum, every)
        self.anchor = combined(lambda x: x, worker.on_host())
        self._pieces = Pieces(self.anchor)
        self.outers = list(map(self._outer.init, self._pieces.of(self.anchor)))
        # Quantization errors of the sums that this worker gave to others. They are added to
        # the next ones, so that no pseudo-gradient is lost.
        self._errors: list[Any] = [None] * len(self.outers)
        self._posted = [set[int]() for _ in self.outers]  # turns, by piece
        self._totals: dict[tuple[int, int], Encoded] = {}  # those posted, by turn and piece
        self._early: asyncio.Task[None] | None = None
        self.transport.mailbox.keep(MESSAGES * len(self.outers))
        self.begun = 0
        self.patience = method.delay
        self._sent = 0  # own step after which it last sent a pseudo-gradient

    def stepped(self) -> None:
        """Sends the pseudo-gradient that is due."""
        worker = self.worker
        method = self._method
        status = self.worker.status
        # H_i, from the speeds known so far.
        speeds = [worker.report.speed]
        if status is not None:
            speeds += [status.reports[i].speed for i in status.present]
        fastest = max(speeds)
        share = worker.report.speed / fastest if fastest else 1.0
        local_steps = max(1, round(method.local_steps * share))
        if self.in_flight:
            return
        if worker.count - self._sent < local_steps:
            self._fetch_early()
            return
        self._stop_early()
        sent = worker.on_host()
        weight = 0.0
        if self.is_finite:
            taken = worker.count - self.begun
            weight = taken / method.local_steps if method.weights == "steps" else 1.0
        turns = self.turns()
        holder = max(turns, key=turns.__getitem__)
        gradient = self._pieces.of(combined(operator.sub, self.anchor, sent))
        turn = self._take_turn(gradient, weight, turns[holder], holder)
        self.in_flight[0] = InFlight(self.transport.start(turn), worker.count, sent=sent)
        self._sent = worker.count

    def landed(self, slot: int, request: InFlight, answer: Any) -> bool:
        """Continues from an anchor; reports its own staleness, that of the anchor."""
        worker = self.worker
        before = self.turn
        turn, self.outers = answer
        self.know(turn)
        self._take_anchor()
        self.begun = request.since
        worker.report.staleness = turn - 1 - before
        if self.has_diverged:
            worker.is_finite = False
        elif worker.count == request.since or not self.is_finite:
            self.pull(self.anchor, 1.0, self.is_finite)
        else:
            self.shift(combined(operator.sub, self.anchor, request.sent))
        return False

    def _take_anchor(self) -> None:
        """Computes the anchor from the outer states."""
        self.anchor = self._pieces.joined(list(map(self._outer.anchor, self.outers)))
        self.has_diverged |= not finite((self.anchor, self.outers))

    # A turn, while the worker takes local steps

    async def _take_turn(
        self, gradient: list[Piece], weight: float, known: int, holder: int
    ) -> tuple[int, list[PieceState]]:
        """Contributes a pseudo-gradient and returns (turn, outer states) of its turn.

        Args:
          gradient, weight: the pseudo-gradient and its w; 0 contributes nothing.
          known, holder: a turn that is over, and the worker that keeps its outer state.

        Raises:
          UnreachableError: a worker that has moved a piece in this turn does not answer.
        """
        transport = self.transport
        me = self.worker.index
        together = self._method.together
        everyone = list(range(transport.position.workers))
        brought = list(map(transport.mailbox.packed, gradient)) if together else []
        holders = {known: holder}
        number = known
        while True:
            number += 1
            for c, message in enumerate(brought):
                transport.mailbox.post(("brought", number, c), message)
            members = everyone if together else [me]
            came = await transport.round(("turn", number), weight, members)
            if me in came:
                break
            self._drop_brought(number)
            holders[number] = min(came)
        turn = Turn(number, came, holders)
        if together:
            moves = (self._after(turn, c, piece) for c, piece in enumerate(gradient))
            outers = await asyncio.gather(*moves)
        else:
            # One behind the other, so that the next worker begins with the first one.
            outers = [await self._after(turn, c, piece) for c, piece in enumerate(gradient)]
        self._drop_brought(number)
        arrived = [outer for outer in outers if outer is not None]
        if len(arrived) < len(outers):
            raise UnreachableError(f"worker {me} did not get all pieces of turn {number}")
        return number, arrived

    async def _after(self, turn: Turn, c: int, gradient: Piece) -> PieceState | None:
        """Returns a piece after a turn, and leaves it for others.

        Returns None if another worker moves it and does not answer.
        """
        number = turn.number
        mover = turn.mover(c)
        if mover != self.worker.index:
            return await self._fetched(turn, c, number, mover)
        outer = await self._latest(turn, c)
        delta = await self._delta(turn, c, gradient)
        if delta is not None:
            outer = self._outer.added(outer, delta)
        mailbox = self.transport.mailbox
        message, total, self._errors[c] = mailbox.encoded(outer.total, self._errors[c])
        outer = outer._replace(total=total)
        if delta is not None and number % self._outer.every == 0:
            self._post_total(c, number, Encoded(message))
            outer = self._outer.renewed(outer, number)
            message = None
        self._post(c, number, outer, message)
        return outer

    async def _delta(self, turn: Turn, c: int, gradient: Piece) -> Piece | None:
        """Returns what a turn adds to the sum of a piece; None if no worker gives any."""
        me = self.worker.index
        came = turn.came
        requests = {
            i: self.transport.ask(i, "fetch", ("brought", turn.number, c))
            for i, weight in came.items()
            if weight > 0 and i != me
        }
        arrived = {me: gradient} | {i: await or_none(r) for i, r in requests.items()}
        given = [i for i in came if came[i] > 0 and arrived.get(i) is not None]
        if not given:
            return None
        weights = [came[i] for i in given]
        total = sum(weights) if self._method.together else 1.0

        def weighted(*g):
            return sum(w * x for w, x in zip(weights, g)) / total

        return combined(weighted, *(arrived[i] for i in given))

    async def _latest(self, turn: Turn, c: int) -> PieceState:
        """The newest state of a piece whose holder answers, otherwise this worker's own."""
        for number, holder in sorted(turn.holders.items(), reverse=True):
            if number > self.turn:
                outer = await self._fetched(turn, c, number, holder)
                if outer is not None:
                    return outer
        return self.outers[c]

    async def _fetched(
        self, turn: Turn, c: int, number: int, holder: int
    ) -> PieceState | None:
        """Returns a piece as it was after some turn; None if its holder has failed.

        The worker renews base and momentum by itself, with the sums that it has missed. If
        it has missed more than others keep, it fetches both.
        """
        message = await self._asked(turn, holder, ("piece", number, c))
        if message is None:
            return None
        outer = await self._renewed(turn, c, message.renewals, holder)
        newest = message.renewals[-1]
        if outer.renewals[-1] != newest:
            found = await self._asked(turn, holder, ("base", newest[0], c))
            if found is None:
                return None
            base, momentum = found
            outer = PieceState((NONE, NONE, newest), base, momentum, outer.total)
        if message.total is None:
            outer = outer._replace(total=combined(np.zeros_like, outer.total))
        else:
            outer = outer._replace(total=unpack(message.total))
        if number == turn.number:
            self._post(c, number, outer, message.total)
        return outer

    async def _renewed(
        self, turn: Turn, c: int, renewals: Renewals, holder: int
    ) -> PieceState:
        """Returns the worker's own state of a piece after the renewals that it has missed.

        It stays behind if it has missed too many, or if its sums are others.
        """
        outer = self.outers[c]
        if outer.renewals[-1] not in renewals:
            return outer
        for renewal in renewals:
            if renewal <= outer.renewals[-1]:
                continue
            number, _ = renewal
            encoded = self._totals.get((number, c))
            if encoded is None:
                encoded = await self._asked(turn, holder, ("total", number, c))
            if encoded is None:
                break
            outer = outer._replace(total=unpack(encoded.total))
            outer = self._outer.renewed(outer, number)
            if outer.renewals[-1] != renewal:
                break
            self._post_total(c, number, encoded)
        return outer

    async def _asked(self, turn: Turn, holder: int, key: tuple[str, int, int]) -> Any:
        """Returns what a worker has posted under a key; None if it has failed."""
        if holder in turn.failed:
            return None
        answer = await or_none(self.transport.ask(holder, "fetch", key))
        if answer is None:
            turn.failed.add(holder)
        return answer

    # The last sums before a renewal, ahead of the next turn

    def _fetch_early(self) -> None:
        """Begins to fetch the sums before the next renewal, if that is known to be over.

        They come from the worker before this one, which may be fetching them itself: so
        each passes them on to the next, and the links of all carry them once.
        """
        every = self._outer.every
        if self._early is not None or every < self.transport.position.workers:
            return
        turns = self.turns()
        renewal = max(turns.values()) // every * every
        before = renewal - every
        lacks = any(outer.renewals[-1][0] == before for outer in self.outers)
        others = [i for i in turns if i != self.worker.index]
        if renewal <= self.turn or not lacks or not others:
            return
        source = max(others, key=lambda i: (i < self.worker.index, i))
        self._early = self.transport.start(self._fetch_totals(renewal, source))

    async def _fetch_totals(self, renewal: int, source: int) -> None:
        for c in range(len(self.outers)):
            if (renewal, c) not in self._totals:
                fetch = self.transport.ask(source, "fetch", ("total", renewal, c))
                encoded = await or_none(fetch)
                if encoded is None:
                    return  # the turn fetches them from its holder
                self._post_total(c, renewal, encoded)

    def _stop_early(self) -> None:
        if self._early is not None:
            self._early.cancel()
            self._early = None

    # What others fetch

    def _post(self, c: int, number: int, outer: PieceState, message: Any) -> None:
        """Leaves a piece after a turn for others, and forgets what is old."""
        mailbox = self.transport.mailbox
        _, (last, _), (newest, _) = outer.renewals
        mailbox.post(("base", newest, c), (outer.base, outer.momentum))
        mailbox.post(("piece", number, c), PieceMessage(outer.renewals, message))
        posted = self._posted[c]
        posted |= {number, newest}
        for old in posted.difference([last, newest], sorted(posted)[-BEHIND:]):
            for kind in ("piece", "total", "base"):
                mailbox.drop((kind, old, c))
            self._totals.pop((old, c), None)
            posted.discard(old)

    def _post_total(self, c: int, renewal: int, encoded: Encoded) -> None:
        """Leaves the last sum of a piece before a renewal for others."""
        self._totals[renewal, c] = encoded
        self._posted[c].add(renewal)
        self.transport.mailbox.post(("total", renewal, c), encoded)

    def _drop_brought(self, number: int) -> None:
        for c in range(len(self.outers)):
            self.transport.mailbox.drop(("brought", number, c))

    def take_over(self, state: Any) -> None:
        """Continues from another worker's outer state."""
        super().take_over(state)
        self._stop_early()
        self._sent = self.begun
        self._errors = [None] * len(self._errors)
        self._totals.clear()
        self.has_diverged = False
        self._take_anchor()
        for c, outer in enumerate(self.outers):
            newest = outer.renewals[-1]
            # The sums before the renewals are with others.
            self.outers[c] = outer._replace(renewals=(NONE, NONE, newest))
            message = None if newest[0] == self.turn else outer.total
            self._post(c, self.turn, self.outers[c], message)


DiLoCo.driver = DiLoCoWorker
