"""Decoupled DiLoCo: a quorum of workers moves one fragment after the other."""

import asyncio
import dataclasses
import functools
import math
import operator
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, get_args

import jax
import numpy as np
from jax import Array

from lsgd_jax._src.asynchronous.engine.contents import (
    Snapshot,
    combined,
    finite,
    on_host,
    unpack,
)
from lsgd_jax._src.asynchronous.engine.errors import StaleWorkerError
from lsgd_jax._src.asynchronous.engine.sharding import on_cpu
from lsgd_jax._src.asynchronous.engine.worker import Worker
from lsgd_jax._src.asynchronous.methods.anchors import (
    AnchorWorker,
    FragmentState,
    nesterov,
)
from lsgd_jax._src.asynchronous.methods.driver import FreeRunning, InFlight
from lsgd_jax._src.checks import (
    check_not_negative,
    check_option,
    check_positive_int,
)
from lsgd_jax._src.exchange import parts
from lsgd_jax._src.methods.merging import MERGES, Merge
from lsgd_jax._src.trees import Tree, floats
from lsgd_jax._src.wire.group import Group
from lsgd_jax._src.wire.wire import Wire, WireFormat


LAGS = 64  # answers that the grace is computed from
LEAST = 0.1  # steps that a turn stays open at least after its quorum
AHEAD = 4  # turns for which a worker keeps its answers


@dataclasses.dataclass(frozen=True)
class DecoupledDiLoCo(FreeRunning):
    r"""DiLoCo in fragments, whose turns close with a quorum, so that no worker ever waits.

    The parameters are cut into F fragments. Turn t = 1, 2, … moves the anchor
    :math:`\Theta_p` of fragment p = (t - 1) mod F with the answers of the workers
    :math:`i \in M_t`:

    .. math::
      w_i &= c_i^2 / s_i, \qquad \Delta_i = \Theta_p - y_{i,p} \\
      \Delta &= \text{merge}(\{ \Delta_i, w_i \}) \\
      m_p &\leftarrow \beta m_p + \Delta, \qquad
      \Theta_p \leftarrow \Theta_p - \eta \, (\Delta + \beta m_p) \\
      y_{i,p} &\leftarrow \gamma y_{i,p} + (1 - \gamma) \Theta_p

    with :math:`c_i` the tokens and :math:`s_i` the steps of worker i since it last received
    Θ_p, and γ the share of its own parameters that a worker keeps. The radial merge has,
    tensor by tensor, the mean norm and the mean direction of the Δ_i, see `anchored`.

    The first worker that has taken H / F steps since its last turn takes the next one. It
    asks all others for their newest fragment and waits for K answers, its own included.
    The turn then stays open for a grace of

    .. math:: \text{median}(l) + k \, \text{MAD}(l)

    seconds, where l are the lags of the last 64 answers that this worker got after a
    quorum, late ones included, and MAD is their median absolute deviation; a step as long
    as no lag is known. The grace is at least a tenth of a step, and it ends H / F steps
    after the turn began. Answers that come later are ignored.

    All workers fetch the moved fragment while they take further steps, and apply it at the
    end of the step in which it arrives. A slow worker answers with the steps that it has
    taken since, at least one. A worker that does not answer is left out for a while. If
    the worker that moves a fragment fails, its turn is lost and nothing else. A worker that
    is not finite contributes nothing and restarts from the anchors. If an anchor is not
    finite, training has diverged, and all workers that receive it report a loss that is not
    finite.

    Per turn each worker sends one fragment. The worker that takes the turn sends anchor and
    momentum of the fragment to all others, any of which may take the next one.

    Args:
      local_steps: H, the steps of the fastest worker between two turns of one fragment.
      learning_rate: η ≥ 0, of the outer steps.
      momentum: β in [0, 1].
      fragments: F, which divides H.
      quorum: K workers. Defaults to a majority, W // 2 + 1.
      deviations: k ≥ 0.
      merge: 'radial', or 'mean' for the weighted mean.
      averaged: a function from the path of a tensor to whether it takes the weighted mean
        although `merge` is 'radial'. The paper averages embeddings. Defaults to none.
      tokens: tokens of one step of each worker. Defaults to equal ones, so that w is
        proportional to the steps.
      mixing: γ in [0, 1].
      window: number of losses in a worker's score.
      wire: the format in which parameters travel, or a `Wire`.

    Raises:
      ValueError: counts below 1, fragments that do not divide the local steps, negative
        rates, deviations or tokens, fractions outside [0, 1], an unknown merge; when a run
        begins, more fragments than tensors or another number of tokens than workers.

    Reference: Decoupled DiLoCo, 2026, arXiv:2604.21428. Written from summaries of the
    paper. Its K was not seen, and its grace is another one: a share, which was not seen
    either, of the time in which workers overlap computation with communication.

    >>> import lsgd_jax as lj
    >>> lj.asynchronous.DecoupledDiLoCo(local_steps=32, fragments=4).momentum
    0.9
    """

    local_steps: int = 64
    learning_rate: float = 0.7
    momentum: float = 0.9
    fragments: int = 2
    quorum: int | None = None
    deviations: float = 3.0
    merge: Merge = "radial"
    averaged: Callable[[str], bool] | None = None
    tokens: Sequence[float] | None = None
    mixing: float = 0.0
    window: int = 10
    wire: Wire | WireFormat = "float32"

    positive = ("local_steps", "fragments", "window")
    not_negative = ("learning_rate", "deviations")
    fractions = ("momentum", "mixing")

    def __post_init__(self):
        super().__post_init__()
        if self.local_steps % self.fragments:
            raise ValueError(
                f"`local_steps` must be divisible by fragments={self.fragments}, got "
                f"local_steps={self.local_steps}"
            )
        if self.quorum is not None:
            check_positive_int("quorum", self.quorum)
        check_option("merge", self.merge, get_args(Merge))
        for tokens in self.tokens or ():
            check_not_negative("tokens", tokens)


