"""Exchanges that travel beside the training, on devices of their own, while steps run.

A pull with a delay d agrees on the parameters after step t, and moves them after step
t + d. Its state stands on CPU devices beside those that train, one for each:

    record   after step t a copy of the parameters goes to the devices beside
    send     before step t + 1 the group begins to agree on the target there; no step waits
    land     after step t + d the target comes back, and the worker moves towards it

So no program of the devices that train contains a message of such a pull. The numbers, and
the state after each step, are those of the same pull inside the step.
"""

import contextlib
import functools
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from lsgd_jax._src import trees
from lsgd_jax._src.exchange import kernel, parts
from lsgd_jax._src.exchange.agreement import taken_from
from lsgd_jax._src.exchange.ahead import Ahead
from lsgd_jax._src.exchange.crew import Crew, LoopEnded
from lsgd_jax._src.exchange.exchange import Exchange
from lsgd_jax._src.exchange.fragments import Slot, share_a_program, slots_of
from lsgd_jax._src.exchange.kernel import Pending, Pull, PullState
from lsgd_jax._src.exchange.phases import QUIET, Phase
from lsgd_jax._src.exchange.rule import silent
from lsgd_jax._src.exchange.step import ExchangeState
from lsgd_jax._src.shared import WORKER_AXES, Shared
from lsgd_jax._src.trees import Tree
from lsgd_jax._src.wire.group import Group


Messages = dict[str, Any]  # operands of agreements, by the number of the state
NOTHING: Any = PullState(*[cast(Any, ())] * len(PullState._fields))
# The fields that a landing changes, besides that nothing is on its way then.
COUNTERS = ("restored", "dropped", "dropped_in_a_row", "missed", "agreement")
LANDING = ("pending", *COUNTERS)  # those that it reads


class Beside(Protocol):
    """The devices beside those that train."""

    @property
    def mesh(self) -> Mesh: ...

    def compile(self, fn: Callable[..., Any]) -> Callable[..., Any]: ...

    def there(self, tree: Tree) -> Tree: ...

    def share(self, number: Any) -> jax.Array: ...

    def back(self, tree: Tree) -> Tree: ...

    def like_back(self, tree: Tree) -> Tree: ...

    def from_other(self, other: Any, tree: Tree) -> Tree: ...

    def rows(self, is_set: Callable[[int], bool]) -> jax.Array: ...


class Order:
    """The order in which the messages of a loop leave, equal in all processes.

    Attributes:
      sent: the number of messages so far. Each one waits for the one before it.
    """

    def __init__(self, twin: Beside):
        self.sent = Shared(twin.share(np.int32(0)))


