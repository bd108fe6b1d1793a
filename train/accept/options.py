"""The options of the acceptance run."""

import dataclasses
import math
import pathlib
from collections.abc import Sequence

from train.config.schema import DistributedConfig
from train.process.messages import meant
from train.run import cli


PROGRAM = "python -m train.accept"
# In this order: a child must have the devices before this process does, and the peak of
# memory is that of the whole process.
PARTS = "recovery", "memory", "numbers", "messages", "steps"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AcceptOptions:
    """The options of an acceptance run.

    Args:
      only: the parts to check, such as numbers,steps. Defaults to all: recovery, memory,
        numbers, messages and steps.
      minutes: the run ends after so many minutes. A part that has not ended then has
        failed.
      json: file for the findings.
      runs: folder for the runs of `recovery`, which all processes must see. They are
        removed after their comparison.
      distributed: how processes that were started together meet, as in `python -m train`.
    """

    only: str | None = None
    minutes: float = 5.0
    json: pathlib.Path | None = None
    runs: pathlib.Path = pathlib.Path("runs")
    distributed: DistributedConfig = dataclasses.field(default_factory=DistributedConfig)

    @property
    def parts(self) -> list[str]:
        """The parts to check, in their order."""
        return [part for part in PARTS if part in self.named]

    @property
    def named(self) -> list[str]:
        """The parts as they were given."""
        return list(PARTS) if self.only is None else self.only.split(",")


def parse(arguments: Sequence[str], text: str | None = None) -> AcceptOptions:
    """Returns the options of a command line.

    Args:
      arguments: the command line.
      text: what --help says.

    Raises:
      ValueError: a wrong command line.
    """
    options = cli.run(AcceptOptions, arguments, PROGRAM, description=text)
    for part in options.named:
        if part not in PARTS:
            raise ValueError(
                f"--only must name parts from {', '.join(PARTS)}, got {part!r}"
                f"{meant(part, PARTS)}; see {PROGRAM} --help"
            )
    if not 0 < options.minutes < math.inf:
        raise ValueError(f"--minutes must be above 0, got {options.minutes:g}")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise ValueError(
            f"--json must name a file in a folder that exists, got {options.json}"
        )
    return options
