"""The cluster examples: their commands, run with stand-ins for what is not here.

`tests/processes/test_schedulers.py` runs the scripts under real schedulers.
"""

import contextlib
import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import sys

import pytest
import yaml

from train.run import cli


FOLDER = pathlib.Path(__file__).parents[1] / "examples" / "cluster"
pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="not in a checkout")
ROOT = FOLDER.parents[1]

# A stand-in for python that notes its command line and ends with a status.
PYTHON = """#!{python}
import json, os, sys
assert "SUBMITTER" not in os.environ, "a trainer without its devices and data"
with open({called!r}, "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
sys.exit(int(os.environ.get("STATUS", "0")))
"""
# Stand-ins that run the command behind their own options, as these programs do.
MPIRUN = '#!/bin/bash\nwhile [ "$1" != python ]; do shift; done\nexec "$@"\n'
SRUN = '#!/bin/bash\nwhile [[ "$1" == -* ]]; do shift; done\nexec "$@"\n'
RAY = """#!/bin/bash
case "$1" in
  symmetric-run) while [ "$1" != -- ]; do shift; done; shift; exec "$@";;
  job) shift 2; while [ "$1" != -- ]; do shift; done; shift; exec ray-submits "$@";;
esac
"""
# As the head of Ray runs what was submitted.
SUBMITS = """#!{python}
import os, shlex, subprocess, sys
del os.environ["SUBMITTER"]
sys.exit(subprocess.call(shlex.join(sys.argv[1:]), shell=True))
"""


@pytest.fixture
def here(tmp_path):
    """A bare environment with stand-ins, in a folder where a run can be."""
    called = str(tmp_path / "called")
    programs = {
        "python": PYTHON.format(python=sys.executable, called=called),
        "ray": RAY,
        "ray-submits": SUBMITS.format(python=sys.executable),
        "mpirun": MPIRUN,
        "srun": SRUN,
        "scontrol": f'#!/bin/bash\necho "$@" >> {called}.scontrol\necho localhost\n',
    }
    (tmp_path / "bin").mkdir()
    for name, text in programs.items():
        path = tmp_path / "bin" / name
        path.write_text(text)
        path.chmod(0o755)
    return tmp_path


SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "4", "SLURM_CPUS_PER_TASK": "32"}
SLURM |= {"SLURM_JOB_NODELIST": "localhost"}


def run(here, *command, **variables):
    """Runs a command in the bare environment, and returns the process."""
    path = os.pathsep.join([str(here / "bin"), "/usr/bin", "/bin"])
    variables = {"PATH": path, "HOME": str(here), "RUN": str(here / "run")} | variables
    return subprocess.run(
        list(map(str, command)),
        env=variables,
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=30,
    )


def called(here):
    """The command lines with which the trainer was called, without `-m train`."""
    lines = [json.loads(line) for line in (here / "called").read_text().splitlines()]
    assert all(line[:2] == ["-m", "train"] for line in lines)
    return [line[2:] for line in lines]


def script(here, name):
    """The command line of a script."""
    (here / "hosts").write_text("# hosts\nn1 slots=4\nn2\nn3\n")
    more = [here / "hosts", here / "run"] if name == "mpirun.sh" else []
    return [FOLDER / name, *more, "--data.dir", "/data"]


def manifest(here, name):
    """The command of a manifest as its operator runs it, with the paths of this machine."""
    text = (FOLDER / name).read_text()
    text = text.replace("/runs/", f"{here}/").replace("/lsgd_jax", str(ROOT))
    spec = yaml.safe_load(text)["spec"]
    if name == "jobset.yaml":
        container = pod(spec)["containers"][0]
        assert container["workingDir"] == str(ROOT)
        return [*container["command"], *container["args"]]
    # KubeRay's submitter pastes the entrypoint into a line of bash.
    entrypoint = spec["entrypoint"].strip()
    submit = f"ray job submit --address http://head:8265 --no-wait -- {entrypoint} ;"
    return ["bash", "-ce", "--", submit]


