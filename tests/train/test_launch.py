"""python -m train.launch with small programs in place of the trainer."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import types

import pytest
from outside import ROOT, python, until
from toys import slow

from train import launch
from train.process.exit_status import DELIBERATE
from train.process.messages import NOTHING_LOST


HEAD = "import os, pathlib, signal, sys, time\n"
TELL = f"pathlib.Path(os.environ['{launch.TOLD}']).write_text('[\"again\", \".\"]')\n"
KILL = "os.kill(os.getpid(), 9)"


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Writes a program that the launcher runs, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{tmp_path}")
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES", raising=False)
    return lambda text: (tmp_path / "program.py").write_text(HEAD + text)


@pytest.fixture
def run(program, capfd):
    """Launches a program in this process; (exit status, stdout, stderr)."""

    def run(text, *options, processes=1, arguments=()):
        program(text)
        count = ["--processes", str(processes)]
        status = launch.main([*count, *options, "--", *arguments], "program")
        return status, *capfd.readouterr()

    return run


def launched():
    """The launcher of one process, as a process of its own."""
    command = "from train.launch import main; raise SystemExit(main({}, 'program'))"
    command = command.format(["--processes", "1"])
    return subprocess.Popen([sys.executable, "-c", command], stdout=subprocess.PIPE)


def test_the_launcher_does_not_import_jax():
    """It must survive whatever happens to jax."""
    check = "import sys, train.launch; sys.exit('jax' in sys.modules)"
    python("-c", check).check_returncode()


def test_the_processes_get_the_arguments_and_options_to_meet(run):
    program = "print(sys.argv[1:], os.environ.get('JAX_NUM_CPU_DEVICES'))"
    devices = ("--devices-per-process", "3")
    status, out, _ = run(program, *devices, processes=2, arguments=["digits", "--seed=1"])
    assert status == 0
    coordinators = set()
    for line in sorted(out.splitlines()):
        arguments, devices = line[4:].rsplit(" ", 1)
        assert devices == "3"
        given = eval(arguments)
        assert given[:2] == ["digits", "--seed=1"]
        options = dict(option.split("=") for option in given[2:])
        assert options["--distributed.num-processes"] == "2"
        assert options["--distributed.process-id"] == line[1]
        coordinators.add(options["--distributed.coordinator"])
    (coordinator,) = coordinators
    assert coordinator.startswith("127.0.0.1:")


@pytest.mark.parametrize(
    ("ending", "status", "said"),
    [
        ("sys.exit(7)", 7, f"error: process 1 ended with status 7; {NOTHING_LOST}\n"),
        slow(TELL + KILL, 137, "error: process 1 was ended by SIGKILL; to resume: again\n"),
    ],
)
def test_a_process_that_fails_ends_all(run, ending, status, said):
    """Even those that ignore SIGTERM. One that failed because of it does not count."""
    program = (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "me = sys.argv[-1][-1]\n"
        "pathlib.Path(me).touch()\n"
        "while len(list(pathlib.Path().glob('[0-2]'))) < 3: time.sleep(0.01)\n"
        "if me == '0': sys.exit(75)\n"
        "if me == '2': time.sleep(600)\n"
        "print('why', file=sys.stderr, flush=True)\n"
    )
    found = run(program + ending, "--grace", "1", processes=3)
    assert found == (status, "[1] why\n", said)


@pytest.mark.parametrize(
    ("codes", "result"),
    [
        *[([0, status], (status, "")) for status in DELIBERATE],  # the run says it itself
        ([75, 70, -6], (70, "process 1 ended with status 70")),
        ([75, -6], (75, "process 0 ended with status 75")),
        ([70, 2, -9], (137, "process 2 was ended by SIGKILL")),
    ],
)
def test_the_process_that_failed_is_named(codes, result):
    assert launch.wait(ended(codes), 0) == result


@pytest.mark.parametrize(
    ("codes", "result"),
    [
        ([75, 75], (75, "")),
        ([0, 0], (0, "")),  # it had reached its last step
        ([75, -9], (137, "process 1 was ended by SIGKILL")),
    ],
)
def test_a_run_that_was_saved_after_a_signal_has_not_failed(codes, result):
    assert launch.wait(ended(codes), 0, [signal.SIGTERM]) == result


def ended(codes):
    """Processes that have ended with these codes; None: one that runs."""
    done = dict.fromkeys(("kill", "wait"), lambda: 0)
    processes = [types.SimpleNamespace(returncode=code, **done) for code in codes]
    for process in processes:
        process.poll = lambda process=process: process.returncode
    return processes


def test_a_process_that_fails_is_started_again(run, monkeypatch):
    """It gets the same command line. The others go on; the run ends with process 0."""
    monkeypatch.setattr(launch, "AGAIN_S", 0.01)
    program = (
        "me = sys.argv[-1][-1]\n"
        "starts = len(list(pathlib.Path().glob(me + '.*')))\n"
        "pathlib.Path(f'{me}.{starts}').write_text(str(sys.argv[1:]))\n"
        "if me == '1' and starts == 0: os.kill(os.getpid(), 9)\n"
        "if me == '1' and starts == 1: sys.exit(70)\n"
        "if me == '1': pathlib.Path('done').touch()\n"
        "if me == '2': time.sleep(600)\n"
        "while not all(map(os.path.exists, ('done', '2.0'))): time.sleep(0.01)\n"
    )
    options = ("--restart", "3", "--grace", "0")
    found = run(program, *options, processes=3, arguments=["digits"])
    lines = (
        "process 1 was ended by SIGKILL; started again (1 of 3)\n"
        "process 1 ended with status 70; started again (2 of 3)\n"
    )
    assert found == (0, "", lines)
    files = {path.name: path.read_text() for path in pathlib.Path().glob("[0-2].*")}
    assert files.keys() == {"0.0", "1.0", "1.1", "1.2", "2.0"}
    assert files["1.0"] == files["1.1"] == files["1.2"] and "digits" in files["1.0"]


def test_processes_are_started_again_so_many_times_in_all(capsys, monkeypatch):
    monkeypatch.setattr(launch, "AGAIN_S", 0.0)
    processes = ended([None, 70, 0, -15])
    restarts = launch.Restarts(processes, lambda number: ended([75])[0], most=2)
    for _ in range(3):
        restarts.look()
    assert capsys.readouterr().err.splitlines() == [
        "process 1 ended with status 70; started again (1 of 2)",
        "process 3 was ended by SIGTERM; started again (2 of 2)",
        "process 1 ended with status 75; the others go on without it",
        "process 3 ended with status 75; the others go on without it",
    ]


@pytest.mark.parametrize(
    ("codes", "passed", "result"),
    [
        ([0, -9], [], (0, "")),
        ([-9, 70], [], (137, "process 0 was ended by SIGKILL")),
        ([75, -9], [], (137, "process 1 was ended by SIGKILL")),  # too few are left
        ([75, -9], [signal.SIGTERM], (75, "")),
        ([None, 2], [], (2, "")),  # wrong usage
    ],
)
def test_a_run_that_restarts_processes_ends_with_the_first(codes, passed, result):
    processes = ended(codes)
    restarts = launch.Restarts(processes, start=None, most=3)
    assert launch.wait_for_first(processes, restarts, 0, passed) == result


def test_nothing_resumes_a_folder_that_is_gone(tmp_path):
    told = json.dumps(["again", str(tmp_path / "config.json")])
    assert launch.how_to_continue(told).startswith(f"{tmp_path} is gone (deleted, moved")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
def test_signals_are_passed_on(program, tmp_path, number, status):
    program(
        "def stop(number, _):\n"
        "    pathlib.Path('saved').write_text(str(number))\n"
        f"    sys.exit({status})\n"
        "for n in (2, 15): signal.signal(n, stop)\n"
        "print('ready', flush=True); time.sleep(600)\n"
    )
    with launched() as launcher:
        launcher.stdout.readline()
        launcher.send_signal(number)
        assert launcher.wait(60) == status
    assert (tmp_path / "saved").read_text() == str(int(number))


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_ignored_signals_stay_ignored(program, number):
    """nohup ignores SIGHUP, and a script's background job ignores SIGINT."""
    program("print('ready', flush=True); time.sleep(0.3); sys.exit(5)")
    before = signal.signal(number, signal.SIG_IGN)
    try:
        launcher = launched()
    finally:
        signal.signal(number, before)
    with launcher:
        launcher.stdout.readline()
        launcher.send_signal(number)
        assert launcher.wait(60) == 5


