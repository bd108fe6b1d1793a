"""A report as text, and as a figure."""

from collections.abc import Sequence
from typing import Any

from lsgd_jax._src.aot.options import proposal


HEAD = (
    "program",
    "share of steps",
    "compile, s",
    "HBM, GiB",
    "arguments",
    "temporaries",
    "fits",
    "TFLOP",
    "sent inside, MB",
    "across, MB",
    "compute, ms",
    "exposed, ms",
    "hidden, ms",
)


def text(report: Any) -> str:
    """The report as a table of aligned columns."""
    pod = report.pod
    rows = [HEAD, *(_row(report, program) for program in report.programs)]
    gigabits = 8e-9 * report.bandwidth
    memory = f", {pod.chip.memory / 2**30:.0f} GiB each" if pod.chip else ""
    return "\n".join(
        (
            f"{pod.name}: {len(pod.devices)} devices{memory}; {gigabits:g} Gbit/s per host "
            f"to other {pod.unit}s",
            *aligned(rows),
            f"Bytes are those of one device; 'across' leaves its {pod.unit}. Times are "
            "computed from",
            "the compiler's numbers and public figures of the chip. They are not measured.",
            *proposal(report),
        )
    )


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Pads columns to equal width: the first one to the left, others to the right.

    >>> aligned([("a", "bb"), ("ccc", "d")])
    ['a    bb', 'ccc   d']
    """
    widths = [max(map(len, column)) for column in zip(*rows)]
    pad = lambda i, cell: cell.rjust(widths[i]) if i else cell.ljust(widths[0])
    return ["  ".join(pad(i, cell) for i, cell in enumerate(row)).rstrip() for row in rows]


def _row(report: Any, program: Any) -> tuple[str, ...]:
    memory, seconds = program.memory, report.seconds(program)
    fits = {True: "yes", False: "no", None: "–"}[program.fits]
    if program.fits is False and program.exceeds:
        fits = f"no, +{program.exceeds / 2**30:.2f} GiB"
    in_units = lambda x, unit: "–" if x is None else f"{x / unit:.3g}"
    size = lambda x: in_units(x, 2**30)
    time = lambda x: in_units(x, 1e-3)
    return (
        program.name,
        "–" if program.share is None else f"{program.share:.3g}",
        f"{program.compile_seconds:.1f}",
        size(memory and memory.peak),
        size(memory and memory.arguments),
        size(memory and memory.temporaries),
        fits,
        in_units(program.flops, 1e12),
        in_units(program.inside if memory else None, 1e6),
        in_units(program.across if memory else None, 1e6),
        time(seconds and seconds.compute),
        time(seconds and seconds.inside_exposed + seconds.across_exposed),
        time(seconds and seconds.inside_hidden + seconds.across_hidden),
    )


def figure(report: Any, path: Any) -> None:
    """Draws a bar of seconds for each program; see `Report.figure`."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("`figure` needs matplotlib: pip install matplotlib") from error
    each = [(p.name, s) for p in report.programs if (s := report.seconds(p)) is not None]
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
