"""When a pull acts: the only place that knows its steps.

With t = 1, 2, … the step, s the step after which its period τ began, d the delay, and o_i
the offset of fragment i:

    agree   t - s ≡ o_i - d (mod τ)   about the parameters after step t
    send    the step after it with a delay, otherwise the same step
    land    t - s ≡ o_i (mod τ)

Steps may be ints, on the host, or arrays of a program.
"""

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from lsgd_jax._src.checks import check_count, check_period, check_positive_int
from lsgd_jax._src.exchange.branch import any_of


@dataclasses.dataclass(frozen=True)
class Periods:
    r"""A period that changes at steps known before the run; takes the place of an int.

    Exchange k ends a round of :math:`\tau_k` steps. A change takes effect when the round is
    over in which it falls.

    Args:
      pieces: the periods, each by the number of steps after which it begins, from 0 on.

    Raises:
      ValueError: no period from the first step on, a period below 1.

    >>> import lsgd_jax as lj
    >>> post_local = lj.Periods({0: 1, 3: 4})
    >>> tx = lj.local_sgd(post_local)
    >>> [t for t in range(1, 13) if tx.is_due(t)]
    [1, 2, 3, 7, 11]
    """

    pieces: tuple[tuple[int, int], ...]

    def __init__(self, pieces: Mapping[int, int]):
        given = sorted(dict(pieces).items())
        if not given or given[0][0] != 0:
            raise ValueError(f"`pieces` must have a period from 0 on, got pieces={pieces}")
        for _, every in given:
            check_positive_int("every", every)
        object.__setattr__(self, "pieces", _in_whole_rounds(given))

    @classmethod
    def quadratic(
        cls,
        learning_rate: optax.ScalarOrSchedule,
        steps: int,
        alpha: float,
        smallest: int = 4,
    ) -> "Periods":
        r"""The quadratic synchronization rule: periods that grow as the rate falls.

        .. math::
          H = \max(H_{\min}, \lfloor (\alpha / \eta)^2 \rfloor)

        with η the learning rate at the first step of the round. Rounds that begin before
        the rate is at its largest, in a warm-up, take H_min. The last round ends with the
        run.

        Args:
          learning_rate: η, a schedule of the count of steps, from 0 on, or a number.
          steps: the number of steps of the run.
          alpha: α; the published values let H reach 10 to 100 late in the run.
          smallest: H_min.

        Raises:
          ValueError: steps or a smallest period below 1, an α that is not positive.

        Reference: Gu et al., ICLR 2024, section 3.

        >>> import lsgd_jax as lj
        >>> rate = lambda t: 0.1 * (1 - t / 24)
        >>> lj.Periods.quadratic(rate, steps=24, alpha=0.15, smallest=2).pieces
        ((0, 2), (4, 3), (7, 4), (11, 7), (18, 6))
        """
        check_positive_int("steps", steps)
        check_positive_int("smallest", smallest)
        if not 0 < alpha < float("inf"):
            raise ValueError(f"`alpha` must be positive and finite, got {alpha=}")
        rates = _at_all_steps(learning_rate, steps)
        peak = int(np.argmax(rates))
        pieces: dict[int, int] = {}
        begin = 0
        while begin < steps:
            every = smallest
            if begin >= peak:
                every = max(smallest, _square_of(alpha, rates[begin]))
            every = min(every, steps - begin)
            pieces[begin] = every
            begin += every
        return cls(pieces)

    @functools.cached_property
    def starts(self) -> tuple[int, ...]:
        """The steps after which the pieces begin."""
        return tuple(start for start, _ in self.pieces)

    @functools.cached_property
    def lengths(self) -> tuple[int, ...]:
        """The period of each piece."""
        return tuple(every for _, every in self.pieces)

    @functools.cached_property
    def exchanges(self) -> tuple[int, ...]:
        """The number of exchanges before each piece."""
        spans = zip(self.pieces, self.starts[1:])
        rounds = [(end - start) // every for (start, every), end in spans]
        return tuple(itertools.accumulate(rounds, initial=0))

    def piece_of(self, t: Any) -> Any:
        """The index of the piece that step t = 1, 2, … is in."""
        if isinstance(t, int):
            return max(0, bisect.bisect_left(self.starts, t) - 1)
        later: Any = jnp.asarray(self.starts[1:], jnp.int32)
        return jnp.sum(t > later, dtype=jnp.int32)

    def __str__(self) -> str:
        """Such as '4, 1000: 8': a period of 4, after 1000 steps of 8."""
        (_, first), *more = self.pieces
        return ", ".join([str(first), *(f"{start}: {every}" for start, every in more)])


def _in_whole_rounds(given: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The pieces, each from the end of the round in which it was to begin."""
    pieces = [given[0]]
    for at, every in given[1:]:
        start, before = pieces[-1]
        rounds = -(-(at - start) // before)
        if rounds <= 0:
            # The round before it has not begun.
            pieces[-1] = start, every
        elif every != before:
            pieces.append((start + rounds * before, every))
    return tuple(pieces)


def _at_all_steps(learning_rate: optax.ScalarOrSchedule, steps: int) -> np.ndarray:
    """The rate at each step."""
    if not callable(learning_rate):
        return np.full(steps, learning_rate, float)
    return np.asarray(jax.vmap(learning_rate)(jnp.arange(steps)), float)


def _square_of(alpha: float, rate: float) -> int:
    """⌊(α / η)²⌋, or more steps than a run has if η is 0."""
    most = np.iinfo(np.int32).max
    if alpha >= rate * most**0.5:
        return most
    # A rate of 0.1 in float32 is a little larger, and 0.2 / 0.1 must not be 1.99….
    return int((alpha / rate) ** 2 * (1 + 1e-6))


Period = int | Periods


def check_every(name: str, every: Any) -> None:
    """Raises ValueError unless it is a positive int or `Periods`."""
    if not isinstance(every, Periods):
        check_positive_int(name, every)


def constant(name: str, every: Period, reason: str) -> int:
    """Returns the period, for what takes no `Periods`.

    Raises:
      ValueError: it changes, or it is no positive int.
    """
    if isinstance(every, Periods):
        raise ValueError(f"`{name}` must be a positive int, got {name}={every!s}: {reason}")
    check_positive_int(name, every)
    return every


def check_schedule(
    every: Any, offset: Any, delay: Any, after: Any, adds: bool = False
) -> None:
    """Raises ValueError unless these are the period and the steps of a pull.

    adds: whether it is late='add', for which the delay is at least 1 and may be the period.
    """
    check_every("every", every)
    check_count("after", after)
    shortest = min(every.lengths) if isinstance(every, Periods) else every
    for each in offset if isinstance(offset, tuple) else (offset,):
        check_period("offset", each, shortest)
    check_period("delay", delay, shortest + (adds and isinstance(every, int)))
    if adds and not delay:
        raise ValueError("`late` must be 'replace' without a delay, got late='add'")
    if offset and isinstance(every, Periods):
        raise ValueError(
            "`offset` must be 0 where the period changes, so that a change begins a "
            f"period, got offset={offset} and every={every}"
        )


def taking_turns(
    every: Period, offset: int | tuple[int, ...], count: int
) -> tuple[int, ...]:
    """The offsets of `count` fragments: i of F at (i + 1) τ / F after the given one."""
    if isinstance(offset, tuple):
        return offset
    if isinstance(every, Periods) or count == 1:
        return (offset,)
    turn = every // count
    return tuple((offset + i * turn) % every for i in range(1, count + 1))


class Acts(NamedTuple):
    """Whether a pull sends, lands and records at a step: bools, or arrays of bool.

    `round` is that of its graph, or None if the exchange is to find it.
    """

    sends: Any
    lands: Any
    records: Any
    round: Any = None

    @property
    def arrives(self) -> Any:
        """Whether the pull does anything after the worker's own step."""
        return any_of(self.lands, self.records)


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The steps at which a pull, or its fragments, agree, send and land.

    Attributes:
      every: the period τ, or `Periods`.
      offsets: o_i for each fragment, in [0, τ).
      delay: d in [0, τ].
      after: the number of steps before the first period begins.
    """

    every: Period
    offsets: tuple[int, ...] = (0,)
    delay: int = 0
    after: int = 0

    # At a step

    def at(self, t: Any) -> Acts:
        """What the pull does at step t."""
        lands = self.lands(t)
        if not self.delay:
            return Acts(lands, lands, False)
        return Acts(self.sends(t), lands, self.agrees(t))

    def agrees(self, t: Any) -> Any:
        """Whether the group agrees about the parameters after step t."""
        return self._is_at(t, self._agrees_at)

    def sends(self, t: Any) -> Any:
        """Whether a message leaves at step t."""
        if not self.delay:
            return self.lands(t)
        # At the first step there is nothing to send.
        return self._is_at(t, self._sends_at) & (t > self.after + 1)

    def lands(self, t: Any) -> Any:
        """Whether a target lands at step t."""
        return self._is_at(t, self._lands_at)

    def number(self, t: Any) -> Any:
        """The number of the exchange whose agreement is about step t, 1, 2, …."""
        every, since = self.period_at(t)
        in_its_piece = -(-_counted_from(t, since) // every)
        if not isinstance(self.every, Periods):
            return in_its_piece
        piece = self.every.piece_of(_counted_from(t, self.after))
        return in_its_piece + _element(self.every.exchanges, piece)

    def end_of(self, number: Any) -> Any:
        """The last step of the period of an exchange: the inverse of `number`."""
        if not isinstance(self.every, Periods):
            return self.after + self.every * number
        before = jnp.asarray(self.every.exchanges)
        piece = jnp.sum(number > before) - 1
        begin = self.after + _element(self.every.starts, piece)
        return begin + _element(self.every.lengths, piece) * (number - before[piece])

    def period_at(self, t: Any) -> tuple[Any, Any]:
        """The period at step t, and the step after which it began."""
        if not isinstance(self.every, Periods):
            return self.every, self.after
        piece = self.every.piece_of(_counted_from(t, self.after))
        every = _element(self.every.lengths, piece)
        return every, _element(self.every.starts, piece) + self.after

    # The fragments

    def fragment_landing(self, t: Any) -> Any:
        """The index of the fragment that lands at step t."""
        return self._index(t, self._lands_at)

    def fragment_agreeing(self, t: Any) -> Any:
        """The index of the fragment that agrees about step t."""
        return self._index(t, self._agrees_at)

    def fragment_sending(self, t: Any) -> Any:
        """The index of the fragment whose message leaves at step t."""
        return self._index(t, self._sends_at)

    # All steps

    @property
    def changes(self) -> tuple[int, ...]:
        """The steps after which a period begins, but for the very first one."""
        starts = self.every.starts if isinstance(self.every, Periods) else (0,)
        return tuple(start + self.after for start in starts if start + self.after)

    @property
    def intervals(self) -> tuple[int, ...]:
        """All periods, and the steps after which they begin, but for the very first one."""
        periods = self.every.lengths if isinstance(self.every, Periods) else (self.every,)
        return (*periods, *self.changes)

    def steps_between(self, first: int, last: int) -> Iterator[int]:
        """The steps first..last on which it may act, within one piece; not in order."""
        every, since = self.period_at(first)
        for at_of in (self._lands_at, self._sends_at, self._agrees_at):
            for at in at_of(every):
                yield from range(first + (at + since - first) % every, last + 1, every)

    def first_landing(self) -> int:
        """The first step at which a target lands that the group has agreed on."""
        every, _ = self.period_at(self.after + 1)
        first = min(at or every for at in self._agrees_at(every))
        return self.after + first + self.delay

    def messages(self, count: int) -> list[tuple[int, int, int]]:
        """The steps of the first `count` messages, of a pull without fragments.

        Returns:
          Runs (period, first step, number of messages), each with one period.
        """
        runs = []
        begins = [self.after, *(t for t in self.changes if t > self.after)]
        for begin, end in zip(begins, [*begins[1:], None]):
            every, _ = self.period_at(begin + 1)
            (at,) = self._sends_at(every)
            first = begin + (at or every)
            if not self.sends(first):  # there is nothing to send yet
                first += every
            number = count if end is None else len(range(first, end + 1, every))
            number = min(number, count)
            runs.append((every, first, number))
            count -= number
        return runs

    def message_steps(self, t: Any) -> tuple[Any, Any]:
        """(τ, at): around step t messages leave at steps ≡ at (mod τ).

        at: a scalar, or one for each fragment.
        """
        every, since = self.period_at(t)
        at = tuple((at + since) % every for at in self._sends_at(every))
        return every, at if len(at) > 1 else at[0]

    # Steps of a period, 0 for its last one

    def _lands_at(self, every: Any) -> tuple[Any, ...]:
        del every
        return self.offsets

    def _agrees_at(self, every: Any) -> tuple[Any, ...]:
        return tuple((offset - self.delay) % every for offset in self.offsets)

    def _sends_at(self, every: Any) -> tuple[Any, ...]:
        if not self.delay:
            return self.offsets
        return tuple((at + 1) % every for at in self._agrees_at(every))

    def _is_at(self, t: Any, steps: Callable[[Any], tuple[Any, ...]]) -> Any:
        """Whether step t is one of these; the Python value True if it always is."""
        every, since = self.period_at(t)
        if isinstance(t, int):
            return t > self.after and (t - since) % every in steps(every)
        due = any_of(*(_is_due(t, since, every, at) for at in steps(every)))
        return due if self.after == 0 else due & (t > self.after)

    def _index(self, t: Any, steps: Callable[[Any], tuple[Any, ...]]) -> Any:
        every, since = self.period_at(t)
        position = _counted_from(t, since) % every
        return jnp.argmax(position == jnp.array(steps(every))).astype(jnp.int32)


def _is_due(t: Any, since: Any, every: Any, at: Any) -> Any:
    if isinstance(every, int) and every == 1:
        return True
    return _counted_from(t, since) % every == at


def _counted_from(t: Any, since: Any) -> Any:
    """t - since. Programs of a period that never changes have no subtraction."""
    return t if isinstance(since, int) and since == 0 else t - since


def _element(values: tuple[int, ...], index: Any) -> Any:
    return values[index] if isinstance(index, int) else jnp.asarray(values)[index]
