"""Exchanges that travel beside the training, on devices of their own, while steps run.

A pull with a delay d agrees on the parameters after step t, and moves them after step
t + d. Its state stands on CPU devices beside those that train, one for each:

    record   after step t a copy of the parameters goes to the devices beside
    send     before step t + 1 the group begins to agree on the target there; no step waits
    land     after step t + d the target comes back, and the worker moves towards it

So no program of the devices that train contains a message of such a pull. The numbers, and
the state after each step, are those of the same pull inside the step.
"""

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

import jax
import numpy as np

from lsgd_jax._src import trees
from lsgd_jax._src.exchange import kernel, parts
from lsgd_jax._src.exchange.fragments import Slot, slots_of
from lsgd_jax._src.exchange.kernel import Pending, PullState
from lsgd_jax._src.exchange.loop import (
    Loop,
    Looped,
    Phases,
    changed,
    changes,
    state_in,
    with_state,
)
from lsgd_jax._src.exchange.outer import AroundState, Outer, OuterState
from lsgd_jax._src.exchange.phases import QUIET, Phase, Sizes
from lsgd_jax._src.exchange.rule import silent
from lsgd_jax._src.shared import Shared, one_worker
from lsgd_jax._src.trees import Tree


Key = tuple[int, int]  # the number of a method, and of a state among those of its pulls
States = Mapping[Key, PullState]

NOTHING: Any = PullState(*[cast(Any, ())] * len(PullState._fields))
# The fields that move a worker at a landing.
LANDING = ("pending", "restored", "dropped", "dropped_in_a_row", "missed", "agreement")


class Beside(Protocol):
    """The devices beside those that train."""

    def compile(self, fn: Callable[..., Any]) -> Callable[..., Any]: ...

    def there(self, tree: Tree) -> Tree: ...

    def share(self, number: Any) -> jax.Array: ...

    def back(self, tree: Tree) -> Tree: ...

    def like_back(self, tree: Tree) -> Tree: ...


