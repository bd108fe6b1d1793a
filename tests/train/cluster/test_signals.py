"""Several processes stop after the same step; here each is a thread."""

import random
import signal
import threading
import time

import pytest

from train.cluster import key_value_store as coordination
from train.cluster import signals as interrupts
from train.cluster.signals import Interrupts


COUNT = 3


class Service:
    """What `coordination` offers, to threads that are named by their process."""

    def __init__(self):
        self._texts: dict[tuple[str, int], str] = {}
        self._lock = threading.Lock()
        self.barrier = threading.Barrier(COUNT, timeout=20)
        self.lost = False

    def process_id(self):
        return int(threading.current_thread().name[-1])

    def write(self, folder, text):
        with self._lock:
            self._texts[folder, self.process_id()] = text

    def read(self, folder):
        with self._lock:
            return {i: text for (name, i), text in self._texts.items() if name == folder}

    def gather(self, text):
        self.write("round", text)
        self.barrier.wait()
        return [text for _, text in sorted(self.read("round").items())]

    def check_nobody_is_lost(self):
        if self.lost:
            raise coordination.Lost([2])


@pytest.fixture
def service(monkeypatch):
    service = Service()
    for name in ("process_id", "write", "read", "gather", "check_nobody_is_lost"):
        monkeypatch.setattr(coordination, name, getattr(service, name))
    monkeypatch.setattr(coordination, "is_joined", lambda: True)
    monkeypatch.setattr(coordination, "new_folder", lambda name: name)
    monkeypatch.setattr(coordination, "members", lambda: list(range(COUNT)))
    monkeypatch.setattr(interrupts, "PERIOD_S", 0.01)
    # Only the main thread may set handlers; here signals are noted by hand.
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    # A thread belongs to the process of the one that starts it.
    start = threading.Thread.start

    def start_named(thread):
        if thread.name == "interrupts":
            thread.name = f"interrupts-{service.process_id()}"
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_named)
    return service


def train(process, asked, steps, stopped):
    """Steps of very different length, until all are to stop."""
    chance = random.Random(process)
    with Interrupts() as each:
        for step in range(1, steps + 1):
            time.sleep(chance.choice((0, 0.001, 0.02 * process)))
            if (process, step) in asked:
                each._note(asked[process, step], None)
            if each.stop_at(step):
                stopped[process] = step, each.received, each.asked
                return


def run(asked, steps=1000):
    """(step, signal, processes asked) with which each process stopped."""
    stopped = {}
    threads = [
        threading.Thread(target=train, args=(i, asked, steps, stopped), name=f"p-{i}")
        for i in range(COUNT)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    return stopped


@pytest.mark.parametrize(
    "asked, received",
    [
        ({(1, 5): signal.SIGTERM}, signal.SIGTERM),
        ({(0, 5): signal.SIGTERM, (2, 1): signal.SIGTERM}, signal.SIGTERM),
        ({(0, 5): signal.SIGTERM, (1, 1): signal.SIGINT}, signal.SIGINT),
    ],
    ids=["one", "two", "Ctrl-C, too"],
)
def test_all_stop_after_the_same_step_whichever_was_asked(service, asked, received):
    stopped = run(asked)
    steps = {step for step, _, _ in stopped.values()}
    assert len(stopped) == COUNT and len(steps) == 1
    assert steps.pop() > min(step for _, step in asked)
    assert {number for _, number, _ in stopped.values()} == {received}
    noted = [processes for _, _, processes in stopped.values()]
    first = noted[0]
    assert all(processes == first for processes in noted)
    assert set(first) <= {process for process, _ in asked} and first


def test_who_is_asked_at_the_last_step_ends_as_the_others_do(service):
    """One may have come to its end when another one asks it where it is."""
    assert run({(2, 10): signal.SIGTERM}, steps=10) == {}


def test_nobody_stops_if_nobody_is_asked(service):
    assert run({}, steps=50) == {}


def test_a_lost_process_is_not_waited_for(service):
    """Who is asked trains on: the next step fails, and then the loss is dealt with."""
    service.lost = True
    stopped = {}
    alone = threading.Thread(
        target=train, args=(0, {(0, 3): signal.SIGTERM}, 60, stopped), name="p-0"
    )
    alone.start()
    alone.join(20)
    assert not alone.is_alive() and stopped == {}