def state(pid):
    """The state of a process: R, S, T (stopped), Z, ..."""
    stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ctrl_z_pauses_the_processes_too(program):
    program("print(os.getpid(), flush=True); time.sleep(0.5)")
    with launched() as launcher:
        pids = launcher.pid, int(launcher.stdout.readline().split()[1])
        launcher.send_signal(signal.SIGTSTP)
        try:
            until(lambda: [state(pid) for pid in pids] == ["T", "T"], seconds=20)
        finally:
            launcher.send_signal(signal.SIGCONT)  # one that is stopped would never end
        assert launcher.wait(60) == 0


def test_without_a_reader_the_run_goes_on(program, tmp_path):
    program(
        "for i in range(9): print(i, flush=True); time.sleep(0.02)\n"
        "pathlib.Path('done').touch()\n"
    )
    with launched() as launcher:
        launcher.stdout.readline()
        launcher.stdout.close()
        assert launcher.wait(60) == 0
    assert (tmp_path / "done").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends children so")
def test_no_process_survives_the_launcher(program):
    program("print(os.getpid(), flush=True); time.sleep(600)")
    with launched() as launcher:
        pid = launcher.stdout.readline().split()[1].decode()
        launcher.kill()
    stat = pathlib.Path(f"/proc/{pid}/stat")
    until(lambda: not stat.exists() or state(pid) in "ZX", seconds=20)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--", "digits"], "the following arguments are required: --processes"),
        (["--processes", "0"], "`processes` must be at least 1, got processes=0"),
        (["--processes", "2", "--grace", "-1"], "`grace` must be at least 0, got grace=-1"),
        (["--processes", "2", "--restart", "-1"], "`restart` must be at least 0"),
        (["--processes", "2", "digits", "--steps", "3"], "unrecognized arguments: --steps"),
        (
            ["--processes", "3", "--devices-per-process", "2"],
            "3 processes with 2 GPUs each need 6, and there are 4",
        ),
    ],
)
def test_wrong_usage(arguments, message, refusal, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    assert message in refusal(launch.main, arguments)


def test_each_process_gets_gpus_of_its_own():
    environ = {"CUDA_VISIBLE_DEVICES": "GPU-a,GPU-b,GPU-c"}
    each = launch.environments(3, None, environ)
    assert [one["CUDA_VISIBLE_DEVICES"] for one in each] == ["GPU-a", "GPU-b", "GPU-c"]
    assert launch.visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == []
    on_cpu = environ | {"JAX_PLATFORMS": "cpu"}
    (one,) = launch.environments(1, 4, on_cpu)
    assert one["JAX_NUM_CPU_DEVICES"] == "4"
