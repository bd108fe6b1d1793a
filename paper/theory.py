"""The statements of the theory, checked numerically.

    python -m paper theory --out DIR

They are about the stationary points of LSGD and EASGD, descent in one step, with a noisy
leader and with decreasing steps, the direction of the step on a quadratic, and the
stability of EASGD in round robin. The modules in `paper.statements` give the statements and
how they are checked. DIR gets a table (`theory.md`, `theory.csv`: the computed value, the
bound, the tolerance) and figures of the last two. The exit status is 1 if a statement does
not hold. Half a minute on a CPU, in float64.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

from paper import output
from paper.statements import (
    newton_direction,
    noisy_leader,
    one_step,
    round_robin,
    stationary_points,
)
from paper.statements.claim import Claim, Findings
from train.metrics import tables


Statement = Literal[
    "stationary-points",
    "one-step",
    "noisy-leader",
    "decreasing-steps",
    "newton-direction",
    "round-robin",
]
CHECKS: dict[Statement, Callable[..., Findings]] = {
    "stationary-points": stationary_points.check,
    "one-step": one_step.check,
    "noisy-leader": noisy_leader.check,
    "decreasing-steps": noisy_leader.check_decreasing,
    "newton-direction": newton_direction.check,
    "round-robin": round_robin.check,
}


@dataclasses.dataclass(frozen=True)
class TheoryOptions(output.ExperimentOptions):
    """The options of the checks."""

    # The statements to check.
    only: tuple[Statement, ...] = tuple(CHECKS)


OPTIONS = TheoryOptions


def table(claims: list[Claim], remarks: list[str]) -> str:
    """Returns the table of the claims, followed by the remarks."""
    notes = "".join(f"\n- {remark}" for remark in remarks)
    rows = tables.markdown([claim.row() for claim in claims])
    return rows + (f"\nOther observations:\n{notes}\n" if notes else "")


def run(options: TheoryOptions) -> output.Results:
    """Checks the statements."""
    outcomes = {}
    for name in dict.fromkeys(options.only):
        outcomes[name] = CHECKS[name](seed=options.seed)
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
