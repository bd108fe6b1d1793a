"""Several processes compute the same numbers, and only the first one writes files."""

import functools
import json
import pathlib
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
import tiny
from images import make_folder
from processes import jobs
from trainers import Trainers, by_options, events, free_port, numbers

import lsgd_jax as lj
from train.cluster.session import Session
from train.run.open import open_run


def run(job, folder, count, before=lambda i: [], cache=None):
    """Runs a job in `count` processes. Returns their answers and outputs.

    before: process -> a command that runs the process. cache: see `environment`.
    """
    script = str(pathlib.Path(__file__).with_name("jobs.py"))
    program = [[*before(i), sys.executable, script] for i in range(count)]
    arguments = [job, str(folder), str(free_port()), str(count)]
    each = [([str(i)], {"PJRT_NPROC": "16"}) for i in range(count)]
    with Trainers(folder / "printed", arguments, each, cache, program=program) as started:
        assert started.end(limit=300) == [0] * count, started.printed(0)
        outputs = [started.printed(i) for i in range(count)]
    answers = [re.findall("^ANSWER (.*)$", output, re.MULTILINE) for output in outputs]
    return [json.loads(answer) for (answer,) in answers], outputs


def loaded(path):
    """The arrays of a file by their names, without the open file."""
    with np.load(path) as file:
        return dict(file)


def test_the_processes_together_have_a_cpu_device_for_each_worker(tmp_path):
    answers, _ = run("devices", tmp_path, 2)
    assert answers == [[4, 8]] * 2


# The library


@pytest.mark.slow  # a loop compiles as in one process
def test_a_loop_that_compiles_beside_its_steps_keeps_the_order_of_messages(tmp_path):
    answers, _ = run("looped", tmp_path, 2)
    assert answers == [True, True]


@pytest.mark.slow  # in one process `test_beside.py`
def test_messages_travel_beside_the_training_between_processes(tmp_path):
    answers, _ = run("beside", tmp_path, 2)
    assert answers == [[3], [3]]


def on_two_hosts(folder):
    """Runs the methods in four processes, of which 1 and 3 see another boot id."""
    shown = "/proc/sys/kernel/random/boot_id"
    other = folder / "boot_id"
    other.write_text("01234567-89ab-cdef-0123-456789abcdef\n")
    mount = f'mount --bind {other} {shown} && exec "$@"'
    elsewhere = ["unshare", "--mount", "sh", "-c", mount, "sh"]
    try:
        seen = subprocess.run([*elsewhere, "cat", shown], capture_output=True, text=True)
    except FileNotFoundError:
        seen = None
    if seen is None or seen.stdout != other.read_text():
        pytest.skip("no process can be made to see another boot id here")
    return run("methods", folder, 4, before=lambda i: elsewhere if i % 2 else [])


IN_TURN = [[0, 1], [4, 5], [2, 3], [6, 7]]  # two processes of two workers each per host


