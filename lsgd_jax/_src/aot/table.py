"""A report as text, and as a figure."""

from collections.abc import Sequence
from typing import Any

from lsgd_jax._src.aot.options import proposal


BYTES_AND_TIMES = (
    "inside, MB",
    "across, MB",
    "compute, ms",
    "exposed inside, ms",
    "exposed across, ms",
    "hidden, ms",
)
# A report has two tables, because a terminal has no room for all columns.
MEMORY = (
    "program",
    "share",
    "compile, s",
    "HBM, GiB",
    "arguments",
    "temporaries",
    "code",
    "fits",
)
STEP = ("program", "TFLOP", *BYTES_AND_TIMES)
COMPARED = (
    "step",
    "programs",
    "HBM, GiB",
    "fits",
    *BYTES_AND_TIMES,
    "step, ms",
)
PLANNED = (
    "HBM, GiB",
    "fits",
    "across, MB",
    "peak, MB",
    "exposed, ms",
    "step, ms",
    "staleness",
    "why exposed",
)


def text(report: Any) -> str:
    """The report as tables of aligned columns: memory, then bytes and seconds."""
    memory = [MEMORY, *(_memory(program) for program in report.programs)]
    steps = [STEP, *(_step(report, program) for program in report.programs)]
    tables = (*aligned(memory), "", *aligned(steps), "")
    step = report.mean_seconds()
    many = len(report.programs) > 1
    ends = []
    if many and report.hbm is not None:
        ends = [f"All programs together: {_in(report.hbm, 2**30)} GiB of HBM."]
    if many and step is not None:
        ends = [f"{' '.join(ends)} The mean step takes {_in(step.step, 1e-3)} ms.".strip()]
    notes = (*_assumptions(report), *proposal(report))
    return "\n".join((_cluster(report), "", *tables, *ends, *notes))


def comparison(reports: Any) -> str:
    """The reports as a table with a line for each step."""
    each = reports.reports
    [first, *_] = each.values()
    rows = [COMPARED, *(_compared(name, report) for name, report in each.items())]
    means = "Bytes and seconds are means over all steps."
    notes = (means, *_assumptions(first), *proposal(*each.values()))
    return "\n".join((_cluster(first), "", *aligned(rows), "", *notes))


def plan(plan: Any) -> str:
    """The choices of a plan as a table."""
    first = plan.best.report
    rows = [(*plan.best.settings, *PLANNED)]
    reasons = list(dict.fromkeys(x.reason for x in plan.choices if x.reason))
    for choice in plan.choices:
        report = choice.report
        row = (
            *map(str, choice.settings.values()),
            _in(report.hbm, 2**30),
            _fits(report),
            _in(report.mean(lambda program: program.across), 1e6),
            _in(max(program.across for program in report.programs), 1e6),
            _in(choice.exposed, 1e-3),
            _in(choice.step, 1e-3),
            str(choice.staleness),
        )
        note = ""
        if choice.reason:
            note = f"({1 + reasons.index(choice.reason)})"
        rows.append((*row, note))
    numbered = [f"({i}) {reason}" for i, reason in enumerate(reasons, start=1)]
    left_out = [f"left out: {name}: {why}" for name, why in plan.refused.items()]
    means = "MB, exposed and step are means over all steps."
    option = proposal(*(choice.report for choice in plan.choices))
    notes = (*numbered, *left_out, means, *_assumptions(first), *option)
    return "\n".join((_cluster(first), "", *aligned(rows), "", *notes))


def _cluster(report: Any) -> str:
    pod = report.pod
    memory = f", {pod.memory / 2**30:.3g} GiB each" if pod.memory else ""
    gigabits = 8e-9 * report.bandwidth
    return (
        f"{pod.name}: {len(pod.devices)} devices{memory}; {gigabits:g} Gbit/s per host to "
        f"other {pod.unit}s"
    )


