"""python -m train.plan: which method is worth it, how long it takes, and for what loss.

    python -m train.plan --parameters 1e9 --tokens 2e10 --chips v5e:16x16 --sites 4 \\
      --mbit 1000

plans for a language model on chips that are shared evenly by sites, with --mbit between any
two of them. Each site is one worker. Hours come from the operations of the chips and the
bytes of the methods, losses from published laws; every number has its source.

    python -m train.plan --step-ms 250 --parameters 25.6e6 --sites 8 --mbit 100

plans for your own numbers: the time of a step, and no loss.

    python -m train.plan cifar10-cnn7 --data.dir DIR --share 0.05

measures a training step of an experiment without exchanges, and exchanges of its parameters
inside a node, across nodes and among all workers, on the devices of all processes. Start it
as you would start the training. All options of `python -m train` may follow. --step-ms,
--parameters and --mbit stand in for measurements. With --sites the step of one worker is
measured, and each site is one.

    python -m train.plan text --topology v5p:4x4x4 --slices 2 --mbit 100000

plans for a cluster that is not here: the seconds of a step are computed from the compiled
program and public figures of the chip (see `python -m train.compile`).

The command writes no files, except for that of --plot.
"""

import contextlib
import dataclasses
import json
import math
import os
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import jax

from train.cluster import rendezvous
from train.cluster.session import Session, is_of_xla
from train.config.schema import Config, WorkersConfig
from train.metrics import progress, tables
from train.metrics.quantities import duration, number, size
from train.planning import engine
from train.planning.advice import Advice
from train.planning.links import Link
from train.planning.measurement import computed, measure
from train.planning.options import PROGRAM, PlanOptions
from train.planning.periods import GivenPeriod
from train.planning.scenario import ALL, INSIDE, Scenario
from train.planning.table import Table
from train.process import command, compilation_cache, names
from train.process.exit_status import SUCCESS, WRONG_USAGE
from train.process.messages import meant
from train.run import cli
from train.task import schedules


EXCHANGES = (
    "exchanges: 2 (W - 1) / W of the bytes and 2 log2 W latencies, as in train.simulate; "
    "checked against 48 published utilizations: off by -15 to +29 %, median 7 %"
)
ENERGY = "energy: --watts of each chip, also while it waits"
SIMULATED = (
    f"speeds and faults: simulated, {engine.STEPS} steps of each worker or more; where one "
    "is lost in lock step, the others wait for --timeout and go on without it"
)

WIDTH = 98  # of a file, and the most of a terminal: docs/is_it_worth_it.md has room for it
SIMULATING = "simulating methods with workers that differ, which may take minutes"


def of_numbers(options: PlanOptions) -> tuple[Scenario, list[str]]:
    """The scenario of a plan without an experiment, and its sources."""
    sites = options.sites
    assert options.size is not None and options.mbit is not None and sites is not None
    scenario = Scenario(
        options.size,
        {ALL: Link.of(options.mbit, options.latency_ms, sites)},
        tokens=options.tokens,
        batch=options.batch,
        chips=sites,
    )
    if options.method.period is not None:
        period = GivenPeriod(options.method.period)
        scenario = dataclasses.replace(scenario, period=period)
    if options.chips is not None:
        chip, count = options.chip
        scenario = dataclasses.replace(scenario, chips=count)
    if options.step_ms is not None:
        steps = None
        if options.tokens is not None and options.batch is not None:
            steps = math.ceil(options.tokens / options.batch)
        scenario = dataclasses.replace(scenario, step=options.step_ms / 1e3, steps=steps)
        source = f"a step: {options.step_ms:g} ms, as given"
        if options.tokens is None:
            source += "; the plan is about time only, and says nothing about the loss"
        return scenario, [source]
    chip, count = options.chip
    flops = options.efficiency * count * chip.flops
    scenario = dataclasses.replace(scenario, flops=flops)
    source = (
        f"computing: 6 N D operations at {100 * options.efficiency:g} % of the peak of "
        f"{count} {chip.name} ({chip.source}), {count // sites} at each of {sites} sites"
    )
    return scenario, [source]


def of_experiment(
    options: PlanOptions, config: Config, session: Session
) -> tuple[Scenario, list[str]]:
    """The scenario of a plan for an experiment, and its sources."""
    # The workers that are planned for, which may be others than those measured here.
    workers = config.workers
    if options.sites is not None and not options.is_described:
        if session.has_others:
            raise ValueError("`sites` must be planned by one process, which measures one")
        grid = dataclasses.replace(workers, nodes=1, locals=1)
        config = dataclasses.replace(config, workers=grid)
        workers = WorkersConfig(nodes=options.sites, locals=1)
    more: list[str] = []
    if None not in (options.step_ms, options.size, options.mbit):
        scenario = Scenario(1.0, {}, step=0.0, steps=config.steps)
        source = "as given"
    elif options.is_described:
        scenario, config, more = computed(config, options.pod())
        workers = config.workers
        source = "computed from the compiled program"
    else:
        scenario = measure(config, session)
        source = "measured here"
    if options.step_ms is not None:
        source = "as given"
    chips = workers.nodes * workers.locals * config.workers.devices_each
    scenario = dataclasses.replace(scenario, chips=chips)
    if options.method.period is not None:
        rate = schedules.learning_rate(config.optimizer, config.steps)
        period = GivenPeriod(options.method.period, rate)
        scenario = dataclasses.replace(scenario, period=period)
    scenario = put(options, scenario, workers.nodes, workers.locals)
    return scenario, [
        f"a step without exchanges: {number(1e3 * (scenario.step or 0))} ms, {source}",
        f"parameters: {number(4 * scenario.parameters / 1e6)} MB in float32",
        *more,
        "no loss: laws are for language models of known size and number of tokens",
    ]


