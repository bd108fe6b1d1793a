"""Detection of the cluster that started a process."""

import dataclasses

import pytest

from configs.digits import CONFIG
from train.cluster import detection
from train.cluster.detection import detect
from train.cluster.started import Started
from train.config import DistributedConfig


SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_NTASKS": "8",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
IN_A_BATCH_SCRIPT = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}
OPEN_MPI_4 = OPEN_MPI | {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.0.0.1:34911"}
BY_OPEN_MPI_4 = Started("Open MPI 4", {"num_processes": 8, "process_id": 5}, 1, 4)
ONE_HOST = {"OMPI_COMM_WORLD_LOCAL_SIZE": "8", "PMIX_NAMESPACE": "prterun-n1-77@1"}
MPICH = {"PMI_SIZE": "4", "PMI_RANK": "3"}
PMIX = {"PMIX_RANK": "1", "PMIX_NAMESPACE": "prterun-n1-77@1"}
FLUX = {"FLUX_JOB_SIZE": "4", "FLUX_TASK_RANK": "3", "FLUX_TASK_LOCAL_ID": "1"}
JSRUN = {"JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_RANK": "3"}
MVAPICH2 = {"MV2_COMM_WORLD_SIZE": "4", "MV2_COMM_WORLD_RANK": "3"}
PYTORCH_JOB = {"WORLD_SIZE": "4", "RANK": "3", "MASTER_ADDR": "n1", "MASTER_PORT": "5000"}
TORCHRUN = PYTORCH_JOB | {
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "TORCHELASTIC_RUN_ID": "none",
}
DEEPSPEED = PYTORCH_JOB | {"LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
JAX_JOB = {"NUM_PROCESSES": "4", "PROCESS_ID": "3", "COORDINATOR_PORT": "5000"}
JAX_JOB |= {"COORDINATOR_ADDRESS": "n1"}
PET = {"PET_NNODES": "4", "PET_NODE_RANK": "3", "PET_MASTER_ADDR": "n1"}
PET |= {"PET_NPROC_PER_NODE": "8", "PET_MASTER_PORT": "5000"}
TRAIN_JOB = {"JAX_COORDINATOR_ADDRESS": "n1:5000"}
TRAIN_JOB |= {"JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "3"}
TF_CONFIG = '{"task": {"type": "%s", "index": %d}, "cluster": {"worker": %s}}'
VERTEX = (
    '{"cluster": {"workerpool1": ["n2:2222", "n3:2222", "n4:2222"], "workerpool0": '
    '["n1:5000"]}, "task": {"type": "workerpool1", "index": 2}}'
)
CHIEF = (
    '{"cluster": {"worker": ["n2:2222", "n3:2222"], "chief": ["n1:5000"]}, '
    '"task": {"type": "chief", "index": 0}}'
)
SAGEMAKER = {"SM_HOSTS": '["n2", "n1"]', "SM_CURRENT_HOST": "n2"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3"}
HAND = {"coordinator": "n1:5000", "num_processes": 4, "process_id": 3}
ADDRESS = {"JAX_COORDINATOR_ADDRESS": "n1:5000"}


@pytest.fixture(autouse=True)
def plain_host(monkeypatch):
    """No TPU, and none of the optional packages."""
    monkeypatch.setattr(detection, "_has_tpu", lambda: False)
    monkeypatch.setattr(detection, "is_installed", lambda name: False)


@pytest.mark.parametrize(
    "environ, started",
    [
        ({}, None),
        (IN_A_BATCH_SCRIPT, None),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1"}, None),  # srun --ntasks 1 in a larger job
        (OPEN_MPI | {"OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"PMI_SIZE": "1", "PMI_RANK": "0"}, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),  # a pod of no indexed Job
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, None),
        (ADDRESS | {"JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, None),
        (TORCHRUN | {"WORLD_SIZE": "1"}, None),
        (PMIX | {"OMPI_COMM_WORLD_SIZE": "1"}, None),
        ({"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"}, None),
        ({"TF_CONFIG": TF_CONFIG % ("worker", 0, '["a:1"]')}, None),
        (OPEN_MPI_4, BY_OPEN_MPI_4),
        (OPEN_MPI_4 | SLURM, BY_OPEN_MPI_4),
        ({"TPU_WORKER_HOSTNAMES": "n1,n2"}, Started("Cloud TPU", {})),
        ({"TPU_PROCESS_ADDRESSES": "n1:1,n2:1"} | POD, Started("Cloud TPU", {})),
        ({"MEGASCALE_NUM_SLICES": "2"}, Started("Cloud TPU", {})),
    ],
)
def test_jax_detects_the_missing_arguments(environ, started):
    """None: the process is alone."""
    assert detect(DistributedConfig(), environ) == started
    assert detect(DistributedConfig(cluster="none"), environ) is None


@pytest.mark.parametrize(
    "environ, arguments, local",
    [
        (SLURM, ("n1:", 8, 5), (1, 4)),
        (SLURM | {"SLURM_STEP_TASKS_PER_NODE": "5,3"}, ("n1:", 8, 5), (1, 3)),
        (SLURM | MPICH | PMIX, ("n1:", 8, 5), (1, 4)),  # srun --mpi=pmi2 or pmix
        (TORCHRUN, ("n1:", 4, 3), (1, 2)),
        (TORCHRUN | SLURM | OPEN_MPI, ("n1:", 4, 3), (1, 2)),  # srun torchrun
        (DEEPSPEED, ("n1:5000", 4, 3), (1, 2)),
        (PYTORCH_JOB, ("n1:5000", 4, 3), (None, None)),
        (JAX_JOB, ("n1:5000", 4, 3), (None, None)),
        (TRAIN_JOB, ("n1:5000", 4, 3), (None, None)),
        (PET, ("n1:5000", 4, 3), (None, None)),
        ({"CLUSTER_SPEC": VERTEX}, ("n1:5000", 4, 3), (None, None)),
        ({"TF_CONFIG": CHIEF}, ("n1:5000", 3, 0), (None, None)),
        (SAGEMAKER, ("n1:8476", 2, 1), (None, None)),
        (SAGEMAKER | TORCHRUN, ("n1:", 4, 3), (1, 2)),
    ],
)
def test_a_launcher_says_how_to_meet(environ, arguments, local):
    """An address without a port has one that is derived."""
    found = detect(DistributedConfig(), environ)
    host, port = found.arguments["coordinator_address"].split(":")
    address, count, rank = arguments
    assert f"{host}:{port}" == address or (f"{host}:" == address and int(port) >= 61440)
    assert (found.arguments["num_processes"], found.arguments["process_id"]) == (
        count,
        rank,
    )
    assert found.arguments["cluster_detection_method"] == "deactivate"
    assert (found.local_rank, found.local_size) == local


def test_every_step_of_an_allocation_has_a_port_of_its_own():
    """A second srun in a job must not join the processes of the first."""
    of = lambda **variables: detect(DistributedConfig(), SLURM | variables).arguments
    address = of(SLURM_STEP_ID="0")["coordinator_address"]
    assert of(SLURM_STEP_ID="0", SLURM_PROCID="0")["coordinator_address"] == address
    assert of(SLURM_STEP_ID="1")["coordinator_address"] != address
    assert of(SLURM_STEP_ID="0", SLURM_JOB_ID="8")["coordinator_address"] != address


@pytest.mark.parametrize(
    "options, environ, arguments",
    [
        (HAND, {}, ("n1:5000", 4, 3)),
        (HAND, SLURM, ("n1:5000", 4, 3)),
        ({"num_processes": 4, "process_id": 3}, ADDRESS, ("n1:5000", 4, 3)),
        ({"coordinator": "n1:5000"}, OPEN_MPI, ("n1:5000", 8, 5)),
        ({}, OPEN_MPI | ADDRESS, ("n1:5000", 8, 5)),
        ({"coordinator": "n1:5000"}, MPICH, ("n1:5000", 4, 3)),
        ({"coordinator": "n1:5000", "num_processes": 9}, POD, ("n1:5000", 9, 3)),
    ],
)
def test_options_take_precedence_over_the_environment(options, environ, arguments):
    found = detect(DistributedConfig(**options), environ).arguments
    names = ("coordinator_address", "num_processes", "process_id")
    assert tuple(found[name] for name in names) == arguments
    assert found["cluster_detection_method"] == "deactivate"


def test_open_mpi_5_on_one_host_needs_no_address():
    """Every rank computes the same port, and every job another one."""
    of = lambda **others: (
        detect(DistributedConfig(), OPEN_MPI | ONE_HOST | others).arguments
    )
    address = of()["coordinator_address"]
    assert address.startswith("127.0.0.1:") and 61440 <= int(address[10:]) < 65536
    assert of(OMPI_COMM_WORLD_RANK="0")["coordinator_address"] == address
    assert of(PMIX_NAMESPACE="prterun-n1-78@1")["coordinator_address"] != address


@pytest.mark.parametrize(
    "options, environ, message",
    [
        ({}, OPEN_MPI, "by MPI as one of several, .*: add --distributed.coordinator, or"),
        ({}, OPEN_MPI, "or install mpi4py and add --distributed.cluster mpi4py; "),
        ({}, MPICH, "add --distributed.coordinator, or install mpi4py"),
        (
            {},
            POD,
            "by a Kubernetes Job .* add --distributed.coordinator and "
            "--distributed.num-processes, or install the package kubernetes",
        ),
        (
            {"coordinator": "n1:5000"},
            {},
            "by hand .*: add --distributed.num-processes and --distributed.process-id; ",
        ),
        ({"process_id": 0}, {}, "`--distributed.cluster none` trains in this process by"),
        (
            {},
            ADDRESS,
            r"hand \(JAX_COORDINATOR_ADDRESS is set\) .* add --distributed.num-pro",
        ),
        ({}, FLUX, "by Flux as one of several, .*: add --distributed.coordinator; "),
        ({}, JSRUN, "by jsrun as one of several, .*: add --distributed.coordinator; "),
        (
            {},
            MVAPICH2,
            "by MVAPICH2 as one of several, .*: add --distributed.coordinator; ",
        ),
        ({}, PMIX, "by PMIx .*: add --distributed.coordinator and --distributed.num-proce"),
        ({}, {"WORLD_SIZE": "4", "RANK": "3"}, "by torchrun or a launcher like it as one"),
        ({}, PET | {"PET_NNODES": "1:4"}, "by a TrainJob .*: add --distributed.num-proces"),
        ({}, {"TF_CONFIG": "{}"}, "TF_CONFIG must describe a cluster and this process's"),
        ({}, SAGEMAKER | {"SM_CURRENT_HOST": "n3"}, "SM_HOSTS must list the hosts as JSON"),
    ],
)
def test_processes_that_cannot_find_one_another(options, environ, message):
    with pytest.raises(ValueError, match=message):
        detect(DistributedConfig(**options), environ)


@pytest.mark.parametrize("process_id, count", [(2, 2), (-1, None)])
def test_process_numbers_out_of_range(process_id, count):
    options = DistributedConfig(num_processes=count, process_id=process_id)
    with pytest.raises(ValueError, match="`distributed.process_id` must be in .0, num_pro"):
        dataclasses.replace(CONFIG, distributed=options)
