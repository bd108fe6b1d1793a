"""Workers on Ray: the numbers of the simulator, faults, restarts, signals."""

import operator
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import ray
import toys
from harness import METHODS
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from outside import until

import lsgd_jax as lj
from lsgd_jax._src.asynchronous.ray import engine as ray_engine
from lsgd_jax.asynchronous import (
    OSGP,
    Coordinator,
    DecoupledDiLoCo,
    Method,
    Pulls,
    Training,
    WorkerReport,
    island,
    simulator,
)
from lsgd_jax.asynchronous.ray_engine import ClusterOptions, run


ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
BUDGET = Pulls(lj.lsgd(local_period=2, global_period=4), budget=True)
DECOUPLED = DecoupledDiLoCo(4, learning_rate=0.5, momentum=0.5)
IN_LOCK_STEP = Pulls(lj.diloco(period=2))
TIMEOUT = 10.0


def training(before_step=lambda i, t: None, size=3, devices=1):
    """Noisy squares; `before_step` may end, stop or slow a worker, an island of devices."""

    def make(i):
        if devices > 1:
            lj.emulate_devices(devices)
        optimizer = optax.sgd(0.1, momentum=0.5)

        def init(i):
            params = {"w": jnp.ones([size]), "b": jnp.zeros([], jnp.float32)}
            return params, optimizer.init(params), jax.random.key(i)

        @jax.jit
        def compute(params, opt_state, own, t):
            key, subkey = jax.random.split(own)
            target = jax.random.normal(subkey, [size])
            loss = lambda p: jnp.mean((p["w"] - target) ** 2) + (p["b"] - 1) ** 2
            value, grads = jax.value_and_grad(loss)(params)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return updates, opt_state, key, value

        def step(params, opt_state, own, t):
            before_step(i, int(t))
            assert len(params["w"].addressable_shards) == devices
            return compute(params, opt_state, own, t)

        if devices == 1:
            return Training(init, step)
        mesh = Mesh(np.array(jax.local_devices()), "fsdp")
        return island(Training(init, step), mesh, {"w": P("fsdp"), "b": P()})

    return make


def pause(i, t):
    time.sleep(0.02)


def fault_at(step, fault, worker=1):
    """Runs `fault` when a worker reaches a step; the others take their time."""

    def before_step(i, t):
        time.sleep(0.02)
        if i == worker and t == step:
            fault()

    return before_step


class Watching:
    """An `on_status` that acts, and keeps every status."""

    def __init__(self, act=lambda status, remote: None):
        self._act, self.seen = act, []

    def __call__(self, status, remote):
        self.seen.append(status)
        self._act(status, remote)

    def longest(self, *workers):
        return max(s.reports[i].longest for s in self.seen for i in workers)


# Without faults


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_equals_the_simulator_also_when_it_is_resumed(devices, on_ray):
    method, make = Pulls(lj.diloco(period=2)), training(size=4, devices=devices)
    expected = simulator.run(training(size=4)(0), method, 1, 2, 8).workers
    half = run(make, method, 1, 2, 4)
    ends = []
    note = lambda status, remote: ends.append(remote.states())
    whole = run(make, method, 1, 2, 8, states=half.states, on_status=note)
    assert all(map(operator.is_, ends[-1], whole.states))  # which moved here once
    assert [state["count"] for state in half.states] == [4, 4]
    assert not whole.stopped and whole.restarts == [0, 0]
    for worker, state in zip(expected, whole.states):
        for x, y in zip(jax.tree.leaves(worker.params), jax.tree.leaves(state["params"])):
            np.testing.assert_allclose(x, y, rtol=1e-6)


def test_options_are_checked():
    with pytest.raises(ValueError, match="`timeout` must be positive, got timeout=0"):
        ClusterOptions(timeout=0)


@pytest.mark.slow
def test_in_int8_all_get_the_same_mean_and_the_bytes_are_as_predicted(on_ray):
    method = Pulls(lj.diloco(period=2, outer=optax.sgd(1.0), wire="int8"))
    make = training(size=700)
    out = run(make, method, 1, 3, 8)
    for i, worker in enumerate(simulator.run(make(0), method, 1, 3, 8).workers):
        sent = out.status.reports[i].bytes_sent
        assert sent == worker.transport.mailbox.bytes_sent > 0
    first, *others = [state["params"]["w"] for state in out.states]
    for other in others:
        np.testing.assert_array_equal(first, other)


# One of each kind of message, and of each way in which the kernel keeps what arrives. The
# pulls of a row are one method, because starting the workers takes longer than their steps.
ROWS = [
    ["lsgd", "easgd", "noloco"],
    ["median_worker", "dpsgd", "pairwise"],
    ["sparse_diloco", "wagma"],
    ["osgp_delayed"],
    ["diloco+int4", "sgp+int4"],
]


