"""python -m train.launch with small programs in place of the trainer."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from train.tools import launch


ROOT = pathlib.Path(__file__).parents[3]
LIMIT_S = 60

# Each program knows which process it is: the launcher's options come last.
HEAD = "import os, pathlib, signal, subprocess, sys, time\nme = int(sys.argv[-1])\n"


@pytest.fixture
def start(tmp_path):
    """Starts the launcher on a program; it is ended after the test."""
    launchers = []

    def start(program, *options, processes=3, arguments=()):
        (tmp_path / "program.py").write_text(HEAD + program)
        command = [sys.executable, "-m", "train.launch", "--module", "program"]
        command += ["--processes", str(processes), *options, "--", *arguments]
        environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
        environment.pop("JAX_NUM_CPU_DEVICES", None)
        launchers.append(
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=tmp_path,
                env=environment,
            )
        )
        return launchers[-1]

    yield start
    for launcher in launchers:
        launcher.kill()
        launcher.communicate()


def end(launcher):
    """(exit status, stdout, stderr), within a hard limit."""
    out, err = launcher.communicate(timeout=LIMIT_S)
    return launcher.returncode, out, err


def written(folder, count, name="pid-*"):
    """The numbers in files that the programs write, once there are so many."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        texts = [path.read_text() for path in folder.glob(name)]
        if len(texts) == count and all(texts):
            return list(map(int, texts))
        assert time.monotonic() < deadline, texts
        time.sleep(0.02)


def assert_gone(pids):
    """None of the processes is left, at the latest after a moment."""
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, [pid for pid in pids if is_running(pid)]
        time.sleep(0.05)


def is_running(pid):
    try:
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"  # a zombie has ended; its parent may be slow to notice


NOTE_PID = "pathlib.Path(f'pid-{me}').write_text(str(os.getpid()))\n"


def test_every_line_gets_its_prefix_and_its_stream(start):
    program = (
        "print('one'); print('two', end='', flush=True)\n"
        "time.sleep(0.2); print(' halves')\n"
        "print('not a line', end='', file=sys.stderr)"
    )
    status, out, err = end(start(program, processes=2))
    assert status == 0
    lines = out.splitlines()
    for i in range(2):
        assert [x for x in lines if x.startswith(f"[{i}]")] == [
            f"[{i}] one",
            f"[{i}] two halves",
        ]
    assert sorted(err.splitlines()) == ["[0] not a line", "[1] not a line"]


def test_the_processes_get_the_arguments_and_find_one_another(start):
    program = "print(sys.argv[1:], os.environ.get('JAX_NUM_CPU_DEVICES'))"
    launcher = start(
        program, "--devices-per-process", "3", arguments=["digits", "--seed=1"]
    )
    status, out, _ = end(launcher)
    assert status == 0
    coordinators = set()
    for line in sorted(out.splitlines()):
        arguments, _, devices = line[4:].rpartition(" ")
        assert devices == "3"
        given = eval(arguments)
        assert given[:2] == ["digits", "--seed=1"]
        options = dict(zip(given[2::2], given[3::2]))
        assert options["--distributed.num-processes"] == "3"
        assert options["--distributed.process-id"] == line[1]
        coordinators.add(options["--distributed.coordinator"])
    (coordinator,) = coordinators
    assert coordinator.startswith("127.0.0.1:")


@pytest.mark.parametrize(
    "ending, status, words",
    [
        ("sys.exit(7)", 7, "process 1 failed with status 7:"),
        ("raise OSError('the disk')", 1, "process 1 failed with status 1:"),
        ("os.kill(os.getpid(), 9)", 137, "process 1 was ended by SIGKILL:"),
    ],
)
def test_one_that_fails_ends_all(start, tmp_path, ending, status, words):
    """Also those that ignore SIGTERM, and what they have started themselves."""
    program = NOTE_PID + (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "sleep = [sys.executable, '-c', 'import time; time.sleep(600)']\n"
        "child = subprocess.Popen(sleep)\n"
        "pathlib.Path(f'pid-{me}-child').write_text(str(child.pid))\n"
        "while len(list(pathlib.Path().glob('pid-*'))) < 6: time.sleep(0.01)\n"
        "time.sleep(600) if me != 1 else None\n"
        "print('last words', file=sys.stderr)\n"
    )
    launcher = start(program + ending, "--grace", "1")
    got, _, err = end(launcher)
    assert got == status
    shown, _, repeated = err.partition(words)
    assert "[1] last words" in shown
    last = "OSError: the disk" if "OSError" in ending else "last words"
    assert repeated.splitlines()[1] == "last words" and repeated.endswith(f"{last}\n")
    assert_gone(written(tmp_path, 6))


def test_what_the_trainer_can_miss_does_not_end_the_others(start):
    """With --distributed.survive the first process decides."""
    program = (
        "if me == 2: os.kill(os.getpid(), 9)\n"
        "if me == 1: sys.exit(75)\n"
        "time.sleep(2)\n"
        "print('to the end')\n"
    )
    status, out, err = end(start(program, arguments=["--distributed.survive"]))
    assert status == 0 and out == "[0] to the end\n"
    fates = {"process 1 failed with status 75", "process 2 was ended by SIGKILL"}
    assert set(err.splitlines()) == fates


def test_if_the_first_process_fails_all_are_ended(start):
    program = "sys.exit(75) if me == 0 else time.sleep(600)"
    launcher = start(program, "--grace", "1", arguments=["--distributed.survive"])
    status, _, err = end(launcher)
    assert status == 75 and "process 0 failed with status 75:" in err