class DecoupledDiLoCoWorker(AnchorWorker):
    """Decoupled DiLoCo in one worker.

    Attributes:
      received: for each fragment the own step after which the worker received it.
    """

    kept = ("turn", "outers", "received")

    def __init__(self, method: DecoupledDiLoCo, worker: Worker):
        index = worker.index
        workers = worker.transport.position.workers
        if method.tokens is not None and len(method.tokens) != workers:
            raise ValueError(
                f"`tokens` must be a number for each of {workers} workers, got "
                f"tokens={method.tokens}"
            )
        super().__init__(
            worker,
            nesterov(method.learning_rate, method.momentum),
            [parts.fragment(i, method.fragments) for i in range(method.fragments)],
            peers=[i for i in range(workers) if i != index],
        )
        self._method = method
        self._count = method.fragments
        self._period = method.local_steps // self._count  # steps between two turns
        self._tokens = 1.0 if method.tokens is None else method.tokens[index]
        self._quorum = method.quorum or workers // 2 + 1
        self.received = [0] * self._count
        self._sent = 0  # own step after which it last began or fetched a turn
        self._lags: deque[float] = deque(maxlen=LAGS)

    def _fragment(self, number: int) -> int:
        return (number - 1) % self._count

    # On every step

    async def land_arrived(self) -> None:
        """Applies the fragment that has arrived, as far as turns are known to be over."""
        await self.worker.hear()
        await super().land_arrived()

    async def done(self) -> None:
        """Restores the worker if it is not finite, offers answers, begins turns."""
        if not self.is_finite and not self.has_diverged:
            self.pull(self.anchor, 1.0, False)
            self.received = [self.worker.count] * self._count
        # Answers to the next turns, one per fragment.
        for number in range(self.turn + 1, self.turn + 1 + min(self._count, AHEAD)):
            key = ("fragment", number)
            if self._taken(number):
                self.transport.mailbox.post(key, self._offer(number))
            elif not self.is_finite:
                self.transport.mailbox.drop(key)
        due = range(0) if self.in_flight else self._due()
        if due:
            turns = self._turns({number: self._offer(number) for number in due})
            self.in_flight[0] = InFlight(self.transport.start(turns), self.worker.count)
            self._sent = self.worker.count

    def _taken(self, number: int) -> int:
        """Own steps since the worker received the fragment of a turn."""
        return self.worker.count - self.received[self._fragment(number)]

    def _due(self) -> range:
        """The turns that the worker has missed, otherwise the next one if it is due."""
        worker = self.worker
        next_one = self.turn + 1
        newest = max(self.turns().values())
        if newest > self.turn:
            return range(max(next_one, newest - self._count + 1), newest + 1)
        if worker.count - self._sent < self._period or self._taken(next_one) <= 0:
            return range(0)
        return range(next_one, next_one + 1)

    def _offer(self, number: int) -> Callable[[], Snapshot]:
        """Returns a function that makes this worker's answer to a turn."""
        worker = self.worker
        p = self._fragment(number)
        params = worker.params
        anchor = self.outers[p].anchor
        fragment = self.fragments[p]
        steps = self._taken(number)
        weight = learner_weight(self._tokens * steps, steps)

        def answer() -> Snapshot:
            mine = on_host(parts.select(fragment, floats(params)))
            delta = combined(operator.sub, anchor, mine)
            return Snapshot(self.transport.mailbox.packed(delta), weight)

        return answer

    def landed(self, slot: int, request: InFlight, answer: Any) -> bool:
        """Takes over the fragments of some turns, but for those that were lost."""
        worker = self.worker
        moved = worker.on_host()

        def mixed(a, y):
            return a + self._method.mixing * (y - a)

        for number, outer in answer.items():
            self.transport.mailbox.drop(("fragment", number))
            self.know(number)
            if outer is None:
                continue
            p = self._fragment(number)
            self.take(p, outer)
            self.received[p] = worker.count
            mine = parts.select(self.fragments[p], moved)
            mine = combined(mixed, outer.anchor, mine)
            moved = parts.put_back(self.fragments[p], mine, moved)
        if self.has_diverged:
            worker.is_finite = False
        elif self.is_finite:
            self.pull(moved, 1.0, True)
        return True

    # A turn, while the worker takes further steps

    async def _turns(
        self, offers: dict[int, Callable[[], Snapshot]]
    ) -> dict[int, FragmentState | None]:
        """Takes turns, or fetches their fragments from the workers that have taken them.

        Args:
          offers: for each turn a function that makes this worker's answer.

        Returns:
          For each turn the outer state after it, or None if their holder has failed.
        """
        outers = dict[int, FragmentState | None]()
        me = self.worker.index
        for number, offer in offers.items():
            taker = min(await self.transport.round(("turn", number), None, [me]))
            if taker != me:
                outers[number] = await self.fetch(taker, number)
                continue
            p = self._fragment(number)
            outer = self._moved(p, await self._answers(number, offer()))
            outers[number] = self.give(p, outer, number)
        return outers

    async def _answers(self, number: int, mine: Snapshot) -> dict[int, Snapshot]:
        """Returns the answers of a quorum, and those that arrive within the grace.

        Later ones only tell how late they are.
        """
        transport = self.transport
        status = self.worker.status
        begun = self.transport.now()
        given = {self.worker.index: unpack(mine)}
        met = math.inf

        async def bring(i: int) -> None:
            fetch = transport.ask(i, "fetch", ("fragment", number))
            try:
                answer = await self.peers.answer(i, fetch)
            except StaleWorkerError:
                return  # it has received this turn's fragment already
            if answer is None:
                return
            given[i] = answer
            lag = transport.now() - met
            if lag >= 0:
                self._lags.append(lag)

        self.peers.count_choice()
        here = range(transport.position.workers) if status is None else status.present
        asked = [i for i in here if i not in given and self.peers.is_tried(i)]
        pending = {transport.start(bring(i)) for i in asked}
        while pending and len(given) < self._quorum:
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        met = transport.now()
        if pending:
            await asyncio.wait(pending, timeout=self._grace(met - begun))
        return dict(given)

    def _grace(self, waited: float) -> float:
        """Seconds that a turn stays open after its quorum, which took `waited` seconds."""
        step = 1 / self.worker.report.speed
        deviations = self._method.deviations
        wanted = adaptive_deadline(self._lags, deviations) if self._lags else step
        return max(LEAST * step, min(wanted, self._period * step - waited))

    def _moved(self, p: int, answers: dict[int, Snapshot]) -> FragmentState:
        """Returns the outer state after the answers of a turn."""
        outer = self.outers[p]
        method = self._method

        given = {
            i: answer
            for i, answer in answers.items()
            if answer.measure > 0 and finite(answer.params)
        }
        if not given:
            return outer
        # One shape at any number of answers, so that the merge is compiled once.
        nothing = Snapshot(combined(np.zeros_like, outer.anchor), 0.0)
        rows = [given.get(i, nothing) for i in range(self.transport.position.workers)]
        deltas = combined(lambda *x: np.stack(x), *(row.params for row in rows))
        weights = np.array([row.measure for row in rows], np.float64)
        # Divided by the largest first, because the sum may overflow.
        weights /= weights.max()
        shares = (weights / weights.sum()).astype(np.float32)
        with on_cpu(self.worker.sharding):
            delta = merged(deltas, shares, method.merge, method.averaged)
        return self.moved(outer, delta)

    def take_over(self, state: Any) -> None:
        """Continues from another worker's turn and fragments."""
        super().take_over(state)
        self._sent = self.worker.count


