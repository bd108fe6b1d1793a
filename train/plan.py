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

import dataclasses
import json
import math
import pathlib
import re
import sys
from collections.abc import Sequence
from typing import Annotated

import jax
import rich.console
import tyro

import lsgd_jax as lj
from train import cli, command, compilation_cache, compile
from train.cluster import rendezvous
from train.cluster.exit_status import SUCCESS, WRONG_USAGE
from train.cluster.session import Session
from train.config import Config, WorkersConfig
from train.messages import meant
from train.metrics import tables
from train.planning import laws
from train.planning.advice import Plan, number
from train.planning.candidates import ALL, INSIDE, Setting
from train.planning.links import Link
from train.planning.measurement import computed, measure


PROGRAM = "python -m train.plan"
MOST = {"parameters": 1e13, "tokens": 1e18, "mbit": 1e9, "step_ms": 1e9}
# Bytes per parameter of float32 parameters, gradients and two moments of Adam.
STATE = 16
POSITIVE = (
    *("parameters", "tokens", "batch", "mbit", "step_ms", "price"),
    *("parameter_mb", "efficiency"),
)
EXCHANGES = (
    "exchanges: 2 (W - 1) / W of the bytes and 2 log2 W latencies, as in train.simulate; "
    "from the bandwidth alone, utilizations are -15 to +29 % (median 7 %) off 48 measured"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(compile.Cluster):
    """The options of a plan.

    Args:
      experiment: a named experiment, such as text; none to plan for given numbers.
      parameters: number of parameters, in place of those of an experiment.
      tokens: number of tokens to train on; the laws' own are 20 for each parameter.
      chips: kind and number of all chips, such as v5e:16x16 or h100:64.
      sites: number of sites, each of which is a worker.
      mbit: Mbit/s of a site's or a node's link, in place of a measurement.
      latency_ms: milliseconds of a message from site to site, with --mbit.
      step_ms: milliseconds of a step, in place of a measurement.
      efficiency: share of the chips' peak that a step reaches.
      batch: tokens of a step of all workers, in place of a law's.
      share: share of the time that workers may wait for exchanges; methods whose times
        differ by less count as equally fast.
      price: of a chip for an hour.
      json: print JSON, with all candidates.
      plot: file for a picture of hours against bandwidth.
      parameter_mb: megabytes of float32 parameters, another way to give --parameters.
    """

    experiment: Annotated[
        tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[NAME]")
    ] = None
    parameters: float | None = None
    tokens: float | None = None
    chips: str | None = None
    sites: int | None = None
    mbit: float | None = None
    latency_ms: float = 0.0
    step_ms: float | None = None
    efficiency: float = 0.5
    batch: float | None = None
    share: float = 0.05
    price: float | None = None
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    plot: pathlib.Path | None = None
    parameter_mb: float | None = None

    @property
    def is_described(self) -> bool:
        """Whether an experiment is planned for a cluster that is not here."""
        return self.topology is not None or self.gpu is not None

    @property
    def size(self) -> float | None:
        """The given number of parameters."""
        megabytes = self.parameter_mb
        return self.parameters if megabytes is None else megabytes * 1e6 / 4

    def check(self) -> None:
        """Raises ValueError unless the values are possible together."""
        for name in POSITIVE:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"`{name}` must be above 0, got {name}={value:g}")
        for name, most in (("share", "(0, 1)"), ("efficiency", "(0, 1]")):
            value = getattr(self, name)
            if not 0 < value <= 1 or (name == "share" and value == 1):
                raise ValueError(f"`{name}` must be in {most}, got {name}={value:g}")
        if not 0 <= self.latency_ms < math.inf:
            raise ValueError(
                f"`latency_ms` must be at least 0, got latency_ms={self.latency_ms:g}"
            )
        if self.parameters is not None and self.parameter_mb is not None:
            raise ValueError("only one of `parameters` and `parameter_mb` may be given")
        given = {name: getattr(self, name) for name in MOST} | {"parameters": self.size}
        for name, most in MOST.items():
            if given[name] is not None and given[name] > most:
                raise ValueError(
                    f"`{name}` must be at most {most:g}, got {name}={given[name]:g}"
                )
        if self.sites is not None and self.sites < 2:
            raise ValueError(
                f"`sites` must be at least 2: one has no exchanges, got sites={self.sites}"
            )
        if self.latency_ms and self.mbit is None:
            raise ValueError("`latency_ms` needs `mbit`")
        if self.plot is not None and self.plot.suffix != ".png":
            raise ValueError(f"`plot` must be a PNG file, got plot={self.plot}")
        (self._check_experiment if self.experiment else self._check_numbers)()

    def _check_experiment(self) -> None:
        for name in ("tokens", "chips", "batch"):
            if getattr(self, name) is not None:
                raise ValueError(f"`{name}` is for plans without an experiment")
        if (self.is_described or self.sites is not None) and self.mbit is None:
            raise ValueError("`mbit` must be given for links that are not here")
        if self.is_described and self.sites is not None:
            raise ValueError("`slices` or `hosts` give the number of sites, not `sites`")

    def _check_numbers(self) -> None:
        if self.is_described:
            raise ValueError("`topology` and `gpu` need an experiment; see `chips`")
        if self.size is None and self.sites is None and self.mbit is None:
            raise ValueError(
                "an experiment must be given, or `parameters`, `sites` and `mbit` with "
                f"`tokens` and `chips`, or with `step_ms`; see {PROGRAM} --help"
            )
        given = {"parameters": self.size, "sites": self.sites, "mbit": self.mbit}
        if self.step_ms is None:
            given |= {"tokens": self.tokens, "chips": self.chips}
        if missing := [name for name, value in given.items() if value is None]:
            raise ValueError(f"`{missing[0]}` must be given, or the name of an experiment")
        if self.step_ms is not None and self.tokens is not None and self.batch is None:
            raise ValueError("`tokens` needs `batch` where `step_ms` is given")
        if self.batch is not None and self.tokens is None:
            raise ValueError("`batch` needs `tokens`")
        if self.tokens is None or self.size is None or self.sites is None:
            return
        law = laws.settings(self.size, self.sites, "diloco", 1)["batch"]
        if self.tokens < (self.batch or law):
            raise ValueError(
                f"`tokens` must be at least the {number(self.batch or law)} of a step, got "
                f"tokens={self.tokens:g}"
            )


