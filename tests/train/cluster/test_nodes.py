"""Which nodes are left when processes are lost."""

import types

import numpy as np

from train.cluster.nodes import Nodes


def grid(nodes, processes):
    """Workers on devices of these processes, given as the rows of the mesh."""
    device = lambda i, process: types.SimpleNamespace(id=i, process_index=process)
    flat = np.ravel(processes)
    devices = np.array([device(i, process) for i, process in enumerate(flat)], object)
    mesh = types.SimpleNamespace(devices=devices.reshape(np.shape(processes)))
    return types.SimpleNamespace(mesh=mesh, nodes=nodes)


def ids(nodes):
    return [device.id for device in nodes.devices]


def test_a_process_is_a_node():
    nodes = Nodes.of(grid(3, [[0, 0], [1, 1], [2, 2]]))
    assert (nodes.number, ids(nodes)) == (3, [0, 1, 2, 3, 4, 5])
    left = nodes.without([1])
    assert (left.number, ids(left), left.processes) == (2, [5, 4, 1, 0], {0, 2})
    assert left.without([2]).processes == {0}
    assert nodes.number == 3  # itself it stays


def test_a_node_of_several_processes_goes_as_a_whole():
    left = Nodes.of(grid(2, [[0, 1], [2, 3]])).without([3])
    assert (left.number, ids(left), left.processes) == (1, [1, 0], {0, 1})


def test_a_process_of_several_nodes_takes_all_of_them_along():
    """Two devices for each process, each with two nodes."""
    left = Nodes.of(grid(8, [[0], [0], [1], [1]])).without([1])
    assert (left.number, ids(left)) == (4, [1, 0])


def test_one_node_over_all_processes_is_lost_with_any():
    left = Nodes.of(grid(1, [[0, 1]])).without([1])
    assert (left.number, ids(left), left.processes) == (0, [], set())


def test_workers_of_several_devices():
    """Two nodes of two workers, each of which has two devices."""
    nodes = Nodes.of(grid(2, [[[0, 0], [0, 0]], [[1, 1], [1, 1]]]))
    assert (nodes.number, ids(nodes)) == (2, list(range(8)))
    left = nodes.without([0])
    assert (left.number, ids(left), left.processes) == (1, [7, 6, 5, 4], {1})