def put(options: PlanOptions, scenario: Scenario, nodes: int, locals: int) -> Scenario:
    """Replaces measurements by given values."""
    if options.step_ms is not None:
        scenario = dataclasses.replace(scenario, step=options.step_ms / 1e3)
    links = dict(scenario.links)
    if options.size is not None:
        scenario = dataclasses.replace(scenario, parameters=options.size)
        links = {name: link._replace(measured={}) for name, link in links.items()}
    if options.mbit is not None and nodes * locals > 1:
        widest = Link.of(options.mbit, options.latency_ms, nodes * locals)
        links[ALL if nodes > 1 else INSIDE] = widest
    return dataclasses.replace(scenario, links=links)


def main(arguments: Sequence[str]) -> int:
    """Plans and prints.

    Returns:
      The exit status: 0 or 2 (wrong usage). With several processes also 70: an unexpected
      error, and 75: a process was lost.
    """
    session = Session()
    config = None
    try:
        options, others = cli.run_with_others(PlanOptions, arguments, PROGRAM, __doc__)
        # tyro takes the value of an unknown option for the name of an experiment.
        if others and options.experiment not in names.experiments():
            raise ValueError(unknown(others[0]))
        options.check()
        if options.experiment is not None:
            config = cli.parse(
                [options.experiment, *others], cli.Command(PROGRAM, PlanOptions)
            )
            jax.config.update("jax_enable_preemption_service", False)  # SIGTERM ends it
            if not options.is_described:
                session = rendezvous.join(config)
    except (ValueError, ImportError) as error:
        return session.leave(WRONG_USAGE, str(error))
    session.where = lambda: "before the plan was printed"
    with session.ended_by_errors():
        return plan(options, config, session)


def plan(options: PlanOptions, config: Config | None, session: Session) -> int:
    """Plans together with the processes of the session; returns the exit status."""
    try:
        if config is None:
            scenario, sources = of_numbers(options)
        else:
            compilation_cache.use(say=session.is_main and not options.json)
            scenario, sources = of_experiment(options, config, session)
        found = None
        if scenario.links:
            found = planned(options, scenario, sources, session)
    except (ValueError, ImportError) as error:
        if is_of_xla(error):
            raise
        return session.leave(WRONG_USAGE, str(error))
    if session.is_main:
        report(options, found)
    return SUCCESS


def planned(
    options: PlanOptions, scenario: Scenario, sources: list[str], session: Session
) -> Advice:
    """Returns the plan of a scenario with exchanges, and draws it if that is asked for."""
    with contextlib.ExitStack() as shown:
        if options.differs:
            options.check_workers(scenario.replicas)
            scenario = dataclasses.replace(scenario, unequal=options)
            sources = [*sources, SIMULATED]
            if session.is_main:
                tell = shown.enter_context(progress.told(SIMULATING))
                scenario = dataclasses.replace(scenario, tell=tell)
        if options.watts is not None:
            sources = [*sources, ENERGY]
        advice = Advice(
            scenario, options.share, [*sources, EXCHANGES], options.price, options.watts
        )
        if options.plot is not None and session.is_main:
            advice.draw(options.plot)
    return advice


def unknown(argument: str) -> str:
    """The message for an option that no plan without an experiment has."""
    names = cli.options_of(PlanOptions)
    near = meant(argument, names)
    return f"unrecognized option {argument}{near}; see {PROGRAM} --help"


def report(options: PlanOptions, advice: Advice | None) -> None:
    """Prints the plan, or that there is nothing to plan: the answer comes first."""
    if advice is None:
        print("one worker: there are no exchanges to plan")
        return
    if options.json:
        print(json.dumps(advice.to_json(), indent=2))
        return
    console = progress.console(markup=False)
    has_width = console.is_terminal or "COLUMNS" in os.environ
    console.width = min(console.width, WIDTH) if has_width else WIDTH

    def say(text: str, indent: str = "") -> None:
        wrapped = textwrap.fill(
            text,
            console.width,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
        )
        console.print(wrapped, soft_wrap=True)

    say(advice.sentence())
    console.print("options of python -m train:")
    console.print(f"  {advice.best.options}", soft_wrap=True)  # one line, to be copied
    for remark in advice.remarks():
        say(remark)
    table = Table(advice, with_all_columns=options.markdown)
    lines = [table.lines()]
    if options.experiment is not None:
        lines.append(exchanges(advice.scenario))
    for rows in lines:
        console.print()
        if options.markdown:
            console.print(tables.markdown(rows), soft_wrap=True, end="")
        else:
            console.print(tables.aligned(rows))
    console.print()
    for note in advice.notes(table.candidates()):
        say(f"- {note}", indent="  ")


def exchanges(scenario: Scenario) -> list[dict[str, Any]]:
    """The rows of a table of the exchanges of each level."""
    return [
        {
            "exchange": found.level,
            "workers": found.workers,
            "time": duration(found.seconds, digits=3),
            "data a second": size(found.bytes_per_second),
            "latency": duration(found.latency_seconds, digits=3),
        }
        for found in scenario.exchanges()
    ]


if __name__ == "__main__":
    sys.exit(command.run(main))
