"""Plans a method's settings from compiled steps, and says what keeps a message exposed."""

import collections
import dataclasses
import itertools
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from lsgd_jax._src.aot import table
from lsgd_jax._src.aot.collectives import FORWARD, ROUNDS, SMALL, Collective, exposed
from lsgd_jax._src.aot.report import Program, Report, shares_of
from lsgd_jax._src.exchange.exchange import Exchange
from lsgd_jax._src.exchange.outer import Outer
from lsgd_jax._src.exchange.parts import Fragment
from lsgd_jax._src.exchange.phases import Phase, Sizes


FEW = 0.1  # the share of a step's products beside a message that counts as exposed


@dataclasses.dataclass(frozen=True)
class Choice:
    """One choice of a method's settings, and what it takes.

    Attributes:
      settings: the arguments of the method.
      staleness: the steps that a worker takes between sending its parameters and moving to
        the target.
      report: the programs of all phases.
    """

    settings: Mapping[str, Any]
    staleness: int
    report: Report

    @property
    def name(self) -> str:
        """The settings in words: 'period=16, delay=1'."""
        return ", ".join(f"{name}={value}" for name, value in self.settings.items())

    @property
    def step(self) -> float | None:
        """Computed seconds of the mean step; None without figures of the chip."""
        seconds = self.report.mean_seconds()
        return None if seconds is None else seconds.step

    @property
    def exposed(self) -> float | None:
        """Mean seconds of a step in which transfers between slices or hosts are exposed."""
        seconds = self.report.mean_seconds()
        return None if seconds is None else seconds.across_exposed

    @property
    def reason(self) -> str:
        """Why its largest exposed message is not hidden; empty if all of them are."""
        programs = self.report.programs
        waiting = [(x, p) for p in programs for x in exposed(p.collectives, FEW)]
        if waiting:
            return _reason(*max(waiting, key=lambda pair: pair[0].times * pair[0].across))
        seconds = map(self.report.seconds, self.report.programs)
        if any(x and x.across_exposed > SMALL * x.across_hidden for x in seconds):
            return "the transfer takes longer than the products beside it"
        return ""


@dataclasses.dataclass(frozen=True)
class Plan:
    """Choices of a method's settings; `plan` returns it.

    Printed it is a table.

    Attributes:
      choices: those that fit into memory first, then the fastest first, the simplest first
        among equals.
      refused: settings that the method does not take, and why.
    """

    choices: tuple[Choice, ...]
    refused: Mapping[str, str]

    @property
    def best(self) -> Choice:
        """The first choice."""
        return self.choices[0]

    def __str__(self) -> str:
        return table.plan(self)

    def at(self, bandwidth: float | None = None, **assumptions: float) -> "Plan":
        """Returns the plan for other assumptions; see `Report.at`."""
        others = [
            dataclasses.replace(x, report=x.report.at(bandwidth, **assumptions))
            for x in self.choices
        ]
        return dataclasses.replace(self, choices=_sorted(others))

    def to_json(self) -> str:
        """The choices as JSON, with their programs."""

        def plain(x):
            return x if isinstance(x, int | float | str | None) else str(x)

        choices = [
            {
                "settings": {name: plain(x) for name, x in choice.settings.items()},
                "staleness": choice.staleness,
                "step_seconds": choice.step,
                "exposed_seconds": choice.exposed,
                "reason": choice.reason,
                **json.loads(choice.report.to_json()),
            }
            for choice in self.choices
        ]
        return json.dumps({"choices": choices, "refused": dict(self.refused)}, indent=1)


