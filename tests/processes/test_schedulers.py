"""The files of examples/cluster under real schedulers, each of which is skipped if missing.

Slurm, Open MPI and Ray run on hosts of this machine, see `tests/hosts.py`.
"""

import os
import shutil
import signal
import subprocess
import sys
import time

import hosts
import psutil
import pytest
from hosts import Hosts
from outside import ROOT
from slurm import Slurm
from trainers import (
    SLOWLY,
    SMALL,
    TINY,
    assert_equal_to_the_bit,
    checkpoints,
    environment,
    events,
    numbers,
    reported,
)

from train.process.exit_status import RESUME


pytestmark = pytest.mark.slow

EXAMPLES = ROOT / "examples" / "cluster"
HASTY = ["--distributed.heartbeat-timeout", "10"]
OPTIONS = [*SMALL[5:], *HASTY]  # without the experiment and the workers
SETTINGS = {"EXPERIMENT": "digits", "LOCALS": "2"}

# Code that process 1 runs first, to end with an error at its step 3, before a checkpoint.
FAILS = (
    "import itertools, os; from train.cluster.signals import StopSignals as S; "
    "asked = S.asked; n = itertools.count(1); "
    "S.asked = lambda self: 1 / (next(n) < 3 or self._session.process_id == 0) "
    "and asked(self); "
)


def variables(cache, before=SLOWLY, **more):
    """The variables of a trainer, whose Python comes first on the path."""
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    return environment(cache, TINY + before, PATH=path, **SETTINGS, **more)


@pytest.fixture
def slurm(tmp_path):
    hosts.need("slurmctld", "slurmd", "munged", "srun")
    folder = tmp_path / "slurm"
    folder.mkdir()
    with Slurm(folder, 2) as cluster:
        yield cluster


@pytest.fixture
def submit(slurm, tmp_path, cache):
    """Submits examples/cluster/slurm.sh for two nodes with a task each."""

    def submit(*options, before=SLOWLY):
        out = f"--output={tmp_path}/job.txt"
        layout = ["--nodes=2", "--ntasks-per-node=1", "--time=10"]
        given = variables(cache, before, RUN=str(tmp_path / "run"))
        batch = ["sbatch", "--parsable", *layout, out, EXAMPLES / "slurm.sh"]
        return slurm.ask(
            *batch, *OPTIONS, *options, cwd=ROOT, env=slurm.environment(**given)
        ).strip()

    return submit


def test_slurm_resumes_after_sigterm_and_a_lost_node(slurm, submit, undisturbed, tmp_path):
    """The run ends bit-identical to an undisturbed one."""
    run, printed = tmp_path / "run", tmp_path / "job.txt"
    job = submit("--steps", "60")
    slurm.until(lambda: reported(run) >= 8, 120)
    slurm.ask("scancel", "--signal=TERM", job)
    slurm.until(lambda: "stopped at step" in printed.read_text())
    saved = max(checkpoints(run))
    slurm.until(lambda: reported(run) >= saved + 8, 120)
    assert slurm.job(job)["Restarts"] == "1"
    slurm.kill("n2")
    slurm.until(lambda: slurm.job(job)["Restarts"] == "2", 120)
    slurm.boot("n2")
    slurm.until(lambda: slurm.job(job)["JobState"] == "COMPLETED", 180)
    assert_equal_to_the_bit(numbers(run, 60), undisturbed(60))
    # Slurm may stop the run once more, long after the loss of the node.
    begins = [event["step"] for event in events(run, "start")]
    assert begins[:2] == [0, saved] and len(begins) >= 3


def test_slurm_starts_a_run_with_a_program_error_only_once_again(slurm, submit, tmp_path):
    run, printed = tmp_path / "run", tmp_path / "job.txt"
    job = submit("--steps", "120", before=FAILS)
    slurm.until(lambda: slurm.job(job)["JobState"] == "FAILED", 180)
    assert slurm.job(job)["ExitCode"] == "2:0"
    assert slurm.job(job)["Restarts"] == "2"
    assert printed.read_text().count("ZeroDivisionError: division by zero)") == 2
    last = printed.read_text().splitlines()[-1]
    assert last.startswith(f"error: the last restart of {run} has written no checkpoint (")
    assert len(events(run, "start")) == 2


