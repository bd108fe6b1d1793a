"""python -m train.launch with small programs in place of the trainer."""

import os
import pathlib
import subprocess
import sys
import time

import pytest

from train.tools import launch
from train.tools.launch_plan import Plan


ROOT = pathlib.Path(__file__).parents[3]
HEAD = "import os, pathlib, signal, sys, time\n"


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """Launches a program here; (exit status, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{tmp_path}")
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)

    def run(program, *options, processes=1, arguments=()):
        (tmp_path / "program.py").write_text(HEAD + program)
        count = ["--processes", str(processes), "--module", "program"]
        status = launch.main([*count, *options, "--", *arguments])
        return status, *capfd.readouterr()

    return run


def test_the_launcher_is_spared_jax():
    """It lives through whatever happens to jax."""
    check = "import sys, train.tools.launch; sys.exit('jax' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, cwd=ROOT)


def test_the_processes_get_the_arguments_and_what_they_need_to_meet(run):
    program = "print(sys.argv[1:], os.environ.get('JAX_NUM_CPU_DEVICES'))"
    devices = ("--devices-per-process", "3")
    status, out, _ = run(program, *devices, processes=2, arguments=["digits", "--seed=1"])
    assert status == 0
    coordinators = set()
    for line in sorted(out.splitlines()):
        arguments, _, devices = line[4:].rpartition(" ")
        assert devices == "3"
        given = eval(arguments)
        assert given[:2] == ["digits", "--seed=1"]
        options = dict(zip(given[2::2], given[3::2]))
        assert options["--distributed.num-processes"] == "2"
        assert options["--distributed.process-id"] == line[1]
        coordinators.add(options["--distributed.coordinator"])
    (coordinator,) = coordinators
    assert coordinator.startswith("127.0.0.1:")


def test_the_errors_of_the_one_that_failed_are_repeated(run):
    status, out, err = run("raise OSError('the disk')", "--grace", "1")
    assert (status, out) == (1, "")
    shown, _, repeated = err.partition("process 0 failed with status 1:\n")
    assert "[0] OSError: the disk\n" in shown
    assert repeated.startswith("Traceback") and repeated.endswith("\nOSError: the disk\n")


@pytest.mark.parametrize("reads", [True, False], ids=["a full disk", "no reader"])
def test_what_cannot_be_shown_is_noted_in_the_run_folder(tmp_path, reads):
    """Without a reader the processes are told to save and to end, which they do."""
    program = HEAD + (
        "def stop(*_): pathlib.Path('saved').touch(); sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "for i in range(600):\n"
        "    print(i)\n"
        "    if i == 20 and sys.argv[1] == 'True': sys.exit(0)\n"
        "    time.sleep(0.02)\n"
    )
    (tmp_path / "program.py").write_text(program)
    (tmp_path / "config.json").touch()
    start = (
        "import sys; from train.tools import launch;"
        "from train.tools.launch_plan import Plan;"
        "line = ['--processes', '1', '--module', 'program', '--', sys.argv[1]];"
        "options = launch.parse(line);"
        "given = launch.environments(1, None, launch.os.environ);"
        "sys.exit(launch.launch(options, given, Plan(begun='config.json')))"
    )
    with open("/dev/full", "w") as full:
        launcher = subprocess.Popen(
            [sys.executable, "-c", start, str(reads)],
            stdout=full if reads else subprocess.PIPE,
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
        )
    with launcher:
        if not reads:
            launcher.stdout.readline()
            launcher.stdout.close()
        assert launcher.wait(60) == (0 if reads else 1)
    noted = (tmp_path / launch.NOTES).read_text()
    assert noted.count("\n") == 1 and "cannot be shown any more" in noted
    assert noted.endswith("told to save and to end\n") != reads
    assert (tmp_path / "saved").exists() != reads


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children so")
def test_no_process_survives_the_launcher(tmp_path):
    program = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    (tmp_path / "program.py").write_text(program)
    launcher = subprocess.Popen(
        [sys.executable, "-m", "train.launch", "--processes", "1", "--module", "program"],
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"},
    )
    with launcher:
        pid = launcher.stdout.readline().split()[1].decode()
        launcher.kill()
    stat = pathlib.Path(f"/proc/{pid}/stat")
    deadline = time.monotonic() + 20
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] not in "ZX":
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_crash_is_followed_by_so_many_restarts(run):
    """Another port and the same command line, since the program is not the trainer."""
    program = (
        "print(sys.argv[1:3], flush=True)\n"
        "count = len(list(pathlib.Path().glob('try-*')))\n"
        "if count < 2:\n"
        "    pathlib.Path(f'try-{count}').touch()\n"
        "    os.kill(os.getpid(), signal.SIGSEGV if count else signal.SIGKILL)\n"
    )
    status, out, err = run(program, "--max-restarts", "2", arguments=["x"])
    assert status == 0
    assert out == "[0] ['x', '--distributed.coordinator']\n" * 3
    assert [x for x in err.splitlines() if "process" in x or "restart" in x] == [
        "process 0 was ended by SIGKILL:",
        "restart 1 of 2",
        "process 0 was ended by SIGSEGV:",
        "restart 2 of 2",
    ]


def test_restarts_come_to_an_end(run):
    status, out, err = run("print(1); sys.exit(70)", "--max-restarts", "1")
    assert status == 70 and out == "[0] 1\n" * 2
    assert err.rstrip().endswith("process 0 failed with status 70:")


@pytest.mark.parametrize("status", [1, 2, 130])
def test_what_was_meant_to_end_is_not_restarted(run, status):
    got, out, err = run(f"print(1); sys.exit({status})", "--max-restarts", "2")
    assert got == status and out == "[0] 1\n" and "restart" not in err


def test_a_run_is_resumed_once_it_has_begun(tmp_path):
    begun = tmp_path / "config.json"
    plan = Plan(begun=str(begun), folder=["--run-dir", "x"], resume=["--resume"])
    program = launch.Program("train", ["digits", "--seed", "3"], plan)
    first = program.command(["--y"])
    assert first[4:] == ["train", "digits", "--seed", "3", "--run-dir", "x", "--y"]
    program.resume()
    assert program.command(["--y"]) == first  # it came to nothing
    begun.touch()
    for _ in range(2):
        program.resume()
        assert program.command(["--y"]) == [*first[:-1], "--resume", "--y"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--", "digits"], "the following arguments are required: --processes"),
        (["--processes", "0"], "`processes` must be at least 1, got processes=0"),
        (["--processes", "2", "--grace", "-1"], "`grace` must be at least 0, got grace=-1"),
        (["--processes", "2", "digits", "--steps", "3"], "unrecognized arguments: --steps"),
        (
            ["--processes", "3", "--devices-per-process", "2"],
            "3 processes with 2 GPUs each need 6, and there are 4",
        ),
    ],
)
def test_wrong_usage(arguments, message, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert launch.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("error: ") and message in captured.err


def test_gpus_are_dealt_out():
    environ = {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c"}
    each = launch.environments(3, None, environ)
    assert [one["CUDA_VISIBLE_DEVICES"] for one in each] == ["GPU-a", "GPU-b", "GPU-c"]
    assert launch.visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == []
    on_cpu = environ | {"JAX_PLATFORMS": "cpu"}
    (one,) = launch.environments(1, 4, on_cpu)
    assert one["JAX_NUM_CPU_DEVICES"] == "4"
