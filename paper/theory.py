"""The statements of the theory, checked numerically.

    python -m paper theory --out DIR

They are about the stationary points of LSGD and EASGD, descent in one step, with a noisy
leader and with decreasing steps, the direction of the step on a quadratic, and the
stability of EASGD in round robin. Each module in `paper.statements` gives one statement and
how it is checked. DIR gets a table (`theory.md`, `theory.csv`: the computed value, the
bound, the tolerance) and figures of the last two. The exit status is 1 if a statement does
not hold. Half a minute on a CPU, in float64.
"""

import dataclasses
import importlib
from typing import Literal, get_args

from paper import output
from paper.statements.claim import Claim, Outcome
from train.metrics import tables


Statement = Literal[
    "stationary-points",
    "one-step",
    "noisy-leader",
    "decreasing-steps",
    "newton-direction",
    "round-robin",
]
STATEMENTS: tuple[Statement, ...] = get_args(Statement)


@dataclasses.dataclass(frozen=True)
class Options(output.Options):
    """The options of the checks."""

    # The statements to check.
    only: tuple[Statement, ...] = STATEMENTS


def check(name: str, seed: int) -> Outcome:
    """Checks the statement with this name."""
    module = importlib.import_module(f"paper.statements.{name.replace('-', '_')}")
    return module.check(seed=seed)


def table(claims: list[Claim], remarks: list[str]) -> str:
    """Returns the table of the claims, followed by the remarks."""
    notes = "".join(f"\n- {remark}" for remark in remarks)
    rows = tables.markdown([claim.row() for claim in claims])
    return rows + (f"\nOther observations:\n{notes}\n" if notes else "")


def run(options: Options) -> output.Results:
    """Checks the statements."""
    outcomes = {}
    for name in dict.fromkeys(options.only):
        outcomes[name] = check(name, options.seed)
        print("\n".join(claim.lines() for claim in outcomes[name].claims), flush=True)
    claims = [claim for found in outcomes.values() for claim in found.claims]
    remarks = [remark for found in outcomes.values() for remark in found.remarks]
    failed = sum(not claim.holds for claim in claims)
    return output.Results(
        f"{failed} of {len(claims)} claims fail; " if failed else "all claims hold; ",
        tables={"theory": [claim.row() for claim in claims]},
        texts={"theory": table(claims, remarks)},
        figures={name: x.figure for name, x in outcomes.items() if x.figure},
        holds=not failed,
    )
