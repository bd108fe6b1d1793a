"""The table of a plan: the candidates that it shows, and their cells."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator

from train.metrics.quantities import HOUR, duration, number, size
from train.planning.advice import Advice
from train.planning.candidates import NAMES, Candidate


COLUMNS = 6  # which 100 columns of a terminal hold
ROWS = 8
ALL_ROWS = 16  # of the table with all columns
UNKNOWN = "unknown"  # a loss that no law predicts

Cells = dict[str, str]


@dataclasses.dataclass(frozen=True)
class TableRow:
    """Candidates with the same settings and the same cells.

    Attributes:
      candidates: of several methods, the simplest first.
      cells: beside the name, by column.
    """

    candidates: list[Candidate]
    cells: Cells

    @property
    def name(self) -> str:
        """The name of the candidate, or of all of them."""
        names = [NAMES[x.method.name] for x in self.candidates]
        *others, last = names
        methods = f"{', '.join(others)} or {last}" if others else last
        return ", ".join([methods, *self.candidates[0].words])


@dataclasses.dataclass(frozen=True)
class Table:
    """The candidates of an advice that gain over simpler ones, the fastest first.

    Attributes:
      advice: the advice.
      with_all_columns: whether it has all columns and more rows, which no terminal holds.
    """

    advice: Advice
    with_all_columns: bool = False

    def rows(self) -> list[TableRow]:
        """The rows of the table.

        The candidates that the advice names come first, then the fastest of each method,
        then those with a law, and all others, as long as there is room.
        """
        rows = self._grouped()
        row_of = {id(x): row for row in rows for x in row.candidates}
        most = ALL_ROWS if self.with_all_columns else ROWS
        chosen: dict[int, TableRow] = {}
        for found in self._by_importance():
            if id(found) in row_of and len(chosen) < most:
                row = row_of[id(found)]
                chosen[id(row)] = row
        return sorted(chosen.values(), key=lambda row: row.candidates[0].seconds)

    def lines(self) -> list[dict[str, str]]:
        """The cells of each row, by column."""
        return [{"method": row.name, **row.cells} for row in self.rows()]

    def candidates(self) -> list[Candidate]:
        """The candidates of all rows."""
        return [found for row in self.rows() for found in row.candidates]

    def _by_importance(self) -> Iterator[Candidate]:
        advice = self.advice
        yield from self._named()
        seen: set[str] = set()
        for found in advice.candidates:
            if found.method.name not in seen:
                yield found
            seen.add(found.method.name)
        yield from (x for x in advice.candidates if x.loss.more is not None)
        yield from advice.candidates

    def _named(self) -> list[Candidate]:
        """The candidates of which the advice speaks."""
        advice = self.advice
        return [advice.base, advice.best, advice.least, advice.candidates[0]]

    def _grouped(self) -> list[TableRow]:
        """All candidates that gain, those with equal cells in one row."""
        named = {id(x) for x in self._named()}
        cells_of: Callable[[Candidate], Cells] = self._short_cells
        if self.with_all_columns:
            cells_of = self._all_cells
        rows: dict[tuple[str, ...], TableRow] = {}
        for found in self.advice.candidates:
            if id(found) in named or self.advice.gains(found):
                cells = cells_of(found)
                key = (*found.words, *cells.values())
                rows.setdefault(key, TableRow([], cells)).candidates.append(found)
        return list(rows.values())

    def _short_cells(self, found: Candidate) -> Cells:
        """The cells that decide. Those of a bill take the place of the last ones."""
        if found.steps is None:
            cells = {"a step": duration(found.seconds, digits=3)}
            sent = {"sent a step": size(found.sent)}
        else:
            cells = {"time": duration(found.seconds, digits=3)}
            sent = {"sent": size(found.sent * found.steps)}
        if any(x.loss.more is not None for x in self.advice.candidates):
            cells["added nats"] = _added_nats(found) or UNKNOWN
        cells |= self._bills(found)
        cells["waiting"] = f"{100 * found.share:.1f} %"
        cells |= sent
        is_hidden = found.method.delay > 0 and found.pause == 0
        cells["longest wait"] = "hidden" if is_hidden else duration(found.pause, digits=3)
        return dict(itertools.islice(cells.items(), COLUMNS - 1))

    def _all_cells(self, found: Candidate) -> Cells:
        if found.steps is None:
            cells = {"ms a step": number(1e3 * found.seconds)}
            sent = {"MB a step": number(found.sent / 1e6)}
        else:
            cells = {"hours": number(found.seconds / HOUR)}
            sent = {"GB sent": number(found.sent * found.steps / 1e9)}
        cells["waiting, %"] = number(100 * found.share)
        cells["longest wait, s"] = number(found.pause)
        cells |= sent
        cells["peak MB"] = number(found.peak / 1e6)
        cells |= self._bills(found)
        if self.advice.scenario.tokens is not None and found.settings:
            cells |= _of_laws(found)
        return cells

    def _bills(self, found: Candidate) -> Cells:
        bills = self.advice.bills(found)
        return {name: number(value) for name, value in bills.items()}


def _of_laws(found: Candidate) -> Cells:
    """The cells that laws fill."""
    settings = found.settings
    loss = found.loss
    nats = UNKNOWN
    if loss.nats is not None:
        nats = f"{loss.nats:.3f} ± {loss.error:.3f}"
    return {
        "batch, tokens": number(settings["batch"]),
        "inner rate": f"{settings['rate']:.2g}" if "rate" in settings else "",
        "outer rate": f"{settings.get('outer_rate', '')}",
        "loss, nats": nats,
        "added nats": _added_nats(found),
    }


def _added_nats(found: Candidate) -> str:
    return "" if found.loss.more is None else f"{found.loss.more:+.3f}"
