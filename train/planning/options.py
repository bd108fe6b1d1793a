"""The options of a plan, and what is checked about them."""

import dataclasses
import math
import pathlib
from collections.abc import Sequence
from typing import Annotated

import tyro

import lsgd_jax as lj
from train import compile
from train.config import methods, periods
from train.config.schema import Condition
from train.metrics.quantities import number
from train.planning import laws
from train.planning.unequal import Unequal


PROGRAM = "python -m train.plan"
# Bytes per parameter of float32 parameters, gradients and two moments of Adam.
STATE = 16

ABOVE_ZERO = Condition("above 0", lambda x: 0 < x < math.inf)


def _at_most(most: float) -> Condition:
    return Condition(f"at most {most:g}", lambda x: x <= most)


# The range of each option that is given; `parameters` may be given in megabytes.
RANGES: Sequence[tuple[str, Condition]] = (
    ("parameter_mb", ABOVE_ZERO),
    ("parameters", ABOVE_ZERO),
    ("tokens", ABOVE_ZERO),
    ("batch", ABOVE_ZERO),
    ("mbit", ABOVE_ZERO),
    ("step_ms", ABOVE_ZERO),
    ("price", ABOVE_ZERO),
    ("watts", ABOVE_ZERO),
    ("efficiency", ABOVE_ZERO),
    ("share", Condition("in (0, 1)", lambda x: 0 < x < 1)),
    ("efficiency", Condition("in (0, 1]", lambda x: 0 < x <= 1)),
    ("latency_ms", Condition("at least 0", lambda x: 0 <= x < math.inf)),
    ("parameters", _at_most(1e13)),
    ("tokens", _at_most(1e18)),
    ("mbit", _at_most(1e9)),
    ("step_ms", _at_most(1e9)),
    ("sites", Condition("at least 2: one has no exchanges", lambda x: x >= 2)),
    ("plot", Condition("a PNG file", lambda path: path.suffix == ".png")),
)

NOT_HERE = "`mbit` must be given for links that are not here"
SITES_TWICE = "`slices` or `hosts` give the number of sites, not `sites`"
NO_EXPERIMENT = "`topology` and `gpu` need an experiment; see `chips`"
NOTHING_GIVEN = (
    "an experiment must be given, or `parameters`, `sites` and `mbit` with `tokens` and "
    f"`chips`, or with `step_ms`; see {PROGRAM} --help"
)
MISSING = "`{}` must be given, or the name of an experiment"

# Combinations that are refused: options that are given, options that are not, and the
# message. The first row that fits is reported. `size` is the number of parameters, which
# two options give.
REFUSED: Sequence[tuple[str, str, str]] = (
    (
        "parameters parameter_mb",
        "",
        "only one of `parameters` and `parameter_mb` may be given",
    ),
    ("latency_ms", "mbit", "`latency_ms` needs `mbit`"),
    ("experiment tokens", "", "`tokens` is for plans without an experiment"),
    ("experiment batch", "", "`batch` is for plans without an experiment"),
    ("experiment sites", "mbit", NOT_HERE),
    ("experiment chips", "mbit", NOT_HERE),
    ("experiment topology", "mbit", NOT_HERE),
    ("experiment gpu", "mbit", NOT_HERE),
    ("experiment topology sites", "chips", SITES_TWICE),
    ("experiment gpu sites", "chips", SITES_TWICE),
    ("experiment chips", "sites", "`chips` needs `sites`"),
    ("topology", "experiment", NO_EXPERIMENT),
    ("gpu", "experiment", NO_EXPERIMENT),
    ("", "experiment size sites mbit", NOTHING_GIVEN),
    ("", "experiment size", MISSING.format("parameters")),
    ("", "experiment sites", MISSING.format("sites")),
    ("", "experiment mbit", MISSING.format("mbit")),
    ("", "experiment step_ms tokens", MISSING.format("tokens")),
    ("", "experiment step_ms chips", MISSING.format("chips")),
    ("step_ms tokens", "batch", "`tokens` needs `batch` where `step_ms` is given"),
    ("batch", "tokens", "`batch` needs `tokens`"),
    (
        "changing",
        "experiment tokens",
        "`period` must be a number of steps where the length of the run is not known: give "
        "`tokens` and `batch`, or an experiment",
    ),
    (
        "quadratic",
        "experiment",
        "`period` by the quadratic rule needs the learning rate of an experiment",
    ),
    (
        "changing differs",
        "",
        "`period` must be a number of steps where workers differ; `python -m "
        "train.simulate` runs one that changes",
    ),
    ("json markdown", "", "only one of `json` and `markdown` may be given"),
)