def pod(spec):
    """The pod of a JobSet."""
    return spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def command(here, name):
    return manifest(here, name) if name.endswith(".yaml") else script(here, name)


EXAMPLES = ["slurm.sh", "mpirun.sh", "jobset.yaml", "ray_slurm.sh", "ray_kubernetes.yaml"]


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_starts_a_run_and_resumes_it(name, here):
    """The command reaches the trainer whole, whichever shells it crosses."""
    line = command(here, name)
    given = {"SUBMITTER": "yes"} if name == "ray_kubernetes.yaml" else SLURM
    first = run(here, *line, **given)
    assert first.returncode == 0, first.stderr
    folder = pathlib.Path(called(here)[0][called(here)[0].index("--run-dir") + 1])
    (folder / "checkpoints" / "40").mkdir(parents=True)
    (folder / "config.json").touch()
    assert run(here, *line, **given).returncode == 0
    begun, resumed = called(here)
    assert resumed == [*begun, "--resume"]
    config = cli.parse(begun)
    nodes = 3 if name == "mpirun.sh" else 4
    assert config.name == "cifar10-cnn7" and config.data.dir == "/data"
    assert (config.workers.nodes, config.workers.locals) == (nodes, 4)
    assert config.method.global_pull == 0.1
    assert (config.method.local_period, config.method.global_period) == (64, 128)
    if "ray" in name:
        assert config.method.name == "async-lsgd" and config.ray.address == "auto"
        assert config.ray.gpus_per_worker * config.workers.locals == 4
    else:
        assert config.method.name == "lsgd"
        assert (config.distributed.coordinator is None) == (name == "slurm.sh")


@pytest.mark.parametrize(
    ("name", "status", "is_requeued"),
    [
        *[("slurm.sh", status, True) for status in (75, 134, 137, 143)],
        *[("slurm.sh", status, False) for status in (0, 1, 2, 70)],
        ("ray_slurm.sh", 75, True),
        ("ray_slurm.sh", 1, False),
    ],
)
def test_a_job_of_slurm_is_requeued_if_its_run_can_go_on(name, status, is_requeued, here):
    done = run(here, *script(here, name), **SLURM, STATUS=str(status))
    assert done.returncode == status, done.stderr
    asked = here / "called.scontrol"
    assert ("requeue 7" in asked.read_text() if asked.exists() else False) == is_requeued


def test_a_job_whose_ray_did_not_start_has_failed(here):
    (here / "bin" / "ray").write_text("#!/bin/bash\n")
    assert run(here, *script(here, "ray_slurm.sh"), **SLURM).returncode == 1


def test_a_restart_without_a_new_checkpoint_is_the_last_one(here):
    """Several processes call the script; only the first of them decides."""
    folder = here / "run"
    line = [FOLDER / "resume.sh", folder, "python", "-m", "train"]

    def start(checkpoint, status, **variables):
        if checkpoint is not None:
            (folder / "checkpoints" / str(checkpoint)).mkdir(parents=True, exist_ok=True)
            (folder / "config.json").touch()
        done = run(here, *line, **variables)
        assert done.returncode == status, done.stderr
        return done.stderr

    start(None, 0)
    start(None, 0)  # a restart, although none of the starts has come to a checkpoint
    start(4, 0)
    start(12, 0)
    (folder / "checkpoints" / "16.orbax-checkpoint-tmp").mkdir()
    start(12, 0, JOB_COMPLETION_INDEX="1")
    said = start(12, 2)
    assert said.startswith(f"error: the last restart of {folder} has written no checkpoint")
    assert "(the newest one: 12)" in said and said.count("\n") == 1
    start(16, 0)
    (here / "run.restarts").unlink()
    start(16, 0)


