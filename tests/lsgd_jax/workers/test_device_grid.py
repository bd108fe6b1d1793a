"""The devices of the grid: host by host, with at least one from every process."""

import types
import warnings

import numpy as np
import pytest

import lsgd_jax as lj
from lsgd_jax._src.workers.device_grid import check_no_process_is_idle, device_grid, pick


def _hosts(*counts):
    """Returns stand-ins for the devices of hosts, with the given counts per host."""
    return [
        types.SimpleNamespace(process_index=host, id=10 * host + i)
        for host, count in enumerate(counts)
        for i in range(count)
    ]


def test_each_host_gives_the_same_number_of_devices():
    assert [d.id for d in pick(_hosts(4, 4), (2, 3))] == [0, 1, 2, 10, 11, 12]
    assert [d.id for d in pick(_hosts(2, 2, 2, 2), (2, 4))] == [
        0,
        1,
        10,
        11,
        20,
        21,
        30,
        31,
    ]
    assert [d.id for d in pick(_hosts(3, 1), (1, 4))] == [0, 1, 2, 10]


def test_the_devices_of_a_slice_count_as_one_host():
    """Each of its processes gives equally many, if that is possible."""
    devices = _hosts(2, 2)
    for device in devices:
        device.slice_index = 0
    assert [d.id for d in pick(devices, (1, 2))] == [0, 10]
    assert [d.id for d in pick(devices, (1, 3))] == [0, 1, 10]


def test_processes_of_one_host_stay_together_in_any_order():
    """One process per device; consecutive ranks are on different hosts."""
    devices = _hosts(*[1] * 6)
    for device in devices:
        device.slice_index = device.process_index % 2
    assert [d.process_index for d in pick(devices, (2, 3))] == [0, 2, 4, 1, 3, 5]
    # With unequal numbers from the hosts, the order is still host by host.
    assert [d.process_index for d in pick(devices, (1, 5))] == [0, 2, 4, 1, 3]


def test_a_process_without_a_worker_is_refused():
    grid = lambda hosts: np.array(hosts, dtype=object)
    check_no_process_is_idle(grid(_hosts(2, 2)), 2)
    with pytest.raises(ValueError, match="of 4 processes these have none: 1, 3"):
        check_no_process_is_idle(grid(_hosts(2, 0, 1)), 4)


def test_grid_shape():
    assert device_grid(2, 4, None).shape == (2, 4)


@pytest.mark.parametrize(
    "nodes, locals, inside, told",
    [
        (1, 11, {}, "use 1 of the 8 devices.* 8 or 16 workers would use all"),
        (2, 5, {}, "use 2 of the 8 devices"),
        (5, 3, {}, "8 or 16 workers in 1, 2, 4, 8 nodes would use all"),
        (1, 3, {"fsdp": 4}, "use 4 of the 8 devices.* 2 or 4 workers would use all"),
    ],
)
def test_idle_devices_that_would_speed_up_steps_are_reported(nodes, locals, inside, told):
    with pytest.warns(UserWarning, match=told) as found:
        lj.Workers(nodes, locals, inside=inside)
    assert found[0].filename == __file__


@pytest.mark.parametrize("nodes, locals", [(1, 1), (1, 7), (3, 4), (2, 8), (16, 1)])
def test_idle_devices_that_would_not_speed_up_steps_are_not_reported(nodes, locals):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lj.Workers(nodes, locals)
