"""crew: all workers that live send the same messages, whoever is lost and comes back.

The processes are threads here, which share a key-value store as those of jax do.
"""

import random
import threading
import time
from unittest.mock import Mock

import pytest
from coordination import Killed, World

from lsgd_jax._src.exchange.crew import Crew, LoopEnded, Verdict
from lsgd_jax._src.workers import members as module
from lsgd_jax._src.workers.members import Members


STEPS = 40
PERIOD = 4
DELAY = 3
PULLS = (0, 1)


def broken(message):
    """Whether a message fails although all processes live."""
    return message.name.endswith(message.process.world.breaks)


class State:
    """The state of a pull after a message: the names of all messages that count."""

    def __init__(self, process, before, name="", connection=None, newcomers=()):
        self.process = process
        self.before = before
        self.name = name
        self.connection = connection
        self.newcomers = newcomers
        self.place = None
        if connection is not None:
            sent = process.world.sent.setdefault((connection, process.number), [])
            self.place = len(sent)
            sent.append(self)

    def others(self):
        """The same message as the other members have sent it, as far as they have."""
        world = self.process.world
        members, _ = self.connection
        found = {}
        for process in members:
            sent = world.sent.get((self.connection, process), [])
            if len(sent) > self.place:
                found[process] = sent[self.place]
        return found

    def has_failed(self):
        members, _ = self.connection
        live = self.process.world.live
        lost = [p for p, x in members.items() if live.get(p) != x]
        return broken(self) or any(p not in self.others() for p in lost)

    def is_ready(self):
        self.process.check()
        if self.connection is None:
            return True
        others = self.others()
        assert {each.name for each in others.values()} == {self.name}
        return len(others) == len(self.connection[0]) or self.has_failed()

    def block_until_ready(self):
        while not self.is_ready():
            time.sleep(0.001)
        if self.connection is not None and self.has_failed():
            raise RuntimeError("Gloo all-reduce failed")
        return self

    @property
    def names(self):
        """The names of the messages that count, in their order."""
        if self.process.number in self.newcomers:
            others = self.others().values()
            return next(x for x in others if x.process.number not in self.newcomers).names
        own = self.before.names if self.before else ()
        return own if self.newcomers or not self.name else (*own, self.name)


class Connection(dict):
    """The members of a verdict, as a key."""

    def __hash__(self):
        return hash(tuple(self.items()))


class Twin:
    def __init__(self, verdict):
        self.key = (Connection(verdict.members), verdict.changes)
        self.num_workers = len(verdict.members)


class Sender:
    """The pulls of a method."""

    def __init__(self, process):
        self.process = process
        self.away = {k: State(process, None) for k in PULLS}

    def use(self, twin, order):
        self.key = twin.key

    def move_from(self, twin, states):
        self.away = dict(states)

    def welcome(self, newcomers):
        for k in PULLS:
            name = f"welcome {k}"
            self.away[k] = State(self.process, self.away[k], name, self.key, newcomers)

    def send_one(self, k, t, round):
        before = self.away[k]
        self.away[k] = State(self.process, before, f"{k} at {t}", self.key)
        self.crew.sent(self, k, before, t, round)

    def land_nothing(self, k):
        self.away[k] = State(self.process, self.away[k])


def take_steps(process, min_workers=1, seed=0, begins=0, asks_at=None):
    """Takes all steps as a loop does. Returns the messages that count, by pull.

    begins: the step of its checkpoint. asks_at: the step at which it asks all to stop.
    """
    wait = random.Random(seed).random
    sender = Sender(process)
    members = Members(process, process.number, process.world.processes)
    crew = Crew(members, Twin, lambda twin: None, min_workers, [sender])
    verdict = crew.begin([begins])
    t = begins
    if verdict.newcomers:
        crew.come_in(verdict)
        (t,) = verdict.place["counts"]
    while t < STEPS:
        process.check()
        crew.step([t])
        if t % PERIOD == 0:
            for k in PULLS:
                time.sleep(0.004 * wait())
                if not crew.has_left():
                    sender.send_one(k, t, None)
        t += 1
        time.sleep(0.004 * wait())
        if t == asks_at:
            crew.stop_all("SIGTERM")
        if t % PERIOD == DELAY:
            crew.wait_for(sender, PULLS)
            assert crew.known(sender) == sender.away
            for k in PULLS:
                crew.landed(sender, k)
        if crew.stopped:
            break
        if t % 5 == 0:
            assert set(crew.gather(t)) == {t}
    crew.close()
    return {k: sender.away[k].names for k in PULLS}


