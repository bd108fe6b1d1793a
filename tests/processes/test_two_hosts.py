"""The example of a loop in several processes is saved, stopped, killed and resumed."""

import re
import signal
import sys

import jax
import numpy as np
import pytest
from outside import loaded
from trainers import HEARTBEAT_S, ROOT, Trainers, checkpoints, free_port

import lsgd_jax as lj


PROGRAM = ROOT / "examples" / "two_hosts.py"
STEPS = 60

# Code that a process runs first, so that the loss of another one is noticed sooner.
HASTY = (
    "import jax; meet = jax.distributed.initialize; jax.distributed.initialize = "
    f"lambda *a, **k: meet(*a, **(k | {{'heartbeat_timeout_seconds': {HEARTBEAT_S}}})); "
)

# Code that a process runs first, to take at most 20 steps per second.
SLOWLY = (
    "import time; import lsgd_jax as lj; put = lj.Workers.put_owned; "
    "lj.Workers.put_owned = lambda *a: (time.sleep(0.05), put(*a))[1]; "
)


class Hosts(Trainers):
    """Two processes of the example. By default they have the same folder."""

    def __init__(self, run, cache, *options, before="", folders=None):
        folders = folders or [run / "checkpoints"] * 2
        address = f"127.0.0.1:{free_port()}"
        no_proxies = {"http_proxy": "", "HTTPS_PROXY": ""}
        each = [([str(i), str(folder)], no_proxies) for i, folder in enumerate(folders)]
        output = run / f"printed-{len(list(run.glob('printed-*')))}"
        options = ["--emulate", "2", "--steps", str(STEPS), *options]
        program = [[sys.executable, str(PROGRAM), *options]] * 2
        super().__init__(output, [address, "2"], each, cache, HASTY + before, program)


def result(printed):
    """Returns the loss of the center, rounded, and the digest of the center."""
    # Not only the last line: the libraries below may print when the process ends.
    line = r"^loss of the center (\d\.\d{4}), digest (\w{16})$"
    ((loss, digest),) = re.findall(line, printed, re.MULTILINE)
    return float(loss), digest


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, cache):
    """The `result` of an undisturbed run."""
    with Hosts(tmp_path_factory.mktemp("undisturbed"), cache) as hosts:
        assert hosts.end(limit=60) == [0, 0], hosts.printed(0)
        first, second = (result(hosts.printed(i)) for i in range(2))
    assert first == second
    return first


def check_resumed(run, cache, undisturbed, step):
    """Starts the same two commands again, which must continue after this step."""
    with Hosts(run, cache) as hosts:
        assert hosts.end(limit=60) == [0, 0], hosts.printed(0)
        for i in range(2):
            assert f"resumed at step {step}\n" in hosts.printed(i)
            assert result(hosts.printed(i)) == undisturbed


@pytest.mark.slow  # test_processes.py has runs of several processes
def test_each_process_trains_its_workers_on_their_own_data(undisturbed):
    """The program computes what one process computes that has the data of all workers."""
    example = loaded(PROGRAM)
    workers = lj.Workers(nodes=2, locals=2, devices=jax.devices()[:4])
    state, step = example.start(workers), workers.map(example.train_step)
    for t in range(1, STEPS + 1):
        x, y = zip(*(example.draw(worker, t) for worker in range(4)))
        state, _ = step(state, *workers.put((np.stack(x), np.stack(y))))
    assert np.ptp(x, axis=0).min() > 0  # workers have different data
    center = lj.center(state.state["params"], state)
    loss = float(example.loss_of(center, *example.draw(0, 0)))
    assert undisturbed[0] == pytest.approx(loss, abs=2e-4)


@pytest.mark.slow
def test_sigterm_to_one_process_saves_both(tmp_path, cache, undisturbed):
    """Saved at another step than those at which the program saves anyway."""
    with Hosts(tmp_path, cache, "--save-every", "1000", before=SLOWLY) as hosts:
        hosts.until(lambda: "step 20:" in hosts.printed(0))
        hosts.send(signal.SIGTERM, 1)
        assert hosts.end(limit=30) == [75, 75], hosts.printed(0)
        step = max(checkpoints(tmp_path))
        assert 20 < step < STEPS
        for i in range(2):
            assert f"stopped and saved at step {step}\n" in hosts.printed(i)
    check_resumed(tmp_path, cache, undisturbed, step)


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_process_ends_the_other_one(lost, tmp_path, cache, undisturbed):
    """Killed while a checkpoint is written; the last complete one is resumed."""
    unfinished = lambda: list(tmp_path.glob("checkpoints/*.orbax-checkpoint-tmp*"))
    with Hosts(tmp_path, cache, "--save-every", "5", before=SLOWLY) as hosts:
        hosts.until(lambda: max(checkpoints(tmp_path), default=0) >= 10 and unfinished())
        hosts.send(signal.SIGKILL, lost)
        statuses = hosts.end(limit=90)
    assert statuses[lost] == -signal.SIGKILL and statuses[1 - lost] not in (0, None)
    check_resumed(tmp_path, cache, undisturbed, max(checkpoints(tmp_path)))
    assert not unfinished()


@pytest.mark.slow
def test_a_process_that_raises_ends_the_other_one(tmp_path, cache):
    breaks = (
        "slow = lj.Workers.put_owned; turns = iter([1] * 30 + [0]); "
        "lj.Workers.put_owned = lambda workers, *a: "
        "(1 / (workers.owned[0] == 0 or next(turns)), slow(workers, *a))[1]; "
    )
    with Hosts(tmp_path, cache, before=SLOWLY + breaks) as hosts:
        statuses = hosts.end(limit=90)
        assert "ZeroDivisionError" in hosts.printed(1)
    assert 0 not in statuses and max(checkpoints(tmp_path)) == 20


@pytest.mark.slow
def test_a_folder_of_each_host_is_refused(tmp_path, cache):
    folders = [tmp_path / "a", tmp_path / "b"]
    with Hosts(tmp_path, cache, folders=folders) as hosts:
        assert hosts.end(limit=60) == [1, 1]
        for i in range(2):
            expected = f"error: {folders[i]} must be a folder that all hosts share"
            assert expected in hosts.printed(i).splitlines(), hosts.printed(i)
