"""The statements of the theory, checked numerically.

    python -m paper theory --out DIR

Stationary points of LSGD and EASGD; descent in one step, with a noisy leader and with
decreasing steps; the direction of the step on a quadratic; EASGD's stability in round
robin. Each module in `paper.statements` states one and how it is checked. DIR gets
a table (`theory.md`, `theory.csv`: what was computed, the bound, the tolerance it met) and
a figure per statement. The exit status is 1 if one does not hold. Half a minute on a CPU,
in float64.
"""

import importlib
import pathlib
from collections.abc import Sequence
from typing import Any

import jax

import lsgd_jax as lj
from paper import output
from paper.statements.claim import Claim, Outcome
from train.arguments import Parser
from train.metrics import tables


STATEMENTS = (
    "stationary-points",
    "one-step",
    "noisy-leader",
    "decreasing-steps",
    "newton-direction",
    "round-robin",
)


def check(name: str, seed: int) -> Outcome:
    """Checks a statement by its name, in float64."""
    module = importlib.import_module(f"paper.statements.{name.replace('-', '_')}")
    with jax.enable_x64(True):
        return module.check(seed=seed)


def lines(claim: Claim) -> str:
    """A claim, for the screen.

    >>> print(lines(Claim("½ at least", "a share", 0.6, "≥", 0.5, 1e-3)))
    holds: ½ at least
           a share: 0.6, must be ≥ 0.5 (tolerance 1e-03)
    """
    row = claim.row()
    verdict = "holds" if claim.holds else "FAILS"
    rule = f"must be {row['bound']} (tolerance {row['tolerance']})"
    return (
        f"{verdict}: {claim.statement}\n       {claim.computed}: {row['measured']}, {rule}"
    )


def parse(arguments: Sequence[str]) -> Any:
    """The options.

    Raises:
      ValueError: an unknown option or statement.
    """
    parser = Parser("python -m paper theory", __doc__)
    parser.add_argument(
        "--only",
        default=",".join(STATEMENTS),
        help=f"statements, separated by commas, of {', '.join(STATEMENTS)} (default: all)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is random")
    output.add_out(parser, "theory")
    options = parser.parse_args(arguments)
    options.only = list(dict.fromkeys(options.only.split(",")))
    for name in options.only:
        lj.checks.check_option("only", name, STATEMENTS)
    lj.checks.check_not_negative("seed", options.seed)
    return options


def write(claims: list[Claim], remarks: list[str], out: pathlib.Path) -> None:
    """Writes the table, and below it what else was seen."""
    rows = [claim.row() for claim in claims]
    tables.write_csv(rows, out / "theory.csv")
    notes = "".join(f"\n- {remark}" for remark in remarks)
    text = tables.markdown(rows) + (f"\nSeen besides:\n{notes}\n" if notes else "")
    (out / "theory.md").write_text(text, encoding="utf-8")


def main(arguments: Sequence[str]) -> int:
    """Checks; the status is 1 if a statement does not hold."""
    options = parse(arguments)
    out = output.new_folder(options.out, "theory")
    claims, remarks = [], []
    for name in options.only:
        outcome = check(name, options.seed)
        output.save(outcome.figure, out / f"{name}.png")
        claims += outcome.claims
        remarks += outcome.remarks
        print("\n".join(map(lines, outcome.claims)), flush=True)
    write(claims, remarks, out)
    failed = sum(not claim.holds for claim in claims)
    verdict = f"{failed} of {len(claims)} claims fail" if failed else "all claims hold"
    print(f"{verdict}; everything is in {out}")
    return 1 if failed else 0
