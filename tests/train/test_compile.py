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
from train.planning import measurement


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
    first = [line.split()[0] for line in lines if line.startswith(("send", "quiet"))]
    assert first == ["send", "send", "quiet"] * 2
    report = json.loads((tmp_path / "report.json").read_text())
    quiet = report["programs"][-1]
    assert report["devices"] == 8 and quiet["inside"] == quiet["across"] == 0
    assert lines[-1].startswith("at 40 % of the chip's peak") and report["hbm"] > 0


@pytest.mark.slow  # `test_aot.py` has reports of sharded workers
@pytest.mark.parametrize(
    "method, programs",
    [
        ("diloco", ["send 0, land 0", "quiet"]),
        (
            "palsgd",
            ["send 0, land 0", "quiet", "send 0, land 0, no gradient", "no gradient"],
        ),
    ],
)
def test_workers_of_several_devices(method, programs, here, capsys, tmp_path):
    path = tmp_path / "report.json"
    options = f"--topology v5e:2x2 --workers.inside fsdp=4 --method {method} --batch-size 8"
    assert compile.main(["digits", *options.split(), "--json", str(path)]) == 0
    assert all(name in capsys.readouterr().out for name in programs[-1:])
    found = json.loads(path.read_text())["programs"]
    assert [program["name"] for program in found] == programs
    # A program without a gradient has no products of matrices.
    for program in found:
        assert bool(program["flops"]) == ("no gradient" not in program["name"])


def test_a_program_that_does_not_fit_has_status_1(here, monkeypatch, capsys):
    small = aot.Chip("v5e", "cpu", 1000, 197e12, 819e9, 200e9, "")
    pod = aot.Pod("a pod", here.devices, small, 2, "slice")
    monkeypatch.setattr(compile.Cluster, "pod", lambda self: pod)
    assert compile.main("digits --topology v5e:2x2 --method independent".split()) == 1
    assert "no, +0.0" in capsys.readouterr().out


PLANNED = "digits --topology v5e:2x2 --slices 2 --mbit 100 --latency-ms 1"


def test_a_plan_takes_steps_and_what_a_delay_hides_from_reports(here, monkeypatch, capsys):
    """A message in float32 travels beside half of the products, one in int8 beside none."""

    def choice(wire, overlap, waits):
        settings = {"wire": wire, "delay": 1}
        sent = aot.Collective("a", "all-reduce", 8, 8.0, 8.0, 1, False, overlap, 1.0, waits)
        memory = aot.Memory(2**30, 0, 0, 0)
        program = aot.Program("", False, 1.0, 1.0, memory, None, True, 1.0, None, (sent,))
        return aot.Choice(settings, 1, aot.Report(here, (program,)))

    choices = choice("float32", 0.5, False), choice("int8", 0.0, True)
    monkeypatch.setattr(measurement, "delayed", lambda *_: aot.Plan(choices, {}))
    assert plan.main([*PLANNED.split(), "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert "computed from the compiled program" in output["sources"][0]
    assert "of 16 GiB of a device" in output["sources"][2]
    assert output["sources"][3:5] == [
        "DiLoCo, wire=float32, delay=1: 1 GiB of HBM, hides 50 % of a step",
        "DiLoCo, wire=int8, delay=1: 1 GiB of HBM, hides 0 % of a step: "
        "the message depends on this step's gradient",
    ]
    waits = {
        (x["wire"], x["delay"]): (x["longest_wait_seconds"], x["step_seconds"])
        for x in output["candidates"]
        if "diloco" in x["options"].split() and x["fragments"] == 1
    }
    whole, step = waits["float32", 0]
    assert waits["float32", 1][0] == pytest.approx(whole - step / 2)
    assert waits["int8", 1] == waits["int8", 0]


@pytest.mark.slow  # one compilation of each kind
def test_a_plan_compiles_what_a_delay_hides(here, capsys):
    assert plan.main(PLANNED.split()) == 0
    output = capsys.readouterr().out
    assert "LSGD, every" in output and "use " in output
    assert output.count("GiB of HBM, hides") == 2


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
    (*_, quiet) = [line for line in lines if line.startswith("quiet")]
    assert quiet.split()[-5] == "0"  # bytes across


PAGE = pathlib.Path(__file__).parents[2] / "docs/pods.md"
LINES = PAGE.read_text().replace("\\\n", "")  # a command may have several
COMMANDS = re.findall(r"^python -m train\.(\w+) (.*)$", LINES, re.M)


@pytest.mark.aot
@pytest.mark.parametrize("program, options", COMMANDS)
def test_a_command_of_the_page_runs_to_the_end(program, options, capsys):
    package = "jax_cuda13_plugin" if "--gpu" in options else "libtpu"
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    main, said = {
        "compile": (compile.main, "devices"),
        "plan": (plan.main, "in place of"),
    }[program]
    assert main(options.split()) == 0 and said in capsys.readouterr().out
