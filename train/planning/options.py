"""The options of a plan, and what is checked about them."""

import dataclasses
import math
import pathlib
from typing import Annotated

import tyro

import lsgd_jax as lj
from train import compile
from train.planning import laws
from train.planning.advice import number
from train.planning.unequal import Unequal


PROGRAM = "python -m train.plan"
MOST = {"parameters": 1e13, "tokens": 1e18, "mbit": 1e9, "step_ms": 1e9}
# Bytes per parameter of float32 parameters, gradients and two moments of Adam.
STATE = 16
POSITIVE = (
    *("parameters", "tokens", "batch", "mbit", "step_ms", "price", "watts"),
    *("parameter_mb", "efficiency"),
)


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
    plot: pathlib.Path | None = None
    parameter_mb: float | None = None

    @property
    def is_described(self) -> bool:
        """Whether an experiment is planned for a cluster that is not here."""
        kinds = self.chips, self.topology, self.gpu
        return self.experiment is not None and any(x is not None for x in kinds)

    @property
    def size(self) -> float | None:
        """The given number of parameters."""
        megabytes = self.parameter_mb
        return self.parameters if megabytes is None else megabytes * 1e6 / 4

    @property
    def chip(self) -> tuple[lj.aot.Chip, int]:
        """The kind and the number of the given chips.

        Raises:
          ValueError: see `shared`, or chips that are too small.
        """
        chip, shape = self.shared()
        count, size = math.prod(shape), self.size or 0
        each = count // (self.sites or 1)
        if size > (most := chip.memory * each / STATE):
            raise ValueError(
                f"`parameters` must be at most {most:.2g}, which {each} {chip.name} of a "
                f"site hold with gradients and Adam in float32, got parameters={size:g}"
            )
        return chip, count

    def check(self) -> None:
        """Raises ValueError unless the values are possible, alone and together."""
        self._check_values()
        if self.parameters is not None and self.parameter_mb is not None:
            raise ValueError("only one of `parameters` and `parameter_mb` may be given")
        if self.latency_ms and self.mbit is None:
            raise ValueError("`latency_ms` needs `mbit`")
        (self._check_experiment if self.experiment else self._check_numbers)()

    def _check_values(self) -> None:
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
        given = {name: getattr(self, name) for name in MOST} | {"parameters": self.size}
        for name, most in MOST.items():
            value = given[name]
            if value is not None and value > most:
                raise ValueError(f"`{name}` must be at most {most:g}, got {name}={value:g}")
        if self.sites is not None and self.sites < 2:
            raise ValueError(
                f"`sites` must be at least 2: one has no exchanges, got sites={self.sites}"
            )
        if self.plot is not None and self.plot.suffix != ".png":
            raise ValueError(f"`plot` must be a PNG file, got plot={self.plot}")

    def _check_experiment(self) -> None:
        for name in ("tokens", "batch"):
            if getattr(self, name) is not None:
                raise ValueError(f"`{name}` is for plans without an experiment")
        if (self.is_described or self.sites is not None) and self.mbit is None:
            raise ValueError("`mbit` must be given for links that are not here")
        if self.chips is None and self.is_described and self.sites is not None:
            raise ValueError("`slices` or `hosts` give the number of sites, not `sites`")
        if self.chips is not None and self.sites is None:
            raise ValueError("`chips` needs `sites`")

    def _check_numbers(self) -> None:
        if self.topology is not None or self.gpu is not None:
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
        self._check_tokens()

    def _check_tokens(self) -> None:
        if self.tokens is None or self.size is None or self.sites is None:
            return
        law = laws.settings(self.size, self.sites, "diloco", 1)["batch"]
        if self.tokens < (self.batch or law):
            raise ValueError(
                f"`tokens` must be at least the {number(self.batch or law)} of a step, got "
                f"tokens={self.tokens:g}"
            )
