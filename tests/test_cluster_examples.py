"""The cluster examples use options that the program knows."""

import pathlib
import re
import shlex
import subprocess

import pytest

from train.run import cli


FOLDER = pathlib.Path(__file__).parents[1] / "examples" / "cluster"
pytestmark = pytest.mark.skipif(not FOLDER.exists(), reason="not in a checkout")


def commands(name):
    """Returns the arguments of every `python -m train` in a file, with variables set."""
    lines = (FOLDER / name).read_text().splitlines()
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    text = re.sub(r" &$", "", text, flags=re.MULTILINE)
    text = re.sub(r"\$\(.*?\)|\"\$\{\w+\[@\]\}\"", "", text.replace("\\\n", " "))
    text = re.sub(r'"\$hosts"', "3", text)
    text = re.sub(r"\$(\w+)", r"\1", text)
    text = re.sub(r"\n +(?=--)", " ", text)  # YAML folds its lines
    return [shlex.split(found) for found in re.findall(r"python -m train (.*)", text)]


@pytest.mark.parametrize(
    "name, nodes", [("slurm.sh", 4), ("mpirun.sh", 3), ("jobset.yaml", 4)]
)
def test_the_options_are_known(name, nodes):
    (command,) = commands(name)
    config = cli.parse(command)
    assert config.name == "cifar10-cnn7"
    assert (config.workers.nodes, config.workers.locals) == (nodes, 4)
    assert config.method.name == "lsgd" and config.method.global_pull == 0.1
    assert (config.method.local_period, config.method.global_period) == (64, 128)
    explicit = name != "slurm.sh"
    assert (config.distributed.coordinator is not None) == explicit


@pytest.mark.parametrize("name", ["ray_slurm.sh", "ray_kubernetes.yaml"])
def test_the_options_for_ray_are_known(name):
    (command,) = commands(name)
    config = cli.parse(command)
    assert (config.workers.nodes, config.workers.locals) == (4, 4)
    assert config.method.name == "async-lsgd" and config.ray.address == "auto"
    assert config.ray.gpus_per_worker * config.workers.locals == 4


def test_the_manifest_names_its_own_pods():
    text = (FOLDER / "jobset.yaml").read_text()
    (command,) = commands("jobset.yaml")
    distributed = cli.parse(command).distributed
    pods = re.search(r"completions: (\d+)", text)[1]
    assert distributed.num_processes == int(pods)
    job = re.search(r"kind: JobSet\nmetadata:\n  name: (\w+)", text)[1]
    replicated = re.search(r"replicatedJobs:\n    - name: (\w+)", text)[1]
    domain = re.search(r"subdomain: (\w+)", text)[1]
    port = re.search(r"containerPort: (\d+)", text)[1]
    assert distributed.coordinator == f"{job}-{replicated}-0-0.{domain}:{port}"


@pytest.mark.parametrize("name", ["slurm.sh", "mpirun.sh", "ray_slurm.sh"])
def test_scripts_are_valid_bash(name):
    subprocess.run(["bash", "-n", FOLDER / name], check=True, timeout=10)


def test_the_page_on_clusters_names_known_options(capsys):
    """Covers options of the trainer; `train.launch` has its own tests."""
    page = (FOLDER.parents[1] / "docs" / "clusters.md").read_text()
    option = r"--(?:distributed|workers|method)[.][a-z-]+"
    with pytest.raises(SystemExit):
        cli.parse(["cifar10-cnn7", "--help"])
    named, known = (set(re.findall(option, x)) for x in (page, capsys.readouterr().out))
    assert len(named) >= 5 and named <= known
