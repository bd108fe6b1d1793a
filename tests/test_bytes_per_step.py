"""The benchmark of bytes per step, on a small network."""

import importlib.util
import pathlib
import shlex
import sys

import pytest

from train import cli
from train.task.experiment import make_optimizer


FILE = pathlib.Path(__file__).parents[1] / "benchmarks" / "bytes_per_step.py"
sys.path.append(str(FILE.parent))  # as when it is run
SPEC = importlib.util.spec_from_file_location("bytes_per_step", FILE)
assert SPEC is not None and SPEC.loader is not None
benchmark = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(benchmark)


def test_every_variant_of_the_table_is_valid():
    for options in benchmark.VARIANTS.values():
        make_optimizer(cli.parse([*benchmark.TEXT, *shlex.split(options)]))


@pytest.mark.slow
def test_fragments_lower_the_peak_and_int8_lowers_peak_and_mean():
    small = "--transformer.layers 1 --method diloco --method.period 4"
    sent = lambda more: [
        float(benchmark.row("", f"{small} {more}")[column])
        for column in ("peak, MB in a step", "mean, MB a step", "kept, MB")
    ]
    peak, mean, kept = sent("")
    assert abs(peak - 4 * mean) < 1e-3 and abs(kept - 2 * peak) < 0.02
    narrow = sent("--method.fragments 2 --method.wire int8")
    assert 0.125 * peak < narrow[0] < 0.2 * peak
    # Of 4 workers each also sends the mean of its share, a quarter of the parameters.
    assert 0.25 < narrow[1] / mean / 1.25 < 0.27 and abs(narrow[2] - 3 * peak) < 0.02
