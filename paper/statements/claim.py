"""A claim: a computed value, and the bound that it must keep."""

from typing import Any, Literal, NamedTuple


class Claim(NamedTuple):
    """A row of the table.

    Attributes:
      statement: what is claimed.
      computed: what was computed, from how much.
      measured: the computed value, the worst over all cases.
      bound: the bound.
      tolerance: by how much the bound may be missed: rounding, quadrature.
      relation: how the value must stand to the bound.

    >>> claim = Claim("½ at least", "a share", 0.4996, 0.5, 1e-3, "≥")
    >>> claim.holds, round(claim.missed_by, 4)
    (True, 0.0004)
    >>> claim._replace(measured=float("nan")).holds
    False
    """

    statement: str
    computed: str
    measured: float
    bound: float = 0.0
    tolerance: float = 0.0
    relation: Literal["≤", "≥"] = "≤"

    @property
    def missed_by(self) -> float:
        """How far beyond the bound the value lies; 0 within, nan if there is none."""
        gap = self.measured - self.bound
        return max(gap if self.relation == "≤" else -gap, 0.0) if gap == gap else gap

    @property
    def holds(self) -> bool:
        """Whether the bound is kept; nan keeps none."""
        return self.missed_by <= self.tolerance

    def row(self) -> dict[str, str]:
        """The claim as a row of a table."""
        return {
            "statement": self.statement,
            "computed": self.computed,
            "measured": f"{self.measured:.4g}",
            "bound": f"{self.relation} {self.bound:.4g}",
            "tolerance": f"{self.tolerance:.0e}" if self.tolerance else "0",
            "missed by": f"{self.missed_by:.1e}" if self.missed_by else "0",
            "holds": "yes" if self.holds else "NO",
        }

    def lines(self) -> str:
        """The claim, for the screen.

        >>> print(Claim("½ at least", "a share", 0.6, 0.5, 1e-3, "≥").lines())
        holds: ½ at least
               a share: 0.6, must be ≥ 0.5 (tolerance 1e-03)
        """
        row, verdict = self.row(), "holds" if self.holds else "FAILS"
        rule = f"must be {row['bound']} (tolerance {row['tolerance']})"
        computed = f"{self.computed}: {row['measured']}, {rule}"
        return f"{verdict}: {self.statement}\n       {computed}"


class Outcome(NamedTuple):
    """What a statement's check found.

    Attributes:
      claims: what must hold.
      remarks: what else was seen: beyond the statement, or against a stronger one.
      figure: a matplotlib figure, or None.
    """

    claims: list[Claim]
    remarks: list[str] = []
    figure: Any = None
