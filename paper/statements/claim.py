"""A claim: a computed value and the bound that it must satisfy."""

from typing import Any, Literal, NamedTuple


class Claim(NamedTuple):
    """A row of the table.

    Attributes:
      statement: the claim in words or as a formula.
      computed: the quantity that was computed, and the number of cases.
      measured: its value, the worst over all cases.
      bound: the bound on it.
      tolerance: how far the bound may be exceeded because of rounding or quadrature.
      relation: whether the bound is an upper (≤) or a lower (≥) one.

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
        """How far the value exceeds the bound: 0 if it does not, nan for a value of nan."""
        gap = self.measured - self.bound
        return max(gap if self.relation == "≤" else -gap, 0.0) if gap == gap else gap

    @property
    def holds(self) -> bool:
        """Whether the value satisfies the bound; nan satisfies none."""
        return self.missed_by <= self.tolerance

    def row(self) -> dict[str, str]:
        """Returns the claim as a row of a table."""
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
        """Returns the claim as two lines for the screen.

        >>> print(Claim("½ at least", "a share", 0.6, 0.5, 1e-3, "≥").lines())
        holds: ½ at least
               a share: 0.6, must be ≥ 0.5 (tolerance 1e-03)
        """
        row = self.row()
        verdict = "holds" if self.holds else "FAILS"
        rule = f"must be {row['bound']} (tolerance {row['tolerance']})"
        computed = f"{self.computed}: {row['measured']}, {rule}"
        return f"{verdict}: {self.statement}\n       {computed}"


class Findings(NamedTuple):
    """The result of checking a statement.

    Attributes:
      claims: the claims that must hold.
      remarks: other observations, such as counterexamples to a stronger statement.
      figure: a matplotlib figure, or None.
    """

    claims: list[Claim]
    remarks: list[str] = []
    figure: Any = None