class PullsBeside:
    """The delayed pulls of one method, whose states stand on a twin.

    `begin` takes the states there. From then on the state of the method is `at_home` while
    programs of the devices that train read it, and `whole` elsewhere.

    Args:
      pulls: all pulls of the method.
      twin: the devices beside.
      order: that of the messages of all methods of a loop.

    Attributes:
      waited: seconds for which the host has waited for targets that were not there in time.
      away: the states on the twin, by the number of the state among those of the pulls.
      crew: the workers, if their processes may be lost.
    """

    def __init__(self, pulls: Sequence[Pull], twin: Beside, order: Order):
        self.waited = 0.0
        self.away: dict[int, PullState] = {}
        self.crew: Crew | None = None
        self._pulls = pulls
        self._slots: dict[int, Slot] = {}
        self._like: dict[int, Tree] = {}  # the part of each pull, as shapes of one worker
        self.use(twin, order)
        # The state of a rule that acts on each step stays at home. These leaves of it, by
        # number, are agreed on and so change on the twin.
        self._agreed: dict[int, set[int]] = {}
        self._before: dict[int, list[Any]] = {}  # what stands for them at home

    @property
    def mesh(self) -> Mesh:
        """The devices beside, for connecting them before the first message."""
        return self._twin.mesh

    def use(self, twin: Beside, order: Order) -> None:
        """Uses other devices from now on."""
        self._twin = twin
        self._order = order
        self._programs: dict[Any, Callable[..., Any]] = {}
        self._begun: set[Any] = set()  # the programs that are compiled ahead

    def begin(self, state: ExchangeState, params: Tree) -> None:
        """Takes what is to be beside out of a whole state.

        params: those of one worker, or their shapes.
        """
        self._slots = _delayed(self._pulls, state)
        floats = trees.floats(params)
        for k, slot in self._slots.items():
            self._like[k] = parts.select(slot.pull.part, floats)
        pulls = {k: state.pulls[k] for k in self._slots}
        rules = {k: pull.rule for k, pull in pulls.items() if self._steps(k)}
        self._before = {k: jax.tree.leaves(x) for k, x in self._twin.back(rules).items()}
        away = {k: _away_part(pull) for k, pull in pulls.items()}
        self.away = self._twin.there(away)
        for k in self._slots:
            self._agreed.setdefault(k, set())  # programs have the set
        for k in rules:
            # Its trace tells which leaves are agreed on.
            program: Any = self._program("send", k)
            program.trace(self.away[k], _shared(0), self._order.sent)

    def _steps(self, k: int) -> bool:
        """Whether the rule acts on each step."""
        return self._slots[k].pull.rule.step is not silent

    def at_home(self, state: ExchangeState) -> ExchangeState:
        """The state without what is beside."""
        return _with_pulls(state, self._left)

    def _left(self, k: int, pull: PullState) -> PullState:
        """What is left of the state of a pull."""
        if k not in self._slots:
            return pull
        rule = ()
        if self._steps(k):
            rule = _replaced(pull.rule, self._agreed[k], self._before[k])
        return _home_part(pull)._replace(rule=rule)

    def whole(self, state: ExchangeState) -> ExchangeState:
        """The state of what was left at home and what is beside."""
        self._keep(state)
        return _with_pulls(state, functools.partial(self._joined, self.away))

    def _keep(self, at_home: ExchangeState) -> None:
        """Keeps what stands for agreed leaves: a step may have reused older arrays."""
        for k in self._before:
            self._before[k] = jax.tree.leaves(at_home.pulls[k].rule)

    def _joined(self, away: Mapping[int, PullState], k: int, pull: PullState) -> PullState:
        if k not in self._slots:
            return pull
        beside = away[k]
        if self._steps(k):
            agreed = jax.tree.leaves(beside.rule)
            beside = beside._replace(rule=_replaced(pull.rule, self._agreed[k], agreed))
        return _together(pull, beside)

    def back(self, tree: Tree) -> Tree:
        """The tree with all arrays of the twin on the devices that train."""
        return self._twin.back(tree)

    # Processes that may be lost, see `Workers.beside`

    def meet(
        self, state: ExchangeState, params: Tree, step: int
    ) -> tuple[ExchangeState, int]:
        """Begins together with the other processes, or takes from them what they have.

        Args:
          state, params: as for `begin`.
          step: the steps that this process has taken.

        Returns:
          (state, step): those with which the process begins. A process whose step differs
          from that of process 0, or of those that train already, takes theirs, and what all
          workers have in common.
        """
        assert self.crew is not None
        verdict = self.crew.begin([step])
        self.begin(state, params)
        if not verdict.newcomers:
            return state, step
        self.crew.come_in(verdict)
        (step,) = verdict.place["counts"]
        return with_count(state, step), step

    def settled(self, state: ExchangeState) -> ExchangeState:
        """The whole state on the devices that train, without messages that may not count.

        It waits for those in flight. In a loop that has ended they do not count.
        """
        assert self.crew is not None
        with contextlib.suppress(LoopEnded):
            self.crew.wait_for_messages()
        return self.back(self.known(state))

    def known(self, state: ExchangeState) -> ExchangeState:
        """The whole state before messages of which it is not known whether they count."""
        assert self.crew is not None
        away = self.crew.known(self)
        at_home = self.at_home(state)
        self._keep(at_home)
        return _with_pulls(at_home, functools.partial(self._joined, away))

    def consensus(self, tree: Tree) -> Tree:
        """The mean over the workers that live, as host arrays. All processes call it.

        tree: leaves [W, ...] of the devices that train.
        """
        assert self.crew is not None

        def run(twin: Any) -> Shared:
            if "mean" not in self._programs:
                self._programs["mean"] = twin.compile(_mean)
            return self._programs["mean"](twin.there(tree))

        found = self.crew.compute(run).value
        return jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), found)

    @contextlib.contextmanager
    def undone_by_errors(self) -> Generator[None]:
        """A step. After an error what is beside is that of the state before it."""
        before = dict(self.away)
        try:
            yield
        except BaseException:
            self.away = before
            raise

    def phase_at_home(self, phase: Phase) -> Phase:
        """What the method does on the devices that train: sending is none of it."""
        return phase if phase.lands or phase.records else QUIET

    # The three acts

    def send(self, t: int, phase: Phase, ahead: Ahead) -> None:
        """Lets the messages of a step leave, about the parameters of the last one.

        Args:
          t: the steps taken.
          phase: what the method does at the next step.
          ahead: compiles programs.
        """
        rounds = dict(zip(phase.sends, phase.rounds))
        for k, slot in self._slots.items():
            if slot.number not in phase.sends:
                continue
            if self.crew is not None and self.crew.has_left():
                continue
            round = rounds.get(slot.number)
            ahead.wait_for(self._named("send", k, round))
            self.send_one(k, t, round)

    def send_one(self, k: int, t: int, round: int | None) -> None:
        """Lets the message of a pull leave, about the parameters of step t.

        k: the number of its state.
        """
        before = self.away[k]
        program = self._program("send", k, round)
        self.away[k], self._order.sent = program(before, _shared(t), self._order.sent)
        if self.crew is not None:
            self.crew.sent(self, k, before, t, round)

    def ready(self, state: ExchangeState, phase: Phase, trained: Tree) -> ExchangeState:
        """The state at home, with the targets of the pulls that land.

        It waits for targets that are not there when the training has come to them.

        trained: arrays that the training step has returned.
        """
        lands = self._lands(phase)
        if not self._is_there(lands):
            jax.block_until_ready(trained)
            begin = time.perf_counter()
            if self.crew is not None:
                self.crew.wait_for(self, lands)
            jax.block_until_ready(self._targets(lands))
            self.waited += time.perf_counter() - begin
        landing = {k: _only(LANDING, self.away[k]) for k in lands}
        return _with_targets(state, self._twin.back(landing))

    def _is_there(self, lands: Sequence[int]) -> bool:
        """Whether the targets of these states are there."""
        if self.crew is not None and not self.crew.has_settled(self, lands):
            return False
        return all(x.is_ready() for x in self._targets(lands))

    def _targets(self, lands: Sequence[int]) -> list[Any]:
        return jax.tree.leaves([self.away[k].pending for k in lands])

    def like_ready(self, state: ExchangeState, phase: Phase) -> ExchangeState:
        """The shapes of `ready`."""
        landing = {k: _only(LANDING, self.away[k]) for k in self._lands(phase)}
        return _with_targets(state, self._twin.like_back(landing))

    def _lands(self, phase: Phase) -> list[int]:
        """The states of the pulls that land."""
        return [k for k, slot in self._slots.items() if slot.number in phase.lands]

    def recorded(
        self, state: ExchangeState, phase: Phase
    ) -> tuple[ExchangeState, Messages]:
        """The operands of agreements out of a state; inside the program of an exchange."""
        messages = {}

        def take(k: int, pull: PullState) -> PullState:
            slot = self._slots.get(k)
            if slot is None or slot.number not in phase.records:
                return pull
            # A copy: the next step may reuse the buffers of the parameters.
            message = pull.pending, pull.rule
            messages[str(k)] = jax.tree.map(jnp.copy, message)
            # What has landed at this step was there before it, too.
            return pull if slot.number in phase.lands else pull._replace(pending=())

        return _with_pulls(state, take), messages

    def exchanged(
        self, state: ExchangeState, messages: Messages, phase: Phase
    ) -> ExchangeState:
        """The state at home after an exchange, of which the twin gets its part.

        state, messages: results of the program of the exchange, see `recorded`.
        """
        if self.crew is not None:
            self.crew.wait_for_change()  # it brings the states to other devices
        for k in self._lands(phase):
            landed = self._twin.there(_only(COUNTERS, state.pulls[k]))
            self.away[k] = self._program("land", k)(self.away[k], landed)
            if self.crew is not None:
                self.crew.landed(self, k)
        for name, message in messages.items():
            k = int(name)
            program = self._program("record", k)
            self.away[k] = program(self.away[k], self._twin.there(message))
        self._keep(state)
        return self.at_home(state)

    # Workers that are lost and come back, see `crew`

    def move_from(self, twin: Beside, states: Mapping[int, PullState]) -> None:
        """Takes the states from another twin."""
        self.away = self._twin.from_other(twin, dict(states))

    def welcome(self, newcomers: Collection[int]) -> None:
        """Gives the workers of some processes what the others have in common."""
        is_new = self._twin.rows(lambda process: process in newcomers)
        for k in self._slots:
            self.away[k] = self._program("welcome", k)(self.away[k], is_new)

    def land_nothing(self, k: int) -> None:
        """Lets no target land from a state."""
        self.away[k] = self._program("forget", k)(self.away[k])

    # Their programs

    def _named(self, act: str, k: int, round: int | None) -> tuple[Any, ...]:
        """The name of a program."""
        return self, act, k, round

    def _program(self, act: str, k: int, round: int | None = None) -> Callable[..., Any]:
        """The compiled program of what a pull does on the twin."""
        name = self._named(act, k, round)
        if name not in self._programs:
            pull = self._slots[k].pull
            agreed = self._agreed[k]
            acts: dict[str, Callable[..., Any]] = {
                "record": functools.partial(_record, pull, agreed),
                "send": functools.partial(_send, pull, self._like[k], round, agreed),
                "land": functools.partial(_land, pull),
                "welcome": _welcomed,
                "forget": _forgotten,
            }
            self._programs[name] = self._twin.compile(acts[act])
        return self._programs[name]

    def compile_ahead(self, ahead: Ahead) -> None:
        """Begins to compile the program of a message, if one is missing."""
        for k, slot in self._slots.items():
            name = self._named("send", k, None)
            has_rounds = slot.pull.rule.rounds(2) != ()
            if ahead.is_busy or has_rounds or name in self._begun:
                continue
            self._begun.add(name)
            args = self.away[k], _shared(0), self._order.sent
            ahead.begin(name, self._program("send", k), args)