@dataclasses.dataclass(frozen=True)
class PlannedMethod:
    """The options of a method that a plan takes.

    Args:
      period: of all methods, in place of periods that suit the links: a number of steps, or
        one that changes, '1, 500: 16' or 'quadratic(0.02, 4)'.
    """

    period: periods.PeriodText | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions(compile.Cluster, Unequal):
    """The options of a plan.

    Args:
      experiment: a named experiment, such as text; none to plan for given numbers.
      parameters: number of parameters, in place of those of an experiment.
      tokens: number of tokens to train on; the laws' own are 20 for each parameter.
      sites: number of sites, which share `chips` evenly. Each is a worker, or several where
        the step of an experiment is compiled for its chips.
      mbit: Mbit/s of a site's or a node's link, in place of a measurement.
      latency_ms: milliseconds of a message from site to site, with --mbit.
      step_ms: milliseconds of a step, in place of a measurement.
      efficiency: share of the chips' peak that a step reaches.
      batch: tokens of a step of all workers, in place of a law's.
      share: share of the time that workers may wait for exchanges; methods whose times
        differ by less count as equally fast.
      price: of a chip for an hour.
      watts: of a chip, with its share of host and cooling; adds the energy.
      json: print JSON, with all candidates.
      markdown: print tables in Markdown, with all columns and up to sixteen rows.
      plot: file for a picture of hours against bandwidth.
      parameter_mb: megabytes of float32 parameters, another way to give --parameters.
    """

    experiment: Annotated[
        tyro.conf.Positional[str | None], tyro.conf.arg(metavar="[NAME]")
    ] = None
    parameters: float | None = None
    tokens: float | None = None
    mbit: float | None = None
    latency_ms: float = 0.0
    step_ms: float | None = None
    efficiency: float = 0.5
    batch: float | None = None
    share: float = 0.05
    price: float | None = None
    watts: float | None = None
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    markdown: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    plot: pathlib.Path | None = None
    parameter_mb: float | None = None
    method: PlannedMethod = PlannedMethod()

    @property
    def is_described(self) -> bool:
        """Whether an experiment is planned for a cluster that is not here."""
        kinds = (self.chips, self.topology, self.gpu)
        return self.experiment is not None and any(x is not None for x in kinds)

    @property
    def changing(self) -> bool:
        """Whether a period is given that changes during the run."""
        return isinstance(self.method.period, str)

    @property
    def quadratic(self) -> bool:
        """Whether the quadratic rule is given."""
        period = self.method.period
        return isinstance(period, str) and periods.is_quadratic(period)

    @property
    def size(self) -> float | None:
        """The given number of parameters."""
        if self.parameter_mb is None:
            return self.parameters
        return self.parameter_mb * 1e6 / 4

    @property
    def chip(self) -> tuple[lj.aot.Chip, int]:
        """The kind and the number of the given chips.

        Raises:
          ValueError: see `shared`, or chips that are too small.
        """
        chip, shape = self.shared()
        count = math.prod(shape)
        each = count // (self.sites or 1)
        most = chip.memory * each / STATE
        size = self.size
        if size is not None and size > most:
            raise ValueError(
                f"`parameters` must be at most {most:.2g}, which {each} {chip.name} of a "
                f"site hold with gradients and Adam in float32, got parameters={size:g}"
            )
        return chip, count

    def check(self) -> None:
        """Raises ValueError unless the values are possible, alone and together."""
        for name, condition in RANGES:
            value = self.size if name == "parameters" else getattr(self, name)
            if value is not None and not condition.holds(value):
                shown = value if isinstance(value, pathlib.Path) else f"{value:g}"
                raise ValueError(f"`{name}` must be {condition.text}, got {name}={shown}")
        self._check_period()
        for given, missing, message in REFUSED:
            if all(map(self._has, given.split())) and not any(
                map(self._has, missing.split())
            ):
                raise ValueError(message)
        self._check_tokens()

    def _has(self, name: str) -> bool:
        """Whether an option is given. Its range is checked before; a latency may be 0."""
        return getattr(self, name) not in (None, 0)

    def _check_period(self) -> None:
        """Raises ValueError unless the trainer takes the period."""
        if self.method.period is not None:
            methods.make("local-sgd", period=self.method.period).exchanges(1.0, steps=1)

    def _check_tokens(self) -> None:
        """Raises ValueError for fewer tokens than one step takes."""
        if self.tokens is None or self.size is None or self.sites is None:
            return
        batch = self.batch
        if batch is None:
            batch = laws.settings(self.size, self.sites, "diloco", 1)["batch"]
        if self.tokens < batch:
            raise ValueError(
                f"`tokens` must be at least the {number(batch)} of a step, got "
                f"tokens={self.tokens:g}"
            )