@pytest.mark.slow  # `test_device_grid.py` has the order of the hosts
@pytest.mark.parametrize("hosts", [1, 2])
def test_processes_on_any_hosts_give_the_same_parameters(hosts, tmp_path):
    """The node axis follows the hosts."""
    answers, _ = run("methods", tmp_path, 2) if hosts == 1 else on_two_hosts(tmp_path)
    owned = [answer["owned"] for answer in answers]
    assert owned == ([[0, 1, 2, 3], [4, 5, 6, 7]] if hosts == 1 else IN_TURN)
    assert all(answer["sums"] == answers[0]["sums"] for answer in answers)
    for method in jobs.METHODS:
        written = loaded(tmp_path / f"{method}.npz")
        for name, expected in jobs.train(method).items():
            got = written[name]
            assert np.ptp(expected, axis=0).max() > 1e-3  # the workers differ
            if method == "easgd":  # sums in another order
                np.testing.assert_allclose(got, expected, rtol=1e-6, atol=5e-7)
            else:
                np.testing.assert_array_equal(got, expected, err_msg=f"{method} {name}")
    # Workers sharded over devices of several processes equal whole ones in this one.
    written = loaded(tmp_path / "spread.npz")
    for name, expected in jobs.train("lsgd", lj.Workers(1, 2)).items():
        np.testing.assert_allclose(written[name], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.slow  # `test_diagnostics.py` has arrays that cannot be fetched
def test_diagnostics_are_printed_without_the_other_processes(tmp_path):
    (first, second), _ = run("printed", tmp_path, 2)
    assert "restored=[0, 0, 0, 0, None, None, None, None]" in first["alone"]
    assert first["fetched"] == second["fetched"]
    assert "restored=[0, 0, 0, 0, 0, 0, 0, 0]" in first["fetched"]


# The trainer


@pytest.mark.slow
def test_a_run_resumes_in_other_processes_with_the_same_or_other_workers(
    tmp_path, monkeypatch
):
    """Written by two processes, resumed by two with more workers, then by one."""
    tiny.install(set=monkeypatch.setattr)
    answers, _ = run("write_and_grow", tmp_path, 2)
    first, second = answers
    assert first["same"] and second["same"] and first["step"] == second["step"] == 6
    assert first["sources"] == second["sources"] and len(first["sources"]) == 8
    assert first["owned"] == [0, 1, 2, 3] and second["owned"] == [4, 5, 6, 7]
    folder = tmp_path / "run"
    after = loaded(tmp_path / "after.npz")
    again = open_run(jobs.configured(folder, 2, 4, steps=6, resume=True))
    assert again.step == 6 and again.resizing is None
    for name, x in jobs.numbers_of(again).items():
        np.testing.assert_array_equal(x, after[name])

    # The checkpoint before is that of the first four workers.
    shutil.rmtree(folder / "checkpoints" / "6")
    before = loaded(tmp_path / "before.npz")
    same = open_run(jobs.configured(folder, 2, 2, steps=6, resume=True))
    for name, x in jobs.numbers_of(same).items():
        np.testing.assert_array_equal(x, before[name])
    fewer = open_run(jobs.configured(folder, 1, 2, steps=6, resume=True))
    for name, x in jobs.numbers_of(fewer).items():
        np.testing.assert_array_equal(x, before[name][fewer.resizing.sources])
    assert len(fewer.resizing.sources) == 2


@pytest.mark.slow  # in one process `test_loop.py`
def test_two_processes_train_with_messages_beside_the_steps(tmp_path, cache):
    """By default; the numbers are those of one process with its messages in the step."""
    words = "digits --workers.nodes 2 --workers.locals 1 --method diloco --method.period 4 "
    words += "--method.delay 4 --method.late add --steps 12 --log-every 4 --test-every 6"
    found = []
    for count in (2, 1):
        folder = tmp_path / str(count)
        arguments = [*words.split(), "--run-dir", str(folder)]
        each = by_options(2) if count == 2 else [([], {})]
        with Trainers(tmp_path / f"printed-{count}", arguments, each, cache) as started:
            assert started.end() == [0] * count, started.printed(0)
        found.append(numbers(folder, 12))
        waits = ["exchange_wait_s" in event for event in events(folder, "train")]
        assert waits == [count == 2] * 3
    beside, inside = found
    assert beside.keys() == inside.keys()
    for name, x in inside.items():
        np.testing.assert_allclose(beside[name], x, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.slow
def test_two_processes_train_on_the_same_image_files(tmp_path, cache, monkeypatch, capsys):
    """Trained, tested, saved and resumed. Only the first process prints and writes."""
    install = functools.partial(tiny.install, set=monkeypatch.setattr)
    monkeypatch.setattr(tiny, "install", install)
    data = make_folder(tmp_path / "data", train=8, val=9)
    broken = [data / "train" / "bee" / "0.JPEG", data / "val" / "bee" / "0.JPEG"]
    for path in broken:
        path.write_bytes(b"")
    single = jobs.imagenet(tmp_path / "one", Session())
    printed = "".join(capsys.readouterr())
    assert all(printed.count(str(path)) == 1 for path in broken)
    answers, outputs = run("imagenet", tmp_path / "two", 2, cache=cache)
    assert answers[0] == answers[1] and answers[0]["step"] == single["step"] == 8
    assert answers[0]["error"] == pytest.approx(single["error"], abs=4)  # one of 26 images
    assert answers[0]["total"] == pytest.approx(single["total"], rel=1e-4)
    # Each process reports the files that it could not read, once in each of two runs.
    assert all(f"warning: {broken[0]} is left out" in output for output in outputs)
    assert sum(output.count(str(broken[1])) for output in outputs) == 2
    assert "test error" in outputs[0] and "test error" not in outputs[1]


@pytest.mark.slow
def test_processes_that_see_different_files_all_raise(tmp_path):
    for process in ("0", "1"):
        make_folder(tmp_path / process / "data", train=8, val=9)
    (tmp_path / "1" / "data" / "val" / "bee" / "0.JPEG").unlink()
    answers, _ = run("other_files", tmp_path, 2)
    assert answers == ["all processes must read the same images"] * 2
    assert not list(tmp_path.glob("*/result"))
