"""The same code in several processes: the same numbers, files by the first one only."""

import functools
import json
import pathlib
import socket
import subprocess
import sys

import pytest
import tiny
from images import make_folder
from processes import together
from trainers import environment

from train.cluster.session import Session


HERE = pathlib.Path(__file__).parent
LIMIT_S = 300
pytestmark = pytest.mark.slow


def run(job, folder, count, script="together.py", before=lambda i: [], cache=None):
    """What every process answers; all are ended after a hard limit.

    before: process -> a command that is to run the process. cache: see `environment`.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            [
                *before(i),
                sys.executable,
                HERE / script,
                job,
                folder,
                str(port),
                str(count),
                str(i),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(cache, PJRT_NPROC="16"),
        )
        for i in range(count)
    ]
    try:
        outputs = [process.communicate(timeout=LIMIT_S)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    answers = []
    for process, output in zip(processes, outputs):
        assert process.returncode == 0, output
        (line,) = [x for x in output.splitlines() if x.startswith("ANSWER ")]
        answers.append(json.loads(line.removeprefix("ANSWER ")))
    return answers, outputs


IN_TURN = [[0, 1], [4, 5], [2, 3], [6, 7]]  # two processes with two workers on each host


def test_the_node_axis_follows_the_hosts():
    """Processes 0 and 2 are one node of four workers, 1 and 3 the other one."""
    answers, _ = run("lsgd_oracle_on_pretended_hosts", HERE.parent / "oracles", 4)
    assert [answer["owned"] for answer in answers] == IN_TURN


def test_hosts_are_told_apart_by_their_boot_ids(tmp_path):
    """Two of the processes are shown another boot id, as if they were on another host."""
    shown = "/proc/sys/kernel/random/boot_id"
    other = tmp_path / "boot_id"
    other.write_text("01234567-89ab-cdef-0123-456789abcdef\n")
    mount = f'mount --bind {other} {shown} && exec "$@"'
    elsewhere = ["unshare", "--mount", "sh", "-c", mount, "sh"]
    try:
        seen = subprocess.run([*elsewhere, "cat", shown], capture_output=True, text=True)
    except FileNotFoundError:
        seen = None
    if seen is None or seen.stdout != other.read_text():
        pytest.skip("the boot id cannot be covered here")
    before = lambda i: elsewhere if i % 2 else []
    answers, _ = run("lsgd_oracle", HERE.parent / "oracles", 4, before=before)
    assert [answer["owned"] for answer in answers] == IN_TURN


def test_images_in_files_over_two_processes_are_the_same(
    tmp_path, cache, monkeypatch, capsys
):
    """Trained, tested, saved and resumed; the first process prints and writes."""
    install = functools.partial(tiny.install, set=monkeypatch.setattr)
    monkeypatch.setattr(tiny, "install", install)
    data = make_folder(tmp_path / "data", train=8, val=9)
    broken = [data / "train" / "bee" / "0.JPEG", data / "val" / "bee" / "0.JPEG"]
    for path in broken:
        path.write_bytes(b"")
    single = together.imagenet(tmp_path / "one", Session())
    printed = "".join(capsys.readouterr())
    assert all(printed.count(str(path)) == 1 for path in broken)
    answers, outputs = run("imagenet", tmp_path / "two", 2, cache=cache)
    assert answers[0] == answers[1] and answers[0]["step"] == single["step"] == 8
    assert answers[0]["error"] == pytest.approx(single["error"], abs=4)  # one of 26 images
    assert answers[0]["total"] == pytest.approx(single["total"], rel=1e-4)
    # Each process says what it could not read; each of its two runs says it once.
    assert all(f"warning: {broken[0]} is left out" in output for output in outputs)
    assert sum(output.count(str(broken[1])) for output in outputs) == 2
    assert "test error" in outputs[0] and "test error" not in outputs[1]


def test_processes_that_see_other_files_all_end_with_an_error(tmp_path):
    for process in ("0", "1"):
        make_folder(tmp_path / process / "data", train=8, val=9)
    (tmp_path / "1" / "data" / "val" / "bee" / "0.JPEG").unlink()
    answers, _ = run("other_files", tmp_path, 2)
    assert answers == ["the images must be the same files for all processes"] * 2
    assert not list(tmp_path.glob("*/result"))