def _assumptions(report: Any) -> tuple[str, ...]:
    return (
        f"Bytes are those of one device; 'across' leaves its {report.pod.unit}. Seconds "
        "are computed",
        f"at {100 * report.efficiency:.3g} % of the chip's peak. They are not measured.",
    )


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Pads columns to equal width: the first one to the left, others to the right.

    The words of a heading stand one below the other, so that columns are narrow.

    >>> aligned([("a", "two words"), ("ccc", "d")])
    ['       two', 'a    words', 'ccc      d']
    """
    headings = [cell.split() for cell in rows[0]]
    most = max(map(len, headings))
    stacked = [[""] * (most - len(words)) + words for words in headings]
    lines = [*zip(*stacked), *rows[1:]]
    widths = [max(map(len, column)) for column in zip(*lines)]

    def pad(i, cell):
        return cell.rjust(widths[i]) if i else cell.ljust(widths[0])

    return ["  ".join(pad(i, cell) for i, cell in enumerate(row)).rstrip() for row in lines]


def _in(x: float | None, unit: float) -> str:
    return "–" if x is None else f"{x / unit:.3g}"


def _memory(program: Any) -> tuple[str, ...]:
    memory = program.memory
    fits = {True: "yes", False: "no", None: "–"}[program.fits]
    if program.fits is False and program.exceeds:
        fits = f"no, +{program.exceeds / 2**30:.2f} GiB"
    return (
        program.name,
        _in(program.share, 1),
        f"{program.compile_seconds:.1f}",
        _in(memory and memory.peak, 2**30),
        _in(memory and memory.arguments, 2**30),
        _in(memory and memory.temporaries, 2**30),
        _in(memory and memory.code, 2**30),
        fits,
    )


def _step(report: Any, program: Any) -> tuple[str, ...]:
    return (
        program.name,
        _in(program.flops, 1e12),
        _in(program.inside if program.memory else None, 1e6),
        _in(program.across if program.memory else None, 1e6),
        *_times(report.seconds(program)),
    )


def _times(seconds: Any) -> tuple[str, ...]:
    return (
        _in(seconds and seconds.compute, 1e-3),
        _in(seconds and seconds.inside_exposed, 1e-3),
        _in(seconds and seconds.across_exposed, 1e-3),
        _in(seconds and seconds.inside_hidden + seconds.across_hidden, 1e-3),
    )


def _compared(name: str, report: Any) -> tuple[str, ...]:
    seconds = report.mean_seconds()
    return (
        name,
        str(len(report.programs)),
        _in(report.hbm, 2**30),
        _fits(report),
        _in(report.mean(lambda program: program.inside), 1e6),
        _in(report.mean(lambda program: program.across), 1e6),
        *_times(seconds),
        _in(seconds and seconds.step, 1e-3),
    )


def _fits(report: Any) -> str:
    if not report.fits:
        return "no"
    return "–" if report.pod.memory is None else "yes"


def figure(report: Any, path: Any) -> None:
    """Draws a bar of seconds for each program; see `Report.figure`."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("`figure` needs matplotlib: pip install matplotlib") from error
    each = [(program.name, report.seconds(program)) for program in report.programs]
    each = [(name, seconds) for name, seconds in each if seconds is not None]
    if not each:
        raise ValueError(
            "no figures of this chip are known, so there are no seconds to draw"
        )
    drawn = Figure(figsize=(7, 1.4 + 0.5 * len(each)), layout="constrained")
    axes = drawn.subplots()
    names = [name for name, _ in each]
    unit = report.pod.unit
    parts = (
        ("compute", "compute", "tab:blue", 1.0),
        ("inside_exposed", f"inside a {unit}, exposed", "tab:green", 1.0),
        ("across_exposed", f"across {unit}s, exposed", "tab:red", 1.0),
    )
    left = [0.0] * len(each)
    for field, label, color, alpha in parts:
        widths = [1e3 * getattr(seconds, field) for _, seconds in each]
        axes.barh(names, widths, 0.5, left=left, label=label, color=color, alpha=alpha)
        left = [a + b for a, b in zip(left, widths)]
    hidden = [1e3 * (s.inside_hidden + s.across_hidden) for _, s in each]
    axes.barh(names, hidden, 0.15, label="hidden behind compute", color="black", alpha=0.5)
    axes.invert_yaxis()
    axes.set_xlabel("computed milliseconds of a step")
    axes.spines[["top", "right"]].set_visible(False)
    drawn.legend(loc="outside upper center", ncols=2, frameon=False)
    drawn.savefig(path, dpi=120)
