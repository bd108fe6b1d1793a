"""The cache of compiled programs, which is on by default."""

import json
import os

import pytest
from outside import python

from train.process import compilation_cache


# Compiles a program; prints its result and the number of cache hits.
SCRIPT = """
import json, os, sys
import jax
from jax._src import monitoring
from train.process import compilation_cache

found = []
monitoring.register_event_listener(lambda event, **_: found.append(event))
compilation_cache.use()
result = float(jax.jit(lambda x: jax.numpy.sin(x) * 2)(1.0))
hits = found.count("/jax/compilation_cache/cache_hits")
size = jax.config.jax_compilation_cache_max_size
print(json.dumps({"result": round(result, 3), "hits": hits, "size": size}))
"""


def run(tmp_path, before="", options="", **variables):
    """Runs the script in a new process; returns (what it prints, its errors)."""
    script = before + SCRIPT.replace("use()", f"use({options})")
    kept = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    kept |= {"JAX_PLATFORMS": "cpu", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    kept |= {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    ended = python("-c", script, env=kept, timeout=60, **variables)
    assert ended.returncode == 0, ended.stderr
    said = json.loads(ended.stdout)
    assert said.pop("result") == 1.683
    return said, ended.stderr


def kept_in(folder):
    return sorted(path for path in folder.rglob("*-cache"))


@pytest.mark.slow
def test_a_program_is_compiled_once_and_again_if_its_file_is_damaged(tmp_path):
    folder = tmp_path / "cache" / "lsgd_jax" / "jax"
    size = compilation_cache.MAX_BYTES
    assert run(tmp_path) == ({"hits": 0, "size": size}, "")
    [program] = kept_in(folder)
    assert run(tmp_path) == ({"hits": 1, "size": size}, "")
    program.write_bytes(program.read_bytes()[:100])  # as after a full disk
    assert run(tmp_path) == ({"hits": 0, "size": size}, "")


@pytest.mark.slow
def test_each_process_keeps_its_programs_if_it_is_told_so(tmp_path):
    """jax keeps those of process 0 alone."""
    second = "from jax._src import distributed as d; d.global_state.process_id = 1; "
    assert run(tmp_path, before=second)[0]["hits"] == 0
    assert run(tmp_path, before=second)[0]["hits"] == 0
    each = {"before": second, "options": "each=True"}
    assert run(tmp_path, **each)[0]["hits"] == 0
    assert run(tmp_path, **each)[0]["hits"] == 1


def test_incomplete_programs_are_removed(tmp_path):
    for name in ("whole-cache", "whole-atime", "torn-cache", "other"):
        (tmp_path / name).touch()
    compilation_cache._make_ready(tmp_path)
    left = {path.name for path in tmp_path.iterdir()} - {".lockfile"}
    assert left == {"whole-cache", "whole-atime", "other"}


def test_an_unusable_folder_causes_one_warning(tmp_path):
    (tmp_path / "file").touch()
    said, errors = run(tmp_path, XDG_CACHE_HOME=str(tmp_path / "file"))
    assert said["hits"] == 0
    assert errors.startswith("warning: compiled programs are not kept for the next start")
    assert errors.count("\n") == 1


def test_the_users_own_folder_has_no_size_limit(tmp_path):
    mine = tmp_path / "mine"
    ended = run(tmp_path, JAX_COMPILATION_CACHE_DIR="~/mine")
    assert ended == ({"hits": 0, "size": -1}, "")
    assert len(kept_in(mine)) == 1 and not (tmp_path / "cache").exists()


@pytest.mark.parametrize("home", ["", "relative"])
def test_the_default_folder_is_in_the_users_cache(monkeypatch, home):
    monkeypatch.setenv("HOME", "/of/the/user")
    monkeypatch.setenv("XDG_CACHE_HOME", home)
    folder = compilation_cache.default_folder()
    assert folder.is_relative_to("/of/the/user/.cache/lsgd_jax/jax")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert compilation_cache.default_folder().is_relative_to("/elsewhere/lsgd_jax/jax")


def test_the_tests_do_not_use_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    compilation_cache.use()
    assert not (tmp_path / "cache").exists()
    assert os.environ["JAX_ENABLE_COMPILATION_CACHE"] == "false"