class LoopBeside(Loop):
    """A `Loop` whose delayed pulls exchange on a twin of the devices that train.

    Attributes:
      waited: seconds that the loop has waited for targets that were not there in time.
    """

    def __init__(
        self,
        train: Looped,
        compile: Callable[..., Any],
        sizes: Sizes | None,
        options: Mapping[str, Any],
        twin: Beside,
    ):
        super().__init__(train, compile, sizes, options)
        check_may_travel(train.methods)
        self.waited = 0.0
        self._twin = twin
        # The number of messages so far. Each one waits for the one before it, so that all
        # processes send them in the same order.
        self._sent = Shared(twin.share(np.int32(0)))
        self._away: dict[Key, PullState] = {}  # on the twin
        self._slots: dict[Key, Slot] = {}
        self._like: dict[Key, Tree] = {}  # the part of each pull, as shapes of one worker
        self._beside: dict[Any, Callable[..., Any]] = {}
        # The state of a rule that acts on each step stays at home. These leaves of it, by
        # number, are agreed on and so change on the twin.
        self._agreed: dict[Key, set[int]] = {}
        self._begun: set[Any] = set()  # the programs that are compiled ahead
        self._before: dict[Key, list[Any]] = {}  # what stands for them at home

    @property
    def _is_separable(self) -> bool:
        return True

    def __call__(self, state: AroundState, *args: Any, **named: Any) -> Any:
        """See `Loop`."""
        if not self._is_last(state):
            self._begin(state)
        counts = self._counts_of(state)
        before = dict(self._away)
        try:
            self._send(counts, self._train.at_counts(counts, self._sizes))
            results = super().__call__(self._at_home(state), *args, **named)
        except BaseException:
            self._away = before  # as the caller's state still has it
            raise
        after = _with_pulls(state_in(results), self._joined)
        return with_state(results, after)

    def _begin(self, state: AroundState) -> None:
        """Takes what is to be beside out of a state that this loop did not return."""
        self._slots = _delayed(self._train.methods, state)
        self._like = _parts(self._train, self._slots, state)
        pulls = {key: _pull(state, key) for key in self._slots}
        rules = {key: pull.rule for key, pull in pulls.items() if self._steps(key)}
        self._before = {
            key: jax.tree.leaves(rule) for key, rule in self._twin.back(rules).items()
        }
        away = {key: _away_part(pull) for key, pull in pulls.items()}
        self._away = self._twin.there(away)
        for key in self._slots:
            self._agreed.setdefault(key, set())  # programs have the set
        for key in rules:
            # Its trace tells which leaves are agreed on.
            program: Any = self._program_beside("send", key)
            program.trace(self._away[key], _shared(0), self._sent)

    def _steps(self, key: Key) -> bool:
        """Whether the rule acts on each step."""
        return self._slots[key].pull.rule.step is not silent

    def _at_home(self, state: AroundState) -> AroundState:
        """The state without what is beside."""
        return _with_pulls(state, self._left)

    def _left(self, key: Key, pull: PullState) -> PullState:
        """What is left of the state of a pull."""
        if key not in self._slots:
            return pull
        rule = ()
        if self._steps(key):
            rule = _replaced(pull.rule, self._agreed[key], self._before[key])
        return _home_part(pull)._replace(rule=rule)

    def _joined(self, key: Key, pull: PullState) -> PullState:
        """The whole state of a pull, of what was left and what is beside."""
        if key not in self._slots:
            return pull
        away = self._away[key]
        if self._steps(key):
            agreed = jax.tree.leaves(away.rule)
            away = away._replace(rule=_replaced(pull.rule, self._agreed[key], agreed))
        return _together(pull, away)

    # The three acts

    def _send(self, counts: Sequence[int], phases: Phases) -> None:
        """Lets the messages of this step leave, about the parameters of the last one."""
        for key, slot in self._slots.items():
            phase = phases[key[0]]
            if slot.number not in phase.sends:
                continue
            round = dict(zip(phase.sends, phase.rounds)).get(slot.number)
            self._ahead.wait_for(("send", key, round))
            program = self._program_beside("send", key, round)
            t = _shared(counts[key[0]])
            self._away[key], self._sent = program(self._away[key], t, self._sent)

    def _phases_at(self, counts: Sequence[int]) -> Phases:
        """What each method does on the devices that train."""
        phases = super()._phases_at(counts)
        return tuple(phase if _acts(phase) else QUIET for phase in phases)

    def _exchanged(self, state: AroundState, taking_part: Any, phases: Phases) -> Any:
        landing = {}
        for key, slot in self._slots.items():
            if slot.number in phases[key[0]].lands:
                landing[key] = _landing(self._away[key])
        self._wait_for(landing, state)
        targets = self._twin.back(landing)
        ready = _with_pulls(state, lambda key, pull: _landable(pull, targets.get(key)))
        new, messages = self._program(phases)(ready, taking_part)
        after = changed(ready, new)
        for key in landing:
            landed = self._twin.there(_landing(_pull(after, key)))
            program = self._program_beside("land", key)
            self._away[key] = program(self._away[key], landed)
        for key in self._slots:
            if _name(key) not in messages:
                continue
            message = self._twin.there(messages[_name(key)])
            program = self._program_beside("record", key)
            self._away[key] = program(self._away[key], message)
        return self._at_home(after)

    def _wait_for(self, landing: States, state: AroundState) -> None:
        """Waits for targets that are not there when the training has come to them."""
        targets = jax.tree.leaves({key: each.pending for key, each in landing.items()})
        if all(x.is_ready() for x in targets):
            return
        jax.block_until_ready(jax.tree.leaves(state.outer))
        begin = time.perf_counter()
        jax.block_until_ready(targets)
        self.waited += time.perf_counter() - begin

    # Their programs

    def _compiled(self, phases: Phases | None) -> Callable[..., Any]:
        if phases is None:
            return super()._compiled(None)

        def exchange(state: AroundState, taking_part: Any) -> Any:
            after = self._train.exchange(state, taking_part, phases)
            messages = {}

            def take(key: Key, pull: PullState) -> PullState:
                slot = self._slots.get(key)
                if slot is None or slot.number not in phases[key[0]].records:
                    return pull
                # A copy: the next step may reuse the buffers of the parameters.
                message = pull.pending, pull.rule
                messages[_name(key)] = jax.tree.map(jax.numpy.copy, message)
                return pull._replace(pending=())

            return changes(state, _with_pulls(after, take)), messages

        return self._compile(exchange)

    def _program_beside(
        self, act: str, key: Key, round: int | None = None
    ) -> Callable[..., Any]:
        """The compiled program of what a pull does on the twin."""
        name = act, key, round
        if name not in self._beside:
            pull = self._slots[key].pull
            programs: dict[str, Callable[..., Any]] = {
                "record": functools.partial(_record, pull, self._agreed[key]),
                "send": functools.partial(
                    _send, pull, self._like[key], round, self._agreed[key]
                ),
                "land": functools.partial(_land, pull),
            }
            self._beside[name] = self._twin.compile(programs[act])
        return self._beside[name]

    # Compiled ahead

    def _compile_ahead(
        self, counts: Sequence[int], args: Sequence[Any], named: Mapping[str, Any]
    ) -> None:
        for key, slot in self._slots.items():
            name = "send", key, None
            has_rounds = slot.pull.rule.rounds(2) != ()
            if self._ahead.is_busy or has_rounds or name in self._begun:
                continue
            self._begun.add(name)
            program = self._program_beside(*name)
            self._ahead.begin(name, program, (self._away[key], _shared(0), self._sent), {})
        super()._compile_ahead(counts, args, named)

    def _like_those_of(self, phases: Phases, args: Sequence[Any]) -> Sequence[Any]:
        state, taking_part = args
        landing = {}
        for key, slot in self._slots.items():
            if slot.number in phases[key[0]].lands:
                landing[key] = self._twin.like_back(_landing(self._away[key]))
        ready = _with_pulls(state, lambda key, pull: _landable(pull, landing.get(key)))
        return ready, taking_part


