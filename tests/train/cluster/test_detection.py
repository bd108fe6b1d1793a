"""Detection of the cluster that started a process."""

import dataclasses

import pytest

from configs.digits import CONFIG
from train.cluster import detection
from train.cluster.detection import Started, detect
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
        (ADDRESS, None),
        (SLURM, Started("Slurm", {"num_processes": 8}, 1, 4)),
        (
            SLURM | {"SLURM_STEP_TASKS_PER_NODE": "5,3"},
            Started("Slurm", {"num_processes": 8}, 1, 3),
        ),
        (SLURM | MPICH, Started("Slurm", {"num_processes": 8}, 1, 4)),  # srun --mpi=pmi2
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
