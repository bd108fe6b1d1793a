"""Ray's errors in one line, without Ray."""

import os
import socket
import subprocess
import sys
from types import SimpleNamespace

import pytest
import ray

from lsgd_jax._src.asynchronous.ray import cluster as ray_cluster


@pytest.mark.parametrize(
    "address, error, line",
    [
        (None, Exception("timed out after 60 s"), "Ray did not start on this machine"),
        ("auto", ConnectionError("none"), "no Ray cluster answers at auto"),
        ("h:1", RuntimeError("InvalidAuthToken"), "set RAY_AUTH_MODE=token"),
    ],
)
def test_errors_of_ray_are_one_line_with_what_to_try(address, error, line):
    advice = ray_cluster.advice(address, error)
    assert line in advice and "\n" not in advice and str(error) in advice


@pytest.fixture
def health(monkeypatch):
    """node -> the health of this part of Ray, as the seconds go by that it is given."""

    def of(**node):
        monkeypatch.setattr(ray._private.worker, "_global_node", SimpleNamespace(**node))
        monkeypatch.setattr(ray_cluster.time, "monotonic", lambda: now[0])
        return ray_cluster.Health(), now

    now = [0.0]
    return of


@pytest.mark.parametrize("part", ["gcs_server", "raylet"])
def test_a_process_of_ray_that_has_ended_is_an_error_at_once(part, health):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    found, _ = health(all_processes={part: [SimpleNamespace(process=process)]})
    found.check()
    assert not found.is_lost
    process.kill(), process.wait(), process.stdin.close()
    with pytest.raises(RuntimeError, match=f"Ray has failed: its process {part} has ended"):
        found.wait([], timeout=1000)
    assert found.is_lost


def test_the_head_of_a_joined_cluster_may_be_silent_for_a_while(health):
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        found, now = health(all_processes={}, gcs_address=address)
        now[0] = 100.0
        found.check()
    for now[0] in (102.0, 129.0):
        found.check()
    now[0] = 131.0
    with pytest.raises(RuntimeError, match=f"its head at {address} cannot be reached"):
        found.check()


def test_ids_of_rays_processes_are_left_out():
    error = Exception("The actor died unexpectedly.\n\tclass_name: X\n\tpid: 7\nDead.")
    assert ray_cluster.in_one_line(error) == "The actor died unexpectedly. Dead."


def test_sessions_of_processes_that_were_killed_are_removed(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    owners = {"killed": ended.pid, "running": os.getppid(), "not ours": None, "new": None}
    for name, pid in owners.items():
        (tmp_path / name).mkdir()
        if pid is not None:
            (tmp_path / name / ray_cluster.OWNER).write_text(str(pid))
    ray_cluster.claim(tmp_path / "new")
    assert {path.name for path in tmp_path.iterdir()} == {"running", "not ours", "new"}
    assert (tmp_path / "new" / ray_cluster.OWNER).read_text() == str(os.getpid())


@pytest.mark.parametrize("mode, expected", [(None, 0o600), (0o644, 0o644)])
def test_a_token_that_ray_writes_is_private(mode, expected, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    if mode is not None:
        token.touch(mode)
        token.chmod(mode)
    with ray_cluster._private_token():
        token.write_text("secret")
    assert token.stat().st_mode & 0o777 == expected