@pytest.mark.slow
def test_every_kind_of_message_equals_the_simulator(on_ray):
    """`test_pulls` compares the simulator with lock step, for every method."""
    methods: dict[str, Method] = {"async osgp": OSGP()}
    for names in ROWS:
        pulls = (METHODS[name].make(2) for name in names)
        methods[" ".join(names)] = Pulls(lj.exchange(*pulls))
    for name, method in methods.items():
        expected = simulator.run(training()(0), method, 1, 2, 6).workers
        found = run(training(), method, 1, 2, 6, options=ClusterOptions(timeout=60)).states
        for worker, state in zip(expected, found):
            for x, y in zip(*map(jax.tree.leaves, (worker.params, state["params"]))):
                np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6, err_msg=name)


# Restarts, without Ray


class Recorded(ray_engine._Actors):
    """The driver's view of a run whose actors are only noted, not started."""

    def _begin(self, all_lost):
        self.begun = [*getattr(self, "begun", []), all_lost]
        self._runs, self._restarted, self._until = {}, set(), 0
        self.coordinator = Mock()
        for i in self._everyone:
            self._start(i)

    def _start(self, i):
        self._runs[object()] = i

    def lose(self, *workers, steps):
        """Loses workers when all have reported these steps."""
        status = Coordinator(2, 9)
        for i, n in enumerate(steps):
            status.report(i, WorkerReport(steps=n))
        self._best = list(map(max, self._best, steps))
        self._runs = {ref: i for ref, i in self._runs.items() if i not in workers}
        self._restart(dict.fromkeys(workers, ValueError()), status.status())


@pytest.fixture
def recorded(monkeypatch):
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    return Recorded(Mock(), ClusterOptions(), [None, None], Mock())


def test_a_lost_worker_is_restarted_and_all_are_if_no_other_can_go_on(recorded):
    recorded.lose(1, steps=[0, 0])  # worker 0 still waits for the start
    recorded.lose(1, steps=[5, 4])
    assert recorded.begun == [False] and recorded.remote.restarts == [0, 2]
    recorded.lose(0, steps=[5, 0])  # worker 1 has not taken over yet
    assert recorded.begun == [False, True] and recorded.remote.restarts == [1, 2]


def test_workers_that_are_all_lost_before_their_first_step_begin_again(recorded):
    recorded.lose(0, 1, steps=[0, 0])
    assert recorded.begun == [False, False]


def test_a_worker_that_is_lost_without_progress_ends_the_run(recorded):
    for _ in range(2):
        recorded.lose(1, steps=[5, 4])
    with pytest.raises(RuntimeError, match="worker 1 was lost 3 times in a row before"):
        recorded.lose(1, steps=[9, 3])


# Faults


@pytest.mark.parametrize(
    "method", [toys.slow(BUDGET), toys.slow(DECOUPLED)], ids=["lsgd", "decoupled"]
)
def test_a_worker_that_is_killed_goes_on_from_a_peer(on_ray, method):
    killed, turns = [], []

    def act(status, remote):
        if not killed and status.reports[1].steps > 10:
            os.kill(remote.processes[1][1], signal.SIGKILL)
            killed.append(status.reports[1].steps)
        back = remote.restarts[1] and status.reports[1].steps > killed[0] + 5
        if back and 1 in status.present:
            turns.append(status.reports[1].rounds)
            # Turns go on, and it takes part in them again.
            if method is not DECOUPLED or turns[-1] > turns[0] + 5:
                assert remote.latest(1).vector.shape == (4,)
                assert remote.states()[1]["own"].dtype == np.uint32
                remote.stop()

    def make(i):
        time.sleep(2)  # longer than between two calls of `on_status`
        return training(pause)(i)

    watching = Watching(act)
    timeout = 2 * TIMEOUT  # in which the new process starts, even if the machine is busy
    options = ClusterOptions(timeout=timeout)
    out = run(make, method, 1, 3, 10**5, options=options, on_status=watching)
    assert out.stopped and out.restarts == [0, 1, 0]
    assert [s for s in watching.seen if s.present == [0, 2]]
    assert watching.longest(0, 2) < timeout
    counts = [state["count"] for state in out.states]
    assert min(counts) > killed[0]
    momentum = [state["opt_state"][0].trace["b"] for state in out.states]
    assert all(np.isfinite(momentum))
    if method is DECOUPLED:
        taken = [report.rounds for report in out.status.reports.values()]
        assert min(taken) > killed[0] // 2 + 5


@pytest.mark.slow
def test_a_worker_whose_code_raises_ends_the_run(on_ray):
    def fault():
        raise ZeroDivisionError("no data")

    with pytest.raises(
        RuntimeError, match="worker 1 has raised ZeroDivisionError: no data"
    ):
        run(training(fault_at(3, fault)), BUDGET, 1, 2, 10**5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "hangs, method",
    [("hung", BUDGET), ("stopped", IN_LOCK_STEP)],
    ids=["hung", "stopped in lock step"],
)
def test_no_worker_waits_longer_than_the_timeout_for_one_that_hangs(on_ray, hangs, method):
    def act(status, remote):
        pid = remote.processes.get(1, (None, None))[1]
        steps = status.reports[1].steps
        if hangs == "stopped" and not stopped and steps > 20:
            os.kill(pid, signal.SIGSTOP)
            stopped.append(time.monotonic())
        if hangs == "stopped" and stopped and time.monotonic() > stopped[0] + 2 * TIMEOUT:
            os.kill(pid, signal.SIGCONT)
            stopped[0] = float("inf")
        if min(r.steps for r in status.reports.values()) > 25 and 1 in status.present:
            if hangs == "hung" or (stopped and stopped[0] == float("inf")):
                remote.stop()

    stopped, watching = [], Watching(act)
    step = fault_at(21, lambda: time.sleep(1000)) if hangs == "hung" else pause
    options = ClusterOptions(timeout=TIMEOUT, stall=20 if hangs == "hung" else 1000)
    out = run(training(step), method, 1, 3, 10**5, options=options, on_status=watching)
    assert (out.restarts[1] > 0) == (hangs == "hung")
    assert [s for s in watching.seen if s.present == [0, 2]]
    assert watching.longest(0, 2) < 1.5 * TIMEOUT  # the fault lasts 20 s