def chips_of(options: Options) -> tuple[lj.aot.Chip, int]:
    """The kind and the number of the given chips.

    Raises:
      ValueError: an unknown kind, or chips that sites cannot share or that are too small.
    """
    text, sites, size = options.chips or "", options.sites or 1, options.size or 0
    kind, _, shape = text.partition(":")
    if not re.fullmatch(r"\w+:\d+(x\d+)*", text):
        raise ValueError(f"`chips` must be such as v5e:16x16 or h100:64, got chips={text}")
    chip = lj.aot.chip(kind)
    count = math.prod(int(x) for x in shape.split("x"))
    if count < 2:
        raise ValueError(f"`chips` must be at least 2, got chips={text}")
    if sites > count:
        raise ValueError(
            f"`sites` must be at most the {count} chips, got sites={options.sites}"
        )
    if count % sites:
        raise ValueError(f"`sites` must divide the {count} chips, got sites={sites}")
    most = chip.memory * count / sites / STATE
    if size > most:
        raise ValueError(
            f"`parameters` must be at most {most:.2g}, which {count // sites} {kind} of a "
            f"site hold with gradients and Adam in float32, got parameters={size:g}"
        )
    return chip, count


def of_numbers(options: Options) -> tuple[Setting, list[str], float | None]:
    """The setting of a plan without an experiment, its sources and its price of an hour."""
    size, sites, mbit = options.size, options.sites, options.mbit
    assert size is not None and sites is not None and mbit is not None
    setting = Setting(
        size,
        {ALL: Link.of(mbit, options.latency_ms, sites)},
        tokens=options.tokens,
        batch=options.batch,
    )
    chip, count = (None, sites) if options.chips is None else chips_of(options)
    price = None if options.price is None else options.price * count
    if options.step_ms is not None:
        step, steps = options.step_ms / 1e3, None
        if options.tokens is not None and options.batch is not None:
            steps = math.ceil(options.tokens / options.batch)
        setting = dataclasses.replace(setting, step=step, steps=steps)
        words = f"a step: {options.step_ms:g} ms, as given"
        if options.tokens is None:
            words += "; the plan is about time only, and says nothing about the loss"
        return setting, [words], price
    assert chip is not None and options.tokens is not None
    flops = options.efficiency * count * chip.flops
    setting = dataclasses.replace(setting, flops=flops)
    source = (
        f"computing: 6 N D operations at {100 * options.efficiency:g} % of the peak of "
        f"{count} {chip.name} ({chip.source}), {count // sites} at each of {sites} sites"
    )
    return setting, [source], price