def _shared(t: int) -> Shared:
    """A number that is equal on all workers."""
    return Shared(np.int32(t))


# The programs on the twin, of one worker


def _record(
    pull: Pull, agreed: set[int], state: PullState, message: tuple[Pending, Any]
) -> PullState:
    """The state with the operands of an agreement."""
    pending, rule = message
    if pull.rule.step is not silent:
        rule = _replaced(rule, agreed, jax.tree.leaves(state.rule))
        state = state._replace(rule=rule)
    return kernel.recorded(pull, pending.z, pending.z, state, pending.takes_part)


def _send(
    pull: Pull,
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


def _land(pull: Pull, state: PullState, landed: PullState) -> PullState:
    """The state after a worker has moved towards the target, or was restored by it."""
    wire = state.wire
    if pull.is_narrow:
        wire = wire.without_error(landed.restored != state.restored)
    counters = {name: getattr(landed, name) for name in COUNTERS}
    return _forgotten(state)._replace(wire=wire, **counters)


def _welcomed(state: PullState, is_new: Array) -> PullState:
    """The state with what the others have in common, in a worker that is new.

    It takes the next target whole, and gives nothing to it. A target less the parameters of
    another worker is none.
    """
    group = Group(WORKER_AXES)
    source = jnp.argmin(group.gather(is_new))
    state = taken_from(group, source, state, is_new)
    pending: Any = state.pending
    is_none = is_new & (pending.stage == kernel.CORRECTED)
    return state._replace(
        pending=pending._replace(
            takes_part=pending.takes_part & ~is_new,
            stage=jnp.where(is_none, kernel.IDLE, pending.stage),
        ),
        missed=jnp.where(is_new, 1, state.missed),
    )


def _forgotten(state: PullState) -> PullState:
    """The state without a message."""
    pending: Any = state.pending
    idle = jnp.full_like(pending.stage, kernel.IDLE)
    return state._replace(pending=pending._replace(stage=idle))


def _mean(tree: Tree) -> Shared:
    """The mean over the finite workers, in the dtypes of the tree."""
    total, _ = Group(WORKER_AXES).masked_mean(tree, trees.all_finite(tree))
    return Shared(jax.tree.map(lambda x, c: c.astype(x.dtype), tree, total))


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


def _only(names: Sequence[str], pull: PullState) -> PullState:
    """These fields of the state of a pull."""
    return NOTHING._replace(**{name: getattr(pull, name) for name in names})


def _landable(at_home: PullState, landing: PullState | None) -> PullState:
    if landing is None:
        return at_home
    return landing._replace(traffic=at_home.traffic, rule=at_home.rule)


def _replaced(rule: Any, numbers: set[int], leaves: list[Any]) -> Any:
    """The state of a rule with these of its leaves in place of its own."""
    own, treedef = jax.tree.flatten(rule)
    chosen = [leaves[i] if i in numbers else x for i, x in enumerate(own)]
    return treedef.unflatten(chosen)


# The states of the pulls in that of a method


def _with_pulls(
    state: ExchangeState, fn: Callable[[int, PullState], PullState]
) -> ExchangeState:
    """The state with fn(number, pull) in place of the state of each pull."""
    return state._replace(pulls=tuple(fn(k, pull) for k, pull in enumerate(state.pulls)))


def _with_targets(state: ExchangeState, landing: Mapping[int, PullState]) -> ExchangeState:
    """The state at home with that of the pulls that land."""
    return _with_pulls(state, lambda k, pull: _landable(pull, landing.get(k)))


def _delayed(pulls: Sequence[Pull], state: ExchangeState) -> dict[int, Slot]:
    """The places of the pulls with a delay."""
    slots = enumerate(slots_of(pulls, state.pulls))
    return {k: slot for k, slot in slots if slot.pull.delay}


def with_count(state: ExchangeState, count: int) -> ExchangeState:
    """The state of a method that has taken so many steps."""
    old: Any = state.count.value
    host = np.asarray(count, old.dtype)
    # Not `device_put`, for which all processes would compare it.
    new = jax.make_array_from_callback((), old.sharding, host.__getitem__)
    return state._replace(count=Shared(new))


def check_may_travel(methods: Sequence[Exchange]) -> None:
    """Raises ValueError unless messages of methods may travel beside the steps.

    methods: those around a step, the innermost first.
    """
    pulls = [pull for method in methods for pull in method.pulls]
    if not any(pull.delay for pull in pulls):
        raise ValueError(
            "`beside` must be False for a method without a `delay`: nothing would travel "
            "while steps run"
        )
    if any(method.reads_x for method in methods):
        raise ValueError(
            "`beside` must be False for a method that reads the parameters before the step"
        )
    outer = [pull for method in methods[1:] for pull in method.pulls]
    if any(pull.rule.step is not silent for pull in outer):
        raise ValueError(
            "`beside` must be False if a method around another one acts on each step, such "
            "as `lsgd`: its step comes after the exchange of the other one"
        )
    for pull in pulls:
        if pull.delay:
            _check_may_travel(pull)


def _check_may_travel(pull: Pull) -> None:
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
    if pull.fragments > 1 and share_a_program(pull):
        raise ValueError(
            "`beside` must be False for fragments along an axis of all leaves, which share "
            "a program: leave out `scan_axis`"
        )
