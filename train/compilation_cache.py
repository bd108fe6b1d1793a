"""jax's persistent compilation cache: programs are compiled once, not at every start.

jax's own settings place it (JAX_COMPILATION_CACHE_DIR=DIR) and turn it off
(JAX_ENABLE_COMPILATION_CACHE=false). By default it lies in the user's cache folder, which
several versions of jax and of Python may share: each finds only what it has compiled.
"""

import contextlib
import hashlib
import os
import pathlib
import platform
import re
import sys
import tempfile
import warnings
from typing import Any

import filelock
import jax


MAX_BYTES = 2**30  # the programs of `digits` take 0.5 MB
# Of the 9 s that `digits` compiles for, 0.3 s are programs below this, half of all. They
# are left out: jax looks at all there are whenever it keeps one.
MIN_COMPILE_S = 0.05

# What jax warns of for each program that it cannot read or keep, and then compiles.
PER_PROGRAM = "Error (reading|writing) persistent compilation cache|Cache value for key"


def use(say: bool = True) -> None:
    """Turns it on; call it before jax compiles anything.

    Args:
      say: whether to print one line if the programs cannot be kept.
    """
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
            pathlib.Path(given).mkdir(parents=True, exist_ok=True)
            _check_writable(pathlib.Path(given))
    except (OSError, RuntimeError) as error:  # the latter: the user has no home folder
        jax.config.update("jax_enable_compilation_cache", False)
        if say:
            print(
                f"warning: compiled programs are not kept for the next start: {error} "
                "(JAX_COMPILATION_CACHE_DIR names another folder)",
                file=sys.stderr,
            )
        return
    _default("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_S)
    warnings.filterwarnings("ignore", message=PER_PROGRAM)


def default_folder() -> pathlib.Path:
    """In the user's cache folder; one for each kind of CPU.

    Several hosts may share it, and what is compiled for one CPU may end with SIGILL on
    another.
    """
    base = pathlib.Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        base = pathlib.Path.home() / ".cache"
    return base / "lsgd_jax" / "jax" / _cpu()


def _cpu() -> str:
    """A name for what the CPU here can do."""
    features = platform.processor()
    with contextlib.suppress(OSError):
        text = pathlib.Path("/proc/cpuinfo").read_text()
        found = re.search("^(flags|Features)\\s*:(.*)$", text, flags=re.MULTILINE)
        features = found[2] if found else features
    return f"{platform.machine()}-{hashlib.sha256(features.encode()).hexdigest()[:8]}"


def _make_ready(folder: pathlib.Path) -> None:
    """Makes the folder, and removes what was not written to the end.

    jax writes NAME-cache and then NAME-atime. It replaces no program that it cannot read,
    and 0.10.2 keeps no more if an -atime is missing.

    Raises:
      OSError: it cannot be written to.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _check_writable(folder)
    # Whoever writes one now holds jax's lock.
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
    """Sets what the user has not set."""
    if name.upper() not in os.environ:
        jax.config.update(name, value)