@pytest.mark.parametrize(
    ("times", "ends", "starts"),
    [(3, [70, "kill -9 $$", 75, 0], 4), (1, [70, 75, 0], 2), (3, [134, 2, 0], 2)],
)
def test_a_process_is_started_again_so_many_times(times, ends, starts, here):
    """Each start ends in its own way: with a status, or by a command."""
    (here / "bin" / "sleep").write_text("#!/bin/bash\n")
    (here / "bin" / "sleep").chmod(0o755)
    ways = " ".join(shlex.quote(x if isinstance(x, str) else f"exit {x}") for x in ends)
    program = f'ways=({ways}); echo >> starts; eval "${{ways[$(wc -l < starts) - 1]}}"'
    line = [FOLDER / "again.sh", str(times), "bash", "-c", f"cd {here}; {program}"]
    done = run(here, *line)
    assert (here / "starts").read_text().count("\n") == starts
    assert done.returncode == ends[starts - 1]
    assert done.stderr.count("started again") == starts - 1


def test_a_process_that_was_asked_to_stop_is_not_started_again(here):
    program = "trap 'sleep 0.1; exit 75' TERM; echo ready; while true; do sleep 0.01; done"
    line = [FOLDER / "again.sh", "3", "bash", "-c", program]
    options = {"stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    with subprocess.Popen(line, **options) as loop:
        try:
            assert loop.stdout.readline() == "ready\n"
            loop.terminate()
            assert loop.wait(30) == 75
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(loop.pid, signal.SIGKILL)


def test_the_jobset_names_its_own_pods():
    jobset = yaml.safe_load((FOLDER / "jobset.yaml").read_text())
    spec = jobset["spec"]
    (job,) = spec["replicatedJobs"]
    (container,) = pod(spec)["containers"]
    words = container["args"]
    distributed = cli.parse(words[3:]).distributed
    assert distributed.num_processes == job["template"]["spec"]["completions"]
    assert job["template"]["spec"]["parallelism"] == distributed.num_processes
    name, domain = jobset["metadata"]["name"], spec["network"]["subdomain"]
    port = container["ports"][0]["containerPort"]
    assert distributed.coordinator == f"{name}-{job['name']}-0-0.{domain}:{port}"


def test_the_jobset_starts_all_pods_again_except_after_wrong_usage():
    """The fields of JobSet and of Job on which the comment in the manifest relies."""
    spec = yaml.safe_load((FOLDER / "jobset.yaml").read_text())["spec"]
    assert spec["failurePolicy"]["maxRestarts"] > 0
    (rule,) = spec["failurePolicy"]["rules"]
    assert rule["action"] == "FailJobSet"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    assert (job["completionMode"], job["backoffLimit"]) == ("Indexed", 0)
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    codes = rule["onExitCodes"]
    assert (codes["operator"], codes["values"]) == ("In", [2])
    assert codes["containerName"] == pod(spec)["containers"][0]["name"]
    assert pod(spec)["restartPolicy"] == "Never"  # which podFailurePolicy needs


def test_the_ray_job_is_submitted_whole():
    """KubeRay's fields, and an entrypoint that no shell changes."""
    manifest = yaml.safe_load((FOLDER / "ray_kubernetes.yaml").read_text())
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayJob")
    spec = manifest["spec"]
    assert shlex.join(shlex.split(spec["entrypoint"])) == spec["entrypoint"].strip()
    assert spec["rayClusterSpec"]["authOptions"] == {"mode": "token"}
    assert spec["backoffLimit"] > 0 and spec["shutdownAfterJobFinishes"] is True
    head = spec["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]["containers"][0]
    assert {"name": "PYTHONPATH", "value": "/lsgd_jax"} in head["env"]


def test_the_page_on_clusters_names_known_options(capsys):
    """Covers options of the trainer; `train.launch` has its own tests."""
    page = (FOLDER.parents[1] / "docs" / "clusters.md").read_text()
    option = r"--(?:distributed|workers|method)[.][a-z-]+"
    with pytest.raises(SystemExit):
        cli.parse(["cifar10-cnn7", "--help"])
    named, known = (set(re.findall(option, x)) for x in (page, capsys.readouterr().out))
    assert len(named) >= 5 and named <= known