def plan(
    compiled: Callable[[Any, Sequence[Phase]], Report],
    method: Callable[..., Exchange | Outer],
    on_choice: Callable[[Choice], None] | None = None,
    sizes: Sizes | None = None,
    **settings: Sequence[Any],
) -> Plan:
    """Compiles a step with each choice of a method's settings and sorts them by time.

    Choices that differ in periods only have the same programs, which are compiled once.
    Phases that differ only in their fragment are of one kind, and one of them is compiled.

    Args:
      compiled: from a method and some of its phases to the report of the step with it, by
        `report` or `report_of`.
      method: makes the method from the settings.
      on_choice: called with each choice as soon as it is compiled.
      sizes: the sizes of the workers' axes, as for `Exchange.phase`: a program of a method
        on a graph then holds one round, and its report counts no other one.
      **settings: the values of each argument of the method, of which all combinations are
        planned. Values that stand first count as simpler.

    Raises:
      ValueError: settings of which the method takes no combination.

    >>> import jax, jax.numpy as jnp, optax
    >>> import lsgd_jax as lj
    >>> from lsgd_jax import aot
    >>> workers = lj.Workers(nodes=2, locals=4)
    >>> def compiled(method, phases):
    ...     tx = optax.chain(optax.sgd(0.1), method)
    ...     def init():
    ...         params = {"w": jnp.zeros((16, 16))}
    ...         return params, tx.init(params)
    ...     def train_step(params, state, x, phase):
    ...         loss_of = lambda p: jnp.square(x @ p["w"]).mean()
    ...         loss, grads = jax.value_and_grad(loss_of)(params)
    ...         updates, state = tx.update(grads, state, params, loss=loss, phase=phase)
    ...         return lj.apply_updates(params, updates), state, loss
    ...     batch = jax.ShapeDtypeStruct((4, 16), jnp.float32)
    ...     return aot.report(workers, init, train_step, batch, method, phases=phases)
    >>> plan = aot.plan(compiled, lj.diloco, period=[4, 16])
    >>> [choice.report.programs[0].share for choice in plan.choices]
    [0.25, 0.0625]
    """
    known: dict[Hashable, Report] = {}
    choices = []
    refused = {}
    for values in itertools.product(*settings.values()):
        chosen = dict(zip(settings, values))
        try:
            made = method(**chosen)
        except ValueError as error:
            refused[", ".join(f"{n}={x}" for n, x in chosen.items())] = str(error)
            continue
        rest = tuple(str(x) for n, x in chosen.items() if not n.endswith("period"))
        key = rest, made.phases(sizes)
        if key not in known:
            known[key] = _of_all_phases(compiled, made, sizes)
        pulls = (made.method if isinstance(made, Outer) else made).pulls
        staleness = max(pull.delay for pull in pulls)
        choice = Choice(chosen, staleness, known[key].over(made, sizes))
        choices.append(choice)
        if on_choice is not None:
            on_choice(choice)
    if not choices:
        raise ValueError(next(iter(refused.values()), "`settings` must have values"))
    return Plan(_sorted(choices), refused)


def check_hidden(report: Report, overlap: float = 0.5) -> None:
    """Raises unless all messages to other slices or hosts travel beside the gradient.

    Args:
      report: of a step with a method.
      overlap: the share of a step's matrix products that must be scheduled between the
        start and the end of each message; the shares of the two rounds of a mean in few
        bits are added. Messages below 1 % of a program's bytes, such as losses and flags,
        may be exposed.

    Raises:
      AssertionError: a message with a smaller share. ValueError: a report in which nothing
        is sent to other slices or hosts.
    """
    if not any(program.across for program in report.programs):
        raise ValueError(f"the report has no program that sends across {report.pod.unit}s")
    for program in report.programs:
        for each in exposed(program.collectives, overlap):
            raise AssertionError(
                f"{each.kind} ({each.across:.0f} bytes) in the phase {program.name!r} has "
                f"{100 * program.beside(each):.0f} % of the products beside it, not "
                f"{100 * overlap:.0f} %: {_reason(each, program)}"
            )


def _reason(each: Collective, program: Program) -> str:
    """Why a message is exposed, in words."""
    if each.conditional:
        return "the message stands in a conditional, which XLA waits for as a whole"
    if each.waits:
        return "the message depends on this step's gradient"
    first, second = ROUNDS
    hidden = [x.overlap for x in program.collectives if x.crosses and x.kind == first]
    if each.kind == second and min(hidden, default=0.0) > 1 - FORWARD:
        return "the loss, for which its second round waits, is added up with a gradient"
    return "XLA schedules too few products beside the message"


def _of_all_phases(
    compiled: Callable[[Any, Sequence[Phase]], Report],
    method: Exchange | Outer,
    sizes: Sizes | None,
) -> Report:
    """The report of a method for which one phase of each kind is compiled."""
    shares = shares_of(method, sizes)
    kinds = collections.defaultdict(list)
    for phase in shares:
        kinds[_kind(method, phase)].append(phase)
    report = compiled(method, [alike[0] for alike in kinds.values()])
    by_phase = {program.phase: program for program in report.programs}
    programs = [
        dataclasses.replace(
            by_phase[alike[0]], name=str(phase), phase=phase, share=shares[phase]
        )
        for alike in kinds.values()
        for phase in alike
    ]
    return dataclasses.replace(report, programs=tuple(programs))


def _kind(method: Exchange | Outer, phase: Phase) -> Hashable:
    """What two phases have in common that differ only in their fragment."""

    def pull(k: int) -> Hashable:
        each = method.pull_of(k)
        is_fragment = isinstance(each.part, Fragment) or each.fragments > 1
        part = None if is_fragment else k
        return type(each.rule), each.rule.axes, each.every, part

    acts = phase.sends, phase.lands, phase.records
    return *(tuple(map(pull, who)) for who in acts), phase.rounds


def _sorted(choices: Sequence[Choice]) -> tuple[Choice, ...]:
    most = float("inf")

    def order(x):
        return (not x.report.fits, most if x.step is None else x.step)

    return tuple(sorted(choices, key=order))  # stable