def test_a_run_that_lost_nodes_is_restarted_with_all_of_them(tmp_path):
    (tmp_path / "config.json").touch()
    command = ["digits", "--run-dir", str(tmp_path), "--distributed.survive"]
    for workers in ([], ["--workers.nodes", "3", "--workers.locals", "5"]):
        program = launch.Program("train", command + workers, restarts=True)
        program.go_on()
        resumed = program.command([])
        grid = workers or ["--workers.nodes", "2", "--workers.locals", "4"]
        assert resumed[-5:] == ["--resume", *grid]


def test_the_first_that_fails_counts(start):
    """Not one that fails because of it."""
    program = (
        "gone = pathlib.Path('gone')\n"
        "if me == 2: gone.touch(); time.sleep(1); sys.exit(70)\n"
        "while not gone.exists(): time.sleep(0.01)\n"
        "sys.exit(75)"
    )
    status, _, err = end(start(program))
    assert status == 70 and "process 2 failed with status 70" in err


@pytest.mark.parametrize(
    "number, received, status",
    [
        (signal.SIGINT, signal.SIGINT, 130),
        (signal.SIGTERM, signal.SIGTERM, 0),
        (signal.SIGHUP, signal.SIGTERM, 0),
    ],
)
def test_signals_are_passed_on(start, tmp_path, number, received, status):
    program = (
        "def note(number, _):\n"
        "    print('got', number, flush=True)\n"
        "    time.sleep(0.3 * me)\n"
        "    sys.exit(130 if number == 2 else 0)\n"
        "signal.signal(signal.SIGINT, note); signal.signal(signal.SIGTERM, note)\n"
        + NOTE_PID
        + "time.sleep(600)"
    )
    launcher = start(program, "--max-restarts", "3")
    pids = written(tmp_path, 3)
    launcher.send_signal(number)
    got, out, err = end(launcher)
    assert got == status and err == ""
    assert sorted(out.splitlines()) == [f"[{i}] got {int(received)}" for i in range(3)]
    assert_gone(pids)


def test_the_third_signal_kills(start, tmp_path):
    program = "for n in (2, 15): signal.signal(n, signal.SIG_IGN)\n" + NOTE_PID
    launcher = start(program + "time.sleep(600)")
    pids = written(tmp_path, 3)
    for _ in range(3):
        launcher.send_signal(signal.SIGINT)
        time.sleep(0.2)
    assert end(launcher)[0] == 128 + signal.SIGKILL
    assert_gone(pids)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children so")
def test_nobody_survives_the_launcher(start, tmp_path):
    program = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + NOTE_PID
    launcher = start(program + "time.sleep(600)")
    pids = written(tmp_path, 3)
    launcher.kill()
    assert_gone(pids)


def test_a_crash_is_followed_by_so_many_restarts(start):
    """Another port and the same command line, since the program is not the trainer."""
    program = (
        "print(sys.argv[1:3], flush=True)\n"
        "count = len(list(pathlib.Path().glob('try-*')))\n"
        "if me == 0 and count < 2:\n"
        "    pathlib.Path(f'try-{count}').touch()\n"
        "    os.kill(os.getpid(), signal.SIGSEGV if count else signal.SIGKILL)\n"
    )
    launcher = start(program, "--max-restarts", "2", processes=1, arguments=["x"])
    status, out, err = end(launcher)
    assert status == 0
    assert out == "[0] ['x', '--distributed.coordinator']\n" * 3
    assert [x for x in err.splitlines() if "process" in x or "restart" in x] == [
        "process 0 was ended by SIGKILL:",
        "restart 1 of 2",
        "process 0 was ended by SIGSEGV:",
        "restart 2 of 2",
    ]


def test_restarts_come_to_an_end(start):
    launcher = start("print(1); sys.exit(70)", "--max-restarts", "2", processes=1)
    status, out, err = end(launcher)
    assert status == 70 and out == "[0] 1\n" * 3
    assert err.rstrip().endswith("process 0 failed with status 70:")


@pytest.mark.parametrize("status", [1, 2, 130])
def test_what_was_meant_to_end_is_not_restarted(start, status):
    launcher = start(f"print(1); sys.exit({status})", "--max-restarts", "2", processes=1)
    got, out, err = end(launcher)
    assert got == status and out == "[0] 1\n" and "restart" not in err


def test_the_trainer_goes_on_from_its_checkpoint(tmp_path, monkeypatch):
    """It is given its folder from the start, and --resume as soon as it is there."""
    monkeypatch.chdir(tmp_path)
    program = launch.Program("train", ["digits", "--seed", "3"], restarts=True)
    first = program.command(["--x"])
    folder = pathlib.Path(first[first.index("--run-dir") + 1])
    assert first[4:8] == ["train", "digits", "--seed", "3"] and first[-1] == "--x"
    assert folder.parent == pathlib.Path("runs") and folder.name.startswith("digits-")
    program.go_on()
    assert program.command([]) == first[:-1]  # it came to nothing
    folder.mkdir(parents=True)
    (folder / "config.json").touch()
    for _ in range(2):
        program.go_on()
        assert program.command([]) == [*first[:-1], "--resume"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--", "digits"], "the following arguments are required: --processes"),
        (["--processes", "0"], "`processes` must be at least 1, got processes=0"),
        (["--processes", "2", "--grace", "-1"], "`grace` must be at least 0, got grace=-1"),
        (["--processes", "2", "digits", "--steps", "3"], "unrecognized arguments: --steps"),
        (
            ["--processes", "2", "--max-restarts", "1", "--", "digits", "--seed", "-1"],
            "`seed` must be in [0, 2**32), got seed=-1",
        ),
        (
            ["--processes", "3", "--devices-per-process", "2"],
            "3 processes with 2 GPUs each need 6, and there are 4",
        ),
    ],
)
def test_wrong_usage(arguments, message, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    try:
        status = launch.main(arguments)
    except SystemExit as stop:  # the trainer's own way
        status = stop.code
    assert status == 2
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