DecoupledDiLoCo.driver = DecoupledDiLoCoWorker


def learner_weight(tokens: float, steps: int) -> float:
    """Returns w = tokens² / steps, or 0 without steps."""
    return tokens * tokens / steps if steps else 0.0


def adaptive_deadline(lags: Sequence[float], deviations: float) -> float:
    """Returns the median of some lags plus some median absolute deviations.

    >>> adaptive_deadline([1.0, 2.0, 3.0, 9.0], deviations=2.0)
    4.5
    """
    seconds = np.asarray(lags)
    median = np.median(seconds)
    return float(median + deviations * np.median(np.abs(seconds - median)))


@functools.partial(jax.jit, static_argnames=("merge", "averaged"))
def merged(
    deltas: Tree,
    weights: Array,
    merge: Merge,
    averaged: Callable[[str], bool] | None = None,
) -> Tree:
    """Returns the merge of some pseudo-gradients.

    Args:
      deltas: a tree of [W, ...].
      weights: float32 [W], of sum 1.
      merge, averaged: see `DecoupledDiLoCo`.
    """
    group = Group("local")

    def one(delta: Tree, weight: Array) -> Tree:

        def by(name):
            return MERGES[name](group, delta, weights[:, None], weight > 0)

        if averaged is None:
            return by(merge)
        leaves, treedef = jax.tree.flatten(by(merge))
        each = zip(parts.taken(averaged, delta), jax.tree.leaves(by("mean")), leaves)
        return treedef.unflatten(mean if is_mean else x for is_mean, mean, x in each)

    equal = jax.vmap(one, axis_name="local")(deltas, weights)
    return jax.tree.map(lambda x: x[0], equal)
