"""Whether delayed messages travel beside the steps if the user does not say it."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from loops import update

import lsgd_jax as lj


WORKERS = lj.Workers(2, 2, devices=jax.devices()[:4])
LSGD = lj.lsgd(0.5, 0.5, 3, 6, delay=2)
WITHIN_A_NODE = lj.exchange(lj.Pull(lj.rules.leader("local"), 0.5, 4, delay=2))
PROXIMAL = lj.lsgd(0.5, 0.5, 3, 6, local_proximal=0.1, delay=2)


class Device:
    """A device of a process."""

    def __init__(self, platform, process, host):
        self.platform = platform
        self.process_index = process
        self.slice_index = host


def devices_of(platform, hosts, count):
    """The devices of two processes, as many of each, on its host."""
    return [
        [Device(platform, process, host) for _ in range(count)]
        for process, host in enumerate(hosts)
    ]


@pytest.mark.parametrize(
    "method, platform, hosts, spare, expected",
    [
        (lj.diloco(4, delay=1), "cpu", (0, 0), 2, True),
        (lj.diloco(4, delay=1), "cpu", (0, 0), 1, False),  # too few devices beside
        (lj.diloco(4), "cpu", (0, 1), 2, False),  # no delay
        (LSGD, "cpu", (0, 0), 2, True),
        (PROXIMAL, "cpu", (0, 0), 2, False),  # its step reads what was agreed on
        (WITHIN_A_NODE, "cpu", (0, 1), 2, False),
        (lj.diloco(4, delay=2), "gpu", (0, 1), 2, True),
        (lj.diloco(4, delay=1), "gpu", (0, 1), 2, False),
        (lj.diloco(4, delay=2), "gpu", (0, 0), 2, False),
        (LSGD, "gpu", (0, 1), 2, False),  # its local messages stay on a host
        (lj.diloco(4, delay=2), "tpu", (None, None), 2, False),  # one slice
    ],
)
@pytest.mark.parametrize("has_slots", [False, True])
def test_messages_travel_beside_where_they_take_a_slow_link(
    method, platform, hosts, spare, expected, has_slots, monkeypatch
):
    """In two processes with a node each, of two workers on two devices or on one."""
    own = 1 if has_slots else 2
    training = devices_of(platform, hosts, own)
    cpus = sum(devices_of("cpu", hosts, spare * own // 2), [])
    if platform == "cpu":
        cpus = sum(training, cpus)
    monkeypatch.setattr(jax, "devices", lambda platform=None: cpus)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    names = ("node", "local_device" if has_slots else "local")
    mesh = SimpleNamespace(devices=np.array(training), axis_names=names)
    workers = lj.Workers(2, 2, devices=WORKERS.mesh.devices.flat[:1].tolist())
    workers._grid = WORKERS._grid._replace(mesh=mesh)
    # A process on CPUs has one device that trains.
    assert workers.travels_beside(method) is (expected and (has_slots or platform == "gpu"))


def test_one_process_exchanges_in_the_step():
    step = lj.around(update, lj.diloco(4, delay=2))
    assert not hasattr(WORKERS.loop(step), "waited")
    assert not WORKERS.travels_beside(lj.diloco(4, delay=2))
