"""What tests see from outside: programs in processes of their own, and files."""

import importlib.util
import os
import pathlib
import subprocess
import sys
import time


ROOT = pathlib.Path(__file__).parents[1]
PATH = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))


def python(*arguments, env=os.environ, timeout=120, cwd=None, **variables):
    """Runs Python with this repository and its tests on the path; returns the process."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**env, "PYTHONPATH": PATH, **variables},
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
    )


def loaded(path):
    """The module in a file that belongs to no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def times(folder):
    """The files below a folder, and when each was written."""
    files = filter(pathlib.Path.is_file, folder.rglob("*"))
    return {path: path.stat().st_mtime_ns for path in files}


def until(condition, seconds=30):
    """Waits for a condition; fails if it does not hold in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
