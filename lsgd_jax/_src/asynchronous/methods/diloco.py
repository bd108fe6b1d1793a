"""Asynchronous DiLoCo: pseudo-gradients move an anchor as they arrive."""

import dataclasses
import operator
from typing import Any, Literal, get_args

from lsgd_jax._src.asynchronous.engine.contents import combined
from lsgd_jax._src.asynchronous.engine.worker import Worker
from lsgd_jax._src.asynchronous.methods.anchors import (
    AnchorWorker,
    FragmentState,
    delayed_nesterov,
    or_none,
)
from lsgd_jax._src.asynchronous.methods.driver import FreeRunning, InFlight
from lsgd_jax._src.checks import check_option, check_positive_int
from lsgd_jax._src.trees import Tree
from lsgd_jax._src.wire.wire import Wire, WireFormat


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
    t fetches anchor and momentum from the worker with turn t - 1, moves them, and keeps
    them for the worker with turn t + 1. If a worker fails, only its own last turn is lost,
    and the next worker builds on the turn before. With a `delay` a worker takes local steps
    during the exchange and keeps them: :math:`y \leftarrow y + (a - y')`, with y' its
    parameters when it sent g. A worker that is not finite contributes nothing and restarts
    from the anchor. If the anchor itself is not finite, training has diverged, and all
    workers that receive it report a loss that is not finite.

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


class DiLoCoWorker(AnchorWorker):
    """Asynchronous DiLoCo in one worker.

    Attributes:
      begun: own step after which the worker started from the anchor.
    """

    kept = ("turn", "outers", "begun")

    def __init__(self, method: DiLoCo, worker: Worker):
        workers = worker.transport.position.workers
        every = method.momentum_every
        if every is None:
            every = 1 if method.together else workers
        outer = delayed_nesterov(method.learning_rate, method.momentum, every)
        super().__init__(worker, outer, [None])
        self._method = method
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
        if self.in_flight or worker.count - self._sent < local_steps:
            return
        sent = worker.on_host()
        weight = 0.0
        if self.is_finite:
            taken = worker.count - self.begun
            weight = taken / method.local_steps if method.weights == "steps" else 1.0
        turns = self.turns()
        holder = max(turns, key=turns.__getitem__)
        gradient = combined(operator.sub, self.anchor, sent)
        turn = self._take_turn(gradient, weight, turns[holder], holder)
        self.in_flight[0] = InFlight(self.transport.start(turn), worker.count, sent=sent)
        self._sent = worker.count

    def landed(self, slot: int, request: InFlight, answer: Any) -> bool:
        """Continues from an anchor; reports its own staleness, that of the anchor."""
        worker = self.worker
        before = self.turn
        turn, outer = answer
        self.know(turn)
        self.take(0, outer)
        self.begun = request.since
        worker.report.staleness = turn - 1 - before
        if self.has_diverged:
            worker.is_finite = False
        elif worker.count == request.since or not self.is_finite:
            self.pull(self.anchor, 1.0, self.is_finite)
        else:
            self.shift(combined(operator.sub, self.anchor, request.sent))
        return False

    # A turn, while the worker takes local steps

    async def _take_turn(
        self, gradient: Tree, weight: float, known: int, holder: int
    ) -> tuple[int, FragmentState]:
        """Contributes a pseudo-gradient and returns (turn, outer state) of its turn.

        Args:
          gradient, weight: the pseudo-gradient and its w; 0 contributes nothing.
          known, holder: a turn that is over, and the worker that keeps its outer state.
        """
        transport = self.transport
        me = self.worker.index
        together = self._method.together
        everyone = list(range(transport.position.workers))
        holders = {known: holder}
        number = known
        while True:
            number += 1
            if together:
                brought = transport.mailbox.packed(gradient)
                transport.mailbox.post(("brought", number), brought)
            members = everyone if together else [me]
            came = await transport.round(("turn", number), weight, members)
            if me in came:
                break
            transport.mailbox.drop(("brought", number))
            holders[number] = min(came)
        first = min(came)
        if first != me:
            outer = await transport.ask(first, "fetch", ("anchor", number))
            self.keep(transport.mailbox.packed(outer), number)
        else:
            outer = await self._moved(number, gradient, came, holders)
            outer = self.give(0, outer, number)
        transport.mailbox.drop(("brought", number))
        return number, outer

    async def _moved(
        self, number: int, gradient: Tree, came: dict[int, float], holders: dict[int, int]
    ) -> FragmentState:
        """Returns the outer state after the pseudo-gradients of a turn."""
        outer = await self._latest(holders)
        me = self.worker.index
        requests = {
            i: self.transport.ask(i, "fetch", ("brought", number))
            for i, weight in came.items()
            if weight > 0 and i != me
        }
        arrived = {me: gradient} | {i: await or_none(r) for i, r in requests.items()}
        given = [i for i, g in arrived.items() if came[i] > 0 and g is not None]
        if not given:
            return outer
        weights = [came[i] for i in given]
        total = sum(weights) if self._method.together else 1.0

        def weighted(*g):
            return sum(w * x for w, x in zip(weights, g)) / total

        delta = combined(weighted, *(arrived[i] for i in given))
        return self.moved(outer, delta, number)

    async def _latest(self, holders: dict[int, int]) -> FragmentState:
        """The newest outer state whose holder answers, otherwise this worker's own."""
        for number, holder in sorted(holders.items(), reverse=True):
            if number > self.turn:
                outer = await self.fetch(holder, number)
                if outer is not None:
                    return outer
        return self.outers[0]

    def take_over(self, state: Any) -> None:
        """Continues from another worker's outer state."""
        super().take_over(state)
        self._sent = self.begun


DiLoCo.driver = DiLoCoWorker
