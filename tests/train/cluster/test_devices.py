"""The devices that a process uses."""

from unittest.mock import Mock

import pytest
from tiny import SMALL

from train import simulate
from train.cluster import devices
from train.cluster.devices import local_device_ids
from train.cluster.started import Started
from train.task import asynchronous


@pytest.fixture
def emulated(monkeypatch):
    """Numbers of devices that were requested."""
    for name in ("XLA_FLAGS", "JAX_NUM_CPU_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    asked = []
    monkeypatch.setattr(devices.lj, "emulate_devices", asked.append)
    return asked


@pytest.mark.parametrize("workers, processes, expected", [(8, 1, 8), (8, 2, 4), (2, 3, 1)])
def test_each_process_emulates_its_share(workers, processes, expected, emulated):
    devices.provide(workers, processes)
    assert emulated == [expected]


def test_variables_of_the_environment_take_precedence(emulated, monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    devices.provide(8)
    monkeypatch.delenv("JAX_NUM_CPU_DEVICES")
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    devices.provide(8)
    assert emulated == []


@pytest.mark.parametrize(
    "start",
    [
        lambda: devices.provide(1),
        devices.leave_to_workers,
        lambda: asynchronous.of_worker(SMALL, 0),
        lambda: simulate.main(["no experiment"]),
    ],
    ids=["lock step", "driver", "worker", "simulator"],
)
def test_xla_is_tuned_wherever_steps_are_taken(start, emulated, monkeypatch):
    tuned = []
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # does not change jax's configuration
    monkeypatch.setattr("lsgd_jax.tune_cpu", lambda: tuned.append(True))
    monkeypatch.setattr(asynchronous, "training", lambda config, mesh: None)
    monkeypatch.setattr(asynchronous.compilation_cache, "use", lambda say: None)
    start()
    assert tuned == [True]


@pytest.mark.parametrize("error", [AssertionError(), RuntimeError("Unable to initial")])
def test_missing_devices_are_reported_in_one_line(emulated, monkeypatch, error):
    monkeypatch.setattr("jax.devices", Mock(side_effect=error))
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    with pytest.raises(
        ValueError, match="must name devices .*, got JAX_PLATFORMS=cuda; un"
    ):
        devices.provide(8)


@pytest.mark.parametrize(
    "gpus, started, visible, expected",
    [
        # Slurm started several processes on this host: one GPU each, ...
        ("auto", Started("Slurm", {}, 1, 4), None, [1]),
        ("auto", Started("Slurm", {}, 1, 4), "0,1,2,3", [1]),
        ("auto", Started("Slurm", {}, 1, None), None, [1]),
        # ... unless it assigned the GPUs itself, or there is only one process.
        ("auto", Started("Slurm", {}, 1, 4), "2", []),
        ("auto", Started("Slurm", {}, 0, 1), None, []),
        ("one", Started("Slurm", {}, 1, 4), "2", [1]),
        ("one", Started("Slurm", {}, 0, 1), None, [0]),
        ("all", Started("Slurm", {}, 1, 4), None, []),
        ("auto", Started("hand", {}), None, []),
        ("auto", Started("Cloud TPU", {}), None, []),
        # jax asks MPI itself.
        ("auto", Started("MPI", {"cluster_detection_method": "mpi4py"}), None, None),
        ("all", Started("MPI", {"cluster_detection_method": "mpi4py"}), None, []),
    ],
)
def test_gpus_of_a_process(gpus, started, visible, expected):
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert local_device_ids(gpus, started, environ) == expected


def test_one_gpu_needs_a_rank_on_the_host():
    with pytest.raises(ValueError, match="`distributed.gpus` must be all if .*by hand"):
        local_device_ids("one", Started("hand", {}), {})