def _shared(t: int) -> Shared:
    """A number that is equal on all workers."""
    return Shared(np.int32(t))


def _acts(phase: Phase) -> bool:
    """Whether a method does anything on the devices that train."""
    return bool(phase.lands or phase.records)


# The programs on the twin, of one worker


def _record(
    pull: kernel.Pull, agreed: set[int], state: PullState, message: tuple[Pending, Any]
) -> PullState:
    """The state with the operands of an agreement."""
    pending, rule = message
    if pull.rule.step is not silent:
        rule = _replaced(rule, agreed, jax.tree.leaves(state.rule))
        state = state._replace(rule=rule)
    return kernel.recorded(pull, pending.z, pending.z, state, pending.takes_part)


def _send(
    pull: kernel.Pull,
    like: Tree,
    round: int | None,
    agreed: set[int],
    state: PullState,
    t: Shared,
    sent: Shared,
) -> tuple[PullState, Shared]:
    """The state after the agreement about step t, and the number of messages so far.

    agreed: gets the numbers of the leaves of the rule's state that change.
    """
    after, _ = kernel.send_pending(pull, like, state, t.value, round)
    pairs = zip(jax.tree.leaves(state.rule), jax.tree.leaves(after.rule), strict=True)
    agreed.update(i for i, (old, new) in enumerate(pairs) if old is not new)
    return after, Shared(sent.value + 1)


def _land(pull: kernel.Pull, state: PullState, landed: PullState) -> PullState:
    """The state after a worker has moved towards the target, or was restored by it."""
    wire = state.wire
    if pull.is_narrow:
        wire = wire.without_error(landed.restored != state.restored)
    fields = {name: getattr(landed, name) for name in LANDING}
    return state._replace(wire=wire, **fields)


# What lies where


def _home_part(pull: PullState) -> PullState:
    """What stays on the devices that train of any rule: when messages leave."""
    traffic: Any = pull.traffic
    schedule = traffic._replace(exchanges=(), bytes_sent=(), bytes_each=())
    return NOTHING._replace(traffic=schedule)


def _away_part(pull: PullState) -> PullState:
    """What is beside."""
    traffic: Any = pull.traffic
    return pull._replace(traffic=traffic._replace(every=(), sends_at=()))


def _together(at_home: PullState, away: PullState) -> PullState:
    every = at_home.traffic.every
    sends_at = at_home.traffic.sends_at
    return away._replace(traffic=away.traffic._replace(every=every, sends_at=sends_at))