def of_experiment(
    options: Options, config: Config, session: Session
) -> tuple[Setting, list[str]]:
    """The setting of a plan for an experiment, and its sources."""
    sites, workers = options.sites, config.workers
    if sites is not None:
        grid = dataclasses.replace(workers, nodes=1, locals=1)
        config = dataclasses.replace(config, workers=grid)
        workers = WorkersConfig(nodes=sites, locals=1)
    is_known = None not in (options.step_ms, options.size, options.mbit)
    if is_known:
        setting, source = Setting(1.0, {}, step=0.0, steps=config.steps), "as given"
    elif options.is_described:
        setting, config = computed(config, options.pod())
        workers, source = config.workers, "computed from the compiled program"
    else:
        setting, source = measure(config, session), "measured here"
    setting = put(options, setting, workers.nodes, workers.locals)
    step, size = number(1e3 * (setting.step or 0)), number(4 * setting.parameters / 1e6)
    where = source if options.step_ms is None else "as given"
    return setting, [
        f"a step without exchanges: {step} ms, {where}",
        f"parameters: {size} MB in float32",
        "no loss: laws are for language models of known size and number of tokens",
    ]


def put(options: Options, setting: Setting, nodes: int, locals: int) -> Setting:
    """Replaces measurements by given values."""
    links, size = dict(setting.links), options.size
    if size is not None:
        links = {name: link._replace(measured={}) for name, link in links.items()}
    if options.mbit is not None and nodes * locals > 1:
        widest = Link.of(options.mbit, options.latency_ms, nodes * locals)
        links[ALL if nodes > 1 else INSIDE] = widest
    step = setting.step if options.step_ms is None else options.step_ms / 1e3
    return dataclasses.replace(
        setting, parameters=size or setting.parameters, links=links, step=step
    )


def measured(setting: Setting) -> str:
    """A table of the exchanges of each level."""
    rows = []
    for name, link in setting.links.items():
        seconds = link._replace(measured={}).seconds("mean", setting.parameters)
        latency = link.network.all_reduce(link.workers, 0)
        rate = 4 * setting.parameters / seconds / 1e6
        row = {"exchange": name, "workers": link.workers, "time, ms": number(1e3 * seconds)}
        rows.append(row | {"MB/s": number(rate), "latency, ms": number(1e3 * latency)})
    return tables.markdown(rows)


def main(arguments: Sequence[str]) -> int:
    """Plans and prints; returns the exit status, 0 or 2 (wrong usage)."""
    session = Session()
    try:
        options, others = cli.run_with_others(Options, arguments, PROGRAM, __doc__)
        # tyro takes the value of an unknown option for the name of an experiment.
        if others and options.experiment not in cli.experiments():
            raise ValueError(unknown(others[0]))
        options.check()
        if options.experiment is None:
            setting, sources, price = of_numbers(options)
        else:
            config = cli.parse([options.experiment, *others])
            jax.config.update("jax_enable_preemption_service", False)  # SIGTERM ends it
            if not options.is_described:
                session = rendezvous.join(config)
            compilation_cache.use(say=session.is_main and not options.json)
            setting, sources = of_experiment(options, config, session)
            price = None
            if options.price is not None and setting.links:
                price = options.price * setting.replicas * config.workers.devices_each
    except (ValueError, ImportError) as error:
        return session.leave(WRONG_USAGE, str(error))
    if session.is_main:
        report(options, setting, sources, price)
    return SUCCESS


def unknown(argument: str) -> str:
    """The message for an option that no plan without an experiment has."""
    names = [f"--{x.name.replace('_', '-')}" for x in dataclasses.fields(Options)]
    near = meant(argument, names)
    return f"unrecognized option {argument}{near}; see {PROGRAM} --help"


def report(
    options: Options, setting: Setting, sources: list[str], price: float | None
) -> None:
    """Prints the plan."""
    console = rich.console.Console(highlight=False, soft_wrap=True, markup=False)
    if not setting.links:
        console.print("one worker: there are no exchanges to plan")
        return
    plan = Plan(setting, options.share, [*sources, EXCHANGES], price)
    if options.plot is not None:
        plan.draw(options.plot)
    if options.json:
        print(json.dumps(plan.to_json(), indent=2))
        return
    if options.experiment is not None:
        console.print(measured(setting))
    console.print(tables.markdown(plan.rows()))
    for note in plan.notes():
        console.print(f"- {note}")
    console.print(f"\n{plan.sentence()}")
    for remark in plan.remarks():
        console.print(remark)


if __name__ == "__main__":
    sys.exit(command.run(main))
