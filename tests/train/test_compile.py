"""train.compile: an experiment on a described cluster, and plans for it.

A cluster of CPU devices takes the place of a pod, except in tests with the marker aot.
"""

import importlib.util
import json
import pathlib
import re

import jax
import pytest
import tiny

from lsgd_jax import aot
from train import compile, plan


@pytest.fixture
def here(monkeypatch):
    """Makes `--topology` mean 8 CPU devices in 2 slices, with the figures of a v5e."""
    tiny.install(tiny.Tiny, set=monkeypatch.setattr)
    chip = aot.Chip("v5e", "cpu", 16 * 2**30, 197e12, 819e9, 200e9, "")
    pod = aot.Pod("a pod", tuple(jax.devices()), chip, 2, "slice")
    monkeypatch.setattr(compile.Cluster, "pod", lambda self: pod)
    return pod


def test_an_experiment_is_compiled_on_all_devices(here, capsys, tmp_path):
    options = "--topology v5e:2x2 --slices 2 --method lsgd --gbit 25 --efficiency 0.4"
    more = ["--json", str(tmp_path / "report.json")]
    assert compile.main(["digits", *options.split(), *more]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "8 devices" in lines[0] and "25 Gbit/s per host" in lines[0]
    assert [line.split()[0] for line in lines[2:5]] == ["send", "send", "quiet"]
    report = json.loads((tmp_path / "report.json").read_text())
    quiet = report["programs"][-1]
    assert report["devices"] == 8 and quiet["inside"] == quiet["across"] == 0
    assert lines[-1].startswith("at 40 % of the chip's peak") and report["hbm"] > 0


def test_workers_of_several_devices(here, capsys):
    options = "--topology v5e:2x2 --workers.inside fsdp=4 --method diloco --batch-size 8"
    assert compile.main(["digits", *options.split()]) == 0
    assert "quiet" in capsys.readouterr().out


def test_a_program_that_does_not_fit_has_status_1(here, monkeypatch, capsys):
    small = aot.Chip("v5e", "cpu", 1000, 197e12, 819e9, 200e9, "")
    pod = aot.Pod("a pod", here.devices, small, 2, "slice")
    monkeypatch.setattr(compile.Cluster, "pod", lambda self: pod)
    assert compile.main("digits --topology v5e:2x2 --method independent".split()) == 1
    assert "no, +0.0" in capsys.readouterr().out


def test_a_plan_takes_the_step_from_the_report(here, capsys):
    options = "--topology v5e:2x2 --slices 2 --mbit 100 --latency-ms 1"
    assert plan.main(["digits", *options.split()]) == 0
    output = capsys.readouterr().out
    assert "computed from the compiled program" in output
    assert "LSGD, every" in output and "use " in output
    assert "of 16 GiB of a device" in output


@pytest.mark.parametrize(
    "main, arguments, message",
    [
        (compile.main, "", "experiment must be given"),
        (compile.main, "digits", "one of `chips`, `topology` and `gpu` must be given"),
        (
            compile.main,
            "digits --topology v5e:2x2 --gpu h100",
            "one of `chips`, `topology`",
        ),
        (
            compile.main,
            "digits --chips v5e:4x4 --sites 0",
            "`sites` must be from 1 to the",
        ),
        (compile.main, "digits --chips h100:16 --sites 2", 'pip install -e ".[gpu'),
        (compile.main, "digits --topology v9:2x2", "`topology` must be a generation"),
        (compile.main, "digits --topology v5e:2x2 --gbit 0", "`gbit` must be above 0"),
        (compile.main, "digits --topology v5e:2x2 --mbit 0", "`mbit` must be above 0"),
        (compile.main, "digits --gpu h100 --efficiency 0", "`efficiency` must be above"),
        (compile.main, "digits --topology v5e:2x2", 'pip install -e ".[tpu]"'),
        (compile.main, "digits --gpu h100", 'pip install -e ".[gpu-compile]"'),
        (plan.main, "digits --gpu h100", "`mbit` must be given for links that"),
    ],
)
def test_wrong_usage(main, arguments, message, refusal, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert message in refusal(main, arguments.split())


@pytest.mark.parametrize(
    "options, message",
    [
        ("--workers.inside fsdp=8", "must divide the 4 devices of a slice, got 8"),
        ("--method async-lsgd", "`method` must run in lock step, got async-lsgd"),
    ],
)
def test_settings_that_do_not_fit_the_cluster(options, message, here, refusal):
    assert message in refusal(compile.main, f"digits --topology v5e:2x2 {options}".split())


@pytest.mark.aot
@pytest.mark.parametrize(
    "options, package",
    [
        ("--topology v5e:2x2 --slices 2 --workers.inside fsdp=2", "libtpu"),
        ("--gpu h100 --hosts 2 --each 2", "jax_cuda13_plugin"),
    ],
)
def test_an_experiment_is_compiled_for_a_pod(options, package, capsys):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    arguments = f"digits {options} --method diloco --batch-size 8".split()
    assert compile.main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    quiet = next(line for line in lines if line.startswith("quiet"))
    assert quiet.split()[-5] == "0"  # bytes across


PAGE = pathlib.Path(__file__).parents[2] / "docs/pods.md"
COMMANDS = re.findall(r"^python -m train\.(\w+) (.*)$", PAGE.read_text(), re.M)


@pytest.mark.aot
@pytest.mark.parametrize("program, options", COMMANDS)
def test_a_command_of_the_page_runs_to_the_end(program, options, capsys):
    package = "jax_cuda13_plugin" if "--gpu" in options else "libtpu"
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    assert {"compile": compile, "plan": plan}[program].main(options.split()) == 0
    assert "devices" in capsys.readouterr().out