def test_two_steps_in_an_allocation_are_two_runs(slurm, tmp_path, cache):
    command = [sys.executable, "-m", "train", *SMALL, "--steps", "60"]
    line = f"srun --overlap -N2 -n2 --output=%s {' '.join(command)} --run-dir %s & "
    names = [tmp_path / "a", tmp_path / "b"]
    script = "".join(line % (f"{name}.txt", name) for name in names)
    given = slurm.environment(**variables(cache))
    both = f"{script} wait -n && wait -n"
    slurm.ask("salloc", "-N2", "bash", "-c", both, env=given, cwd=ROOT, timeout=180)
    for name in names:
        assert reported(name) == 60
        assert [event["processes"] for event in events(name, "start")] == [2]


def test_slurm_takes_a_lost_process_back_into_its_step(slurm, tmp_path, cache):
    """The other task goes on. SIGTERM reaches both processes through again.sh."""
    run = tmp_path / "run"
    printed = tmp_path / "printed.txt"
    options = "--workers.nodes 2 --workers.locals 1 --min-workers 1".split()
    options += "--method local-sgd --method.period 6 --method.delay 3".split()
    options += [*SMALL[-6:], *HASTY, "--steps", "1000000"]  # how often it reports, saves
    resume = [EXAMPLES / "resume.sh", run, sys.executable, "-m", "train", "digits"]
    loop = [EXAMPLES / "again.sh", "2", *resume, *options]
    step = ["srun", "--no-kill", "--kill-on-bad-exit=0", "-N2", "-n2", *loop]
    with open(printed, "w") as out:
        both = {"stdout": out, "stderr": out, "cwd": ROOT}
        env = slurm.environment(**variables(cache))
        srun = slurm.start(slurm.names[0], *step, env=env, **both)
        until(lambda: reported(run) >= 8, printed)
        trainer_of(slurm, "1").kill()
        until(lambda: "process 1 came in at step" in printed.read_text(), printed)
        slurm.ask("scancel", "--signal=TERM", slurm.ask("squeue", "-h", "-o", "%i").strip())
        assert srun.wait(120) == RESUME, printed.read_text()
    assert printed.read_text().count("started again") == 1
    assert max(checkpoints(run)) == max(checkpoints(run / "process-1"))


def trainer_of(slurm, number):
    """The process of the trainer in a task of Slurm."""
    for pid in sum(map(slurm.processes, slurm.names), []):
        process = psutil.Process(pid)
        if process.environ().get("SLURM_PROCID") == number:
            if process.cmdline()[1:3] == ["-m", "train"]:
                return process
    raise AssertionError(f"no trainer in task {number}")


# Open MPI


@pytest.fixture
def mpirun(tmp_path, cache):
    """Starts examples/cluster/mpirun.sh for two hosts."""
    hosts.need("mpirun")
    with Hosts(tmp_path, 2) as cluster:
        file = tmp_path / "hostfile"
        file.write_text("n1 slots=1\nn2 slots=1\n")
        given = {"OMPI_MCA_plm_rsh_agent": str(cluster.shell(tmp_path / "shell"))}
        given |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}

        def mpirun(*options, before=SLOWLY):
            command = [EXAMPLES / "mpirun.sh", file, tmp_path / "run", *OPTIONS]
            with open(tmp_path / "printed.txt", "w") as printed:
                out = {"stdout": printed, "stderr": printed, "cwd": ROOT}
                env = variables(cache, before, **given)
                return cluster.start("n1", *command, *options, env=env, **out)

        yield mpirun


def test_mpirun_saves_after_sigterm_and_resumes(mpirun, undisturbed, tmp_path):
    run, printed = tmp_path / "run", tmp_path / "printed.txt"
    started = mpirun("--steps", "60")
    until(lambda: reported(run) >= 8, printed)
    started.send_signal(signal.SIGTERM)
    assert started.wait(120) == RESUME, printed.read_text()
    assert "stopped at step" in printed.read_text()
    saved = max(checkpoints(run))
    assert mpirun("--steps", "60", before="").wait(240) == 0, printed.read_text()
    assert_equal_to_the_bit(numbers(run, 60), undisturbed(60))
    assert [event["step"] for event in events(run, "start")] == [0, saved]