def _landing(pull: PullState) -> PullState:
    """What a landing reads and changes."""
    return NOTHING._replace(**{name: getattr(pull, name) for name in LANDING})


def _landable(at_home: PullState, landing: PullState | None) -> PullState:
    if landing is None:
        return at_home
    return landing._replace(traffic=at_home.traffic, rule=at_home.rule)


def _replaced(rule: Any, numbers: set[int], leaves: list[Any]) -> Any:
    """The state of a rule with these of its leaves in place of its own."""
    own, treedef = jax.tree.flatten(rule)
    chosen = [leaves[i] if i in numbers else x for i, x in enumerate(own)]
    return treedef.unflatten(chosen)


def _name(key: Key) -> str:
    return f"{key[0]}.{key[1]}"


# The pulls' states in that of a step


def _outers(state: AroundState) -> tuple[OuterState, ...]:
    outer = state.outer
    return (outer,) if isinstance(outer, OuterState) else tuple(outer)


def _pull(state: AroundState, key: Key) -> PullState:
    return _outers(state)[key[0]].exchange.pulls[key[1]]


def _with_pulls(
    state: AroundState, fn: Callable[[Key, PullState], PullState]
) -> AroundState:
    """The state with fn(key, pull) in place of the state of each pull."""
    outers = []
    for i, outer in enumerate(_outers(state)):
        pulls = tuple(fn((i, k), pull) for k, pull in enumerate(outer.exchange.pulls))
        outers.append(outer._replace(exchange=outer.exchange._replace(pulls=pulls)))
    is_one = isinstance(state.outer, OuterState)
    return AroundState(state.state, outers[0] if is_one else tuple(outers))


def _delayed(methods: Sequence[Outer], state: AroundState) -> dict[Key, Slot]:
    """The places of the pulls with a delay.

    Raises:
      ValueError: fragments that share a program.
    """
    found = {}
    for i, (method, outer) in enumerate(zip(methods, _outers(state))):
        for k, slot in enumerate(slots_of(method.pulls, outer.exchange.pulls)):
            if not slot.pull.delay:
                continue
            if slot.is_stacked or slot.shares:
                raise ValueError(
                    "`beside` must be False for fragments along an axis of all leaves, "
                    "which share a program: leave out `scan_axis`"
                )
            found[i, k] = slot
    return found


def _parts(train: Looped, slots: Mapping[Key, Slot], state: AroundState) -> dict[Key, Tree]:
    """The shapes of the part of each pull in one worker."""
    structure = jax.tree.structure(state.state)

    def parts_of(leaves: list[Any]) -> dict[str, Tree]:
        params = train.params_of(structure.unflatten(leaves))
        return {
            _name(key): parts.select(slot.pull.part, trees.floats(params[key[0]]))
            for key, slot in slots.items()
        }

    shapes = jax.eval_shape(parts_of, one_worker(state.state))
    return {key: shapes[_name(key)] for key in slots}


def check_may_travel(methods: Sequence[Outer]) -> None:
    """Raises ValueError unless the delayed pulls of these methods may travel beside."""
    delayed = [pull for method in methods for pull in method.pulls if pull.delay]
    if not delayed:
        raise ValueError(
            "`beside` must be False for a method without a `delay`: nothing would travel "
            "while steps run"
        )
    if any(method.remembers for method in methods):
        raise ValueError(
            "`beside` must be False for a method that reads the parameters before the step"
        )
    outer = [pull for method in methods[1:] for pull in method.pulls]
    if any(pull.rule.step is not silent for pull in outer):
        raise ValueError(
            "`beside` must be False if a method around another one acts on each step, such "
            "as `lsgd`: its step comes after the exchange of the other one"
        )
    for pull in delayed:
        if pull.rule.step is not silent and not pull.rule.steps_apart:
            raise ValueError(
                "`beside` must be False for a rule whose step reads what the group agrees "
                "on (see `Rule.steps_apart`), such as `lsgd` with a proximal pull"
            )
        if pull.memory != "device":
            raise ValueError(
                "`beside` must be False with memory='host': the state of what travels "
                "beside lies on the host already"
            )