class Running(threading.Thread):
    """A process in a thread."""

    def __init__(self, process, **options):
        super().__init__(daemon=True)
        self.process = process
        self.result = None
        self._options = options

    def run(self):
        try:
            self.result = take_steps(
                self.process, seed=self.process.incarnation, **self._options
            )
        except BaseException as error:
            self.result = error


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Loops begin in one order, and processes look at one another often."""
    monkeypatch.setattr(module, "_numbers", iter([0] * 1000))
    monkeypatch.setattr(module, "LOOK_S", 0.001)
    monkeypatch.setattr(module, "WATCH_S", 0.002)


def expected(k):
    return tuple(f"{k} at {t}" for t in range(0, STEPS, PERIOD))


@pytest.mark.parametrize("seed", range(8))
def test_all_that_live_have_sent_each_message_once(seed):
    """Processes are killed and started again at random, often two at once."""
    draw = random.Random(seed)
    world = World(4)
    running = {p: Running(world.start(p)) for p in range(4)}
    for each in running.values():
        each.start()
    for _ in range(5):
        time.sleep(0.03 * draw.random())
        victims = draw.sample([1, 2, 3], draw.choice([1, 1, 2]))
        for p in victims:
            world.live.pop(p, None)
        time.sleep(0.03 * draw.random())
        for p in victims:
            running[p].join(10)
            if not running[0].is_alive():
                break
            running[p] = Running(world.start(p))
            running[p].start()
    for p, each in running.items():
        each.join(20)
        assert not each.is_alive(), f"process {p} has not ended"
    results = [each.result for p, each in running.items() if world.live.get(p)]
    whole = {k: expected(k) for k in PULLS}
    assert results[0] == whole
    assert all(result == whole or isinstance(result, LoopEnded) for result in results)


def results_of(world, options):
    """The results of processes with these options, of which none is lost."""
    running = [Running(world.start(p), **each) for p, each in enumerate(options)]
    for each in running:
        each.start()
    for each in running:
        each.join(20)
    return [each.result for each in running]


def test_processes_begin_at_the_step_of_process_0():
    """The others have checkpoints of other steps, and take what all have from it."""
    begins = PERIOD * 3
    each = results_of(World(3), [{"begins": begins}, {"begins": 0}, {"begins": begins}])
    sent = [f"{{}} at {t}" for t in range(begins, STEPS, PERIOD)]
    assert each == [{k: tuple(name.format(k) for name in sent) for k in PULLS}] * 3


@pytest.mark.parametrize("asks_at", [PERIOD, PERIOD + 1, PERIOD + DELAY])
def test_all_stop_at_one_step_if_process_0_asks(asks_at):
    """It is the landing of a message that was in flight or left later."""
    first, *others = results_of(World(3), [{"asks_at": asks_at}, {}, {}])
    assert others == [first, first]
    stopped = len(first[0])
    assert stopped in (2, 3) and first == {k: expected(k)[:stopped] for k in PULLS}


def test_only_process_0_can_stop_all():
    each = results_of(World(2), [{}, {"asks_at": PERIOD}])
    assert each == [{k: expected(k) for k in PULLS}] * 2


def test_a_state_is_known_before_the_messages_in_flight():
    world = World(2)
    process = world.start(0)
    sender = Sender(process)
    crew = Crew(Mock(), Twin, lambda twin: None, 1, [sender])
    before = dict(sender.away)
    members = {0: process.incarnation, 1: 0}  # of which the other one says nothing
    crew._board(Verdict(members, {}, {}, "", 0, {}))
    crew._place = {"counts": [0], "sent": 0}
    for t in (0, PERIOD):
        sender.send_one(0, t, None)
    assert sender.away[0] is not before[0]
    assert crew.known(sender) == before


def wait_for_verdict(world):
    """Waits until a message counts."""
    while not any("/verdict/" in key for key in list(world.store)):
        time.sleep(0.001)


def end_of(world, min_workers=1):
    """What becomes of each process of a world."""
    running = [Running(world.start(p), min_workers=min_workers) for p in range(3)]
    for each in running:
        each.start()
    yield running
    for each in running:
        each.join(20)
    yield [each.result for each in running]


def test_a_loop_ends_with_too_few_workers():
    world = World(3)
    steps = end_of(world, min_workers=3)
    next(steps)
    wait_for_verdict(world)
    del world.live[2]
    *ends, killed = next(steps)
    assert [str(end) for end in ends] == ["2 workers live, fewer than min_workers=3"] * 2
    assert isinstance(killed, Killed)


def test_a_loop_ends_if_messages_fail_and_no_process_is_lost():
    world = World(3)
    world.breaks = "at 8"
    steps = end_of(world)
    next(steps)
    text = "no process is lost, but messages fail: Gloo all-reduce failed"
    assert [str(end) for end in next(steps)] == [text] * 3


def test_a_process_that_was_silent_for_too_long_is_told():
    world = World(3)
    steps = end_of(world)
    running = next(steps)
    wait_for_verdict(world)
    running[2].process.is_silent = True
    del world.live[2]
    *others, end = next(steps)
    assert all(set(names) == set(PULLS) for names in others)
    assert str(end).startswith("the others have gone on without this process")


def test_a_process_that_comes_after_the_last_step_is_told():
    world = World(3)
    steps = end_of(world)
    next(steps)
    next(steps)
    late = Running(world.start(2))
    late.start()
    late.join(10)
    assert str(late.result) == "the others have taken their last step"
    assert late.result.is_over


def test_a_process_that_comes_after_a_stop_is_told():
    world = World(2)
    results_of(world, [{"asks_at": PERIOD}, {}])
    late = Running(world.start(1))
    late.start()
    late.join(10)
    assert str(late.result) == "the others have stopped: SIGTERM"
    assert not late.result.is_over