@pytest.mark.slow
def test_a_run_that_is_stopped_while_a_worker_hangs_ends_without_it(on_ray):
    stopped = []

    def act(status, remote):
        if not stopped and min(r.steps for r in status.reports.values()) > 5:
            os.kill(remote.processes[1][1], signal.SIGSTOP)
            stopped.append(time.monotonic())
            remote.stop()

    options = ClusterOptions(timeout=3.0, stall=1000)
    method = lj.asynchronous.LSGD(0.1, 0.1, 4, 8)
    out = run(training(pause), method, 1, 3, 10**5, options=options, on_status=act)
    assert out.stopped and time.monotonic() - stopped[0] < 30
    assert [state is None for state in out.states] == [False, True, False]


@pytest.mark.slow
def test_a_coordinator_that_is_lost_ends_the_run_in_one_line(on_ray):
    """The states that the driver has seen are those to resume from."""
    seen = []

    def act(status, remote):
        if status.number > 6 and not seen:  # a worker may know of one round less
            seen.append(remote.states())
            (name,) = (a for a in ray.util.list_named_actors() if "coordinator" in a)
            ray.kill(ray.get_actor(name))

    with pytest.raises(RuntimeError, match="its coordinator was lost: resume it"):
        run(training(pause), BUDGET, 1, 2, 10**5, on_status=act)
    (states,) = seen
    steps = 50 + sum(state["count"] for state in states) // 2
    out = run(training(), BUDGET, 1, 2, steps, states=states)
    assert out.status.taken == 2 * steps
    assert out.status.number > states[0]["number"] > 5


@pytest.mark.slow
def test_after_the_loss_of_all_workers_the_run_goes_on_from_a_checkpoint(on_ray):
    half = run(training(), BUDGET, 1, 2, 20)

    def act(status, remote):
        # On a busy machine a process may be known later than its first steps.
        both = len(remote.processes) == 2
        if not killed and both and min(r.steps for r in status.reports.values()) > 30:
            killed.extend(pid for _, pid in remote.processes.values())
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

    killed, restore = [], half.states.__getitem__
    options = ClusterOptions(timeout=TIMEOUT)
    out = run(
        training(pause),
        BUDGET,
        1,
        2,
        100,
        options=options,
        states=half.states,
        restore=restore,
        on_status=act,
    )
    assert killed and out.restarts == [1, 1] and out.status.taken == 200
    killed.clear()
    with pytest.raises(RuntimeError, match="all workers were lost"):
        run(training(pause), BUDGET, 1, 2, 2000, options=options, on_status=act)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_the_run_and_nothing_is_left_running(number):
    folder = tempfile.mkdtemp(dir="/tmp")  # short: the paths of sockets must be
    script = pathlib.Path(folder) / "script.py"
    code = """
    import signal, time
    import jax.numpy as jnp
    import lsgd_jax as lj
    from lsgd_jax.asynchronous import Pulls, Training
    from lsgd_jax.asynchronous.ray_engine import run

    # A shell makes background processes ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def make(i):
        def step(params, opt_state, own, t):
            time.sleep(0.02)
            return -0.1 * params, opt_state, own, jnp.sum(params)
        return Training(lambda i: (jnp.ones(3), (), ()), step)

    def tell(status, remote):
        print("steps", status.taken, flush=True)

    out = run(make, Pulls(lj.lsgd(), budget=True), 1, 2, 10**5, on_status=tell)
    print("stopped", out.stopped, min(s["count"] for s in out.states), flush=True)
    """
    script.write_text(textwrap.dedent(code))
    env = {**os.environ, "RAY_TMPDIR": folder, "PYTHONPATH": os.getcwd()}
    command = [sys.executable, "-W", "error", str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
        limit = threading.Timer(180, process.kill)
        limit.start()
        for line in process.stdout:
            if line.startswith("steps") and int(line.split()[1]) > 20:
                process.send_signal(number)
                break
        out = process.stdout.read()
    limit.cancel()
    assert process.returncode == 0 and "stopped True" in out
    until(lambda: not processes_with(folder))
    shutil.rmtree(folder)


def processes_with(word):
    """The command lines on this machine that have a word."""
    lines = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    return [line for line in lines.splitlines() if word in line]
