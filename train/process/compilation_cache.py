"""jax's persistent compilation cache: programs are compiled once, not at every start.

jax's own settings choose its folder (JAX_COMPILATION_CACHE_DIR=DIR) and turn it off
(JAX_ENABLE_COMPILATION_CACHE=false). By default it is in the user's cache folder. Several
versions of jax and Python may share it, because each finds only its own programs.
"""

import contextlib
import hashlib
import os
import pathlib
import platform
import re
import sys
import tempfile
import types
import warnings
from typing import Any

import filelock
import jax
from jax._src import compiler, distributed

from train.process.messages import plain


MAX_BYTES = 2**30  # the programs of `digits` take 0.5 MB
# Half of the programs of `digits` compile faster than this, but take only 0.3 s of 9 s in
# total. They are not cached: jax scans the whole cache whenever it adds a program.
MIN_COMPILE_S = 0.05

# Warnings of jax for each program that it cannot read or write; it compiles them instead.
PER_PROGRAM = "Error (reading|writing) persistent compilation cache|Cache value for key"


class FirstProcess:
    """The processes as jax's compiler sees them, which keeps programs of process 0 alone.

    Attributes:
      process_id: of this process, as if it was the first one.
    """

    process_id = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(distributed.global_state, name)


def use(say: bool = True, each: bool = False) -> None:
    """Turns the cache on. Call it before jax compiles anything.

    Args:
      say: whether to print a warning if the cache cannot be used.
      each: whether each process keeps its programs, which are its own.
    """
    if each:
        module: Any = compiler
        module.distributed = types.SimpleNamespace(global_state=FirstProcess())
    settings: Any = jax.config
    given = settings.jax_compilation_cache_dir
    if not settings.jax_enable_compilation_cache:
        return
    try:
        if given is None:
            folder = default_folder()
            _make_ready(folder)
            jax.config.update("jax_compilation_cache_dir", str(folder))
            _default("jax_compilation_cache_max_size", MAX_BYTES)
        elif "://" not in given:
            folder = pathlib.Path(os.path.expanduser(given))
            folder.mkdir(parents=True, exist_ok=True)
            _check_writable(folder)
            jax.config.update("jax_compilation_cache_dir", str(folder))
    except (OSError, RuntimeError) as error:  # RuntimeError: the user has no home folder
        jax.config.update("jax_enable_compilation_cache", False)
        if say:
            print(
                "warning: compiled programs are not kept for the next start: "
                f"{plain(str(error))} "
                "(JAX_COMPILATION_CACHE_DIR names another folder)",
                file=sys.stderr,
            )
        return
    _default("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_S)
    warnings.filterwarnings("ignore", message=PER_PROGRAM)


def default_folder() -> pathlib.Path:
    """The default cache folder: in the user's cache folder, one per kind of CPU.

    Hosts may share a home folder, and a program compiled for one CPU may die with SIGILL on
    another.
    """
    base = pathlib.Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        base = pathlib.Path.home() / ".cache"
    return base / "lsgd_jax" / "jax" / _cpu()


def _cpu() -> str:
    """A name for the instruction set of this CPU."""
    features = platform.processor()
    with contextlib.suppress(OSError):
        text = pathlib.Path("/proc/cpuinfo").read_text()
        found = re.search("^(flags|Features)\\s*:(.*)$", text, flags=re.MULTILINE)
        features = found[2] if found else features
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"


def _make_ready(folder: pathlib.Path) -> None:
    """Creates the folder, and removes programs that were not written completely.

    jax writes NAME-cache and then NAME-atime. It never replaces a program that it cannot
    read, and jax 0.10.2 stops writing to the cache if an -atime file is missing.

    Raises:
      OSError: the folder is not writable.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_writable(folder)
    # A process that writes a program holds jax's lock.
    lock = filelock.FileLock(folder / ".lockfile", timeout=1)
    with contextlib.suppress(filelock.Timeout), lock:
        names = set(os.listdir(folder))
        for name in names:
            stem = name.removesuffix("-cache")
            if stem != name and f"{stem}-atime" not in names:
                (folder / name).unlink(missing_ok=True)


def _check_writable(folder: pathlib.Path) -> None:
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(4096))


def _default(name: str, value: float) -> None:
    """Changes a setting of jax unless the user has set it in the environment."""
    if name.upper() not in os.environ:
        jax.config.update(name, value)