# Ray


def test_ray_goes_on_after_the_loss_of_a_host_and_saves_after_sigterm(
    tmp_path, cache, undisturbed
):
    """Two processes in lock step on three hosts, which share a token."""
    run, printed = tmp_path / "run", tmp_path / "printed.txt"
    env = variables(cache, HOME=str(tmp_path), RAY_AUTH_MODE="token")
    env |= {"RAY_USAGE_STATS_ENABLED": "0", "JAX_NUM_CPU_DEVICES": "2"}
    # A lost host is noticed after 5 s in place of 15 s.
    env["RAY_health_check_period_ms"] = "1000"
    hosts.need("ray")
    quiet = {"env": env, "cwd": ROOT, "stdout": subprocess.DEVNULL}
    subprocess.run(["ray", "get-auth-token", "--generate"], check=True, **quiet)
    with Hosts(tmp_path, 3) as cluster:
        head = f"{cluster.address('n1')}:6379"
        for name in cluster.names:
            role = ["--head", "--port=6379", "--include-dashboard=false"]
            role = role if name == "n1" else [f"--address={head}"]
            own = f"--node-ip-address={cluster.address(name)}"
            small = ["--num-cpus=1", "--object-store-memory=200000000"]
            cluster.run(name, "ray", "start", *role, own, *small, env=env, timeout=120)
        options = ["--ray.address", head, "--ray.processes=2", "--run-dir", run]
        line = [sys.executable, "-m", "train", *SMALL, *options, "--steps", "1000000"]
        with open(printed, "w") as out:
            both = {"stdout": out, "stderr": out, "cwd": ROOT, "env": env}
            driver = cluster.start("n1", *line, *HASTY, **both)
        until(lambda: checkpoints(run), printed, 240)
        lost = next(name for name in ("n2", "n3") if trains(cluster, name))
        cluster.kill(lost)
        until(lambda: len(events(run, "start")) == 2, printed, 240)
        begun = events(run, "start")[-1]["step"]
        until(lambda: reported(run) >= begun + 8, printed)
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(120) == RESUME, printed.read_text()
    last = max(checkpoints(run))
    assert begun >= 4 and f"stopped at step {last} after" in printed.read_text()
    assert_equal_to_the_bit(numbers(run, last), undisturbed(last))


def trains(cluster, host):
    """Whether a process of a run is on a host."""
    each = [psutil.Process(number).cmdline() for number in cluster.processes(host)]
    return any("--distributed.process-id" in word for line in each for word in line)


# torchrun


def test_two_processes_of_torchrun_train_one_run(cache, undisturbed, tmp_path):
    """They are asked to stop by torchrun, and resumed by it."""
    torchrun = shutil.which("torchrun")
    if torchrun is None:
        pytest.skip("torchrun is not installed")
    run = tmp_path / "run"
    launcher = [torchrun, "--standalone", "--nproc-per-node=2", "--no-python"]
    command = [*launcher, sys.executable, "-m", "train", *SMALL, "--run-dir", run]
    command = [*map(str, command), "--steps", "60"]
    printed = tmp_path / "printed.txt"
    with open(printed, "w") as out:
        both = {"stdout": out, "stderr": out, "cwd": ROOT}
        first = subprocess.Popen(command, env=variables(cache), **both)
        until(lambda: reported(run) >= 8, printed)
        first.send_signal(signal.SIGTERM)
        first.wait(120)
        assert "stopped at step" in printed.read_text()
        saved = max(checkpoints(run))
        env = variables(cache, before="")
        again = subprocess.run([*command, "--resume"], env=env, timeout=240, **both)
    assert again.returncode == 0, printed.read_text()
    assert_equal_to_the_bit(numbers(run, 60), undisturbed(60))
    starts = [(event["step"], event["processes"]) for event in events(run, "start")]
    assert starts == [(0, 2), (saved, 2)]


def until(holds, printed, seconds=120):
    """Waits for a condition."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, printed.read_text()
        time.sleep(0.1)
