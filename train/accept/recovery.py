"""A run that is killed and resumed ends in the state of one that was not.

A child of each process trains, before this process uses a device. The child of the last
process ends by SIGKILL after the first checkpoint, and those of the others must notice.
Then the processes themselves resume the run, and train another one without a break.
"""

import contextlib
import io
import json
import math
import os
import pathlib
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from train import launch
from train.accept import victim
from train.accept.findings import Finding, at_most, failed, near
from train.accept.subject import is_on_cpu
from train.cluster.session import Session
from train.config import Config
from train.process.exit_status import RESUME
from train.run import loop
from train.run.folder import CHECKPOINTS
from train.run.open import open_run


PART = "recovery"
MORE = 8  # steps after the checkpoint
ENDED = "ended"  # begins the names of the files in which processes tell how a child ended
MISSES_ANOTHER = (RESUME, -signal.SIGABRT)  # statuses after the loss of a process
# Programs that are compiled again may have other kernels on an accelerator.
ROUNDING = 2e-5


class Killed(NamedTuple):
    """A run one of whose processes was killed.

    Attributes:
      folder: the folder that holds the run folder 'killed'.
      statuses: the exit status of the child of each process.
    """

    folder: pathlib.Path
    statuses: list[int]


# Before this process uses a device


def kill(arguments: Sequence[str], patience: float) -> Killed | str:
    """Trains in a child of each process until the last one has been killed.

    The processes have not met yet, so they tell one another by files.

    Args:
      arguments: the command line of this process.
      patience: seconds to wait for the children of all processes.

    Returns:
      The killed run, or why there is none.
    """
    deadline = time.monotonic() + patience
    child = launch.start(victim.MODULE, arguments, os.environ)
    try:
        said, _ = child.communicate(timeout=patience)
    except subprocess.TimeoutExpired:
        child.kill()
        said, _ = child.communicate()
        return f"the run was not killed within {patience:.0f} s: {last_line(said)}"
    lines = [line for line in said.splitlines() if line.startswith(victim.TELLS)]
    if not lines:
        return f"the run ended with status {child.returncode}: {last_line(said)}"
    folder, rank, count = json.loads(lines[0].removeprefix(victim.TELLS))
    folder = pathlib.Path(folder)
    written = folder / f"{ENDED}-{rank}.new"
    written.write_text(str(child.returncode))
    written.rename(folder / f"{ENDED}-{rank}")
    files = [folder / f"{ENDED}-{process}" for process in range(count)]
    while not all(map(pathlib.Path.exists, files)):
        if time.monotonic() > deadline:
            missing = [file.name for file in files if not file.exists()]
            return f"{folder} lacks {', '.join(missing)}: do all processes see this folder?"
        time.sleep(0.05)
    return Killed(folder, [int(file.read_text()) for file in files])


def last_line(said: str) -> str:
    """The last line of an output.

    >>> last_line("one\\n\\ntwo\\n")
    'two'
    """
    return (said.strip().splitlines() or ["it printed nothing"])[-1]


# With the devices


def check(killed: Killed | str, config: Config, session: Session) -> Iterator[Finding]:
    """Yields findings about the killed run and its resumption.

    Args:
      killed: what `kill` returned in this process.
      config: the configuration of `victim.config_of`.
      session: this process among the others.
    """
    reasons = session.gather(killed if isinstance(killed, str) else "")
    if any(reasons):
        # All processes leave, because one has no run to resume.
        reason = next(filter(None, reasons))
        yield failed(PART, "a run whose last process is killed", reason)
        return
    assert isinstance(killed, Killed)
    *others, last = killed.statuses
    yield near(PART, "status of the killed process", last, -signal.SIGKILL, 0.0)
    if others:
        good = sum(status in MISSES_ANOTHER for status in others)
        yield near(PART, "processes that noticed", good, len(others), 0.0)
    run_dir = killed.folder / "killed"
    steps = int(session.of_main(lambda: str(latest(run_dir)))) + MORE
    resumed, began = trained(
        victim.on_all_devices(config, run_dir, steps=steps, resume=True), session
    )
    yield near(PART, "step of the resumption", began, steps - MORE, 0.0)
    whole, _ = trained(
        victim.on_all_devices(config, killed.folder / "whole", steps=steps), session
    )
    limit = 0.0 if is_on_cpu() else ROUNDING
    yield at_most(PART, "resumed - undisturbed", difference(resumed, whole), limit)
    session.wait_for_all()
    if session.is_main:
        shutil.rmtree(killed.folder, ignore_errors=True)


def latest(run_dir: pathlib.Path) -> int:
    """The step of the latest checkpoint of a run, 0 if there is none."""
    found = (run_dir / CHECKPOINTS).glob("*")
    return max((int(path.name) for path in found if path.name.isdecimal()), default=0)


def trained(config: Config, session: Session) -> tuple[Any, int]:
    """Trains until the last step.

    Returns:
      The parameters and the optimizers' state on the host, and the step where it began.
    """
    run = open_run(config, session)
    began = run.step
    run.stopwatch.start()
    unseen = contextlib.redirect_stdout(io.StringIO())  # its progress
    with contextlib.closing(run.metrics), run.stop_signals, unseen:
        loop.take_steps(run)
    run.checkpoints.close()
    session.wait_for_all()
    if run.lock is not None:
        run.lock.release()
    state = run.state.params, run.state.opt_state
    return run.experiment.workers.fetch(state), began


def difference(some: Any, others: Any) -> float:
    """The largest difference between two trees; inf if they differ in form.

    >>> difference({"a": np.ones(2)}, {"a": np.zeros(2)})
    1.0
    >>> difference({"a": np.ones(2)}, {"b": np.ones(2)})
    inf
    """
    if jax.tree.structure(some) != jax.tree.structure(others):
        return math.inf
    largest = 0.0
    for x, y in zip(jax.tree.leaves(some), jax.tree.leaves(others), strict=True):
        if np.shape(x) != np.shape(y):
            return math.inf
        if not np.array_equal(x, y):
            apart = np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64))
            largest = max(largest, float(apart.max()))
            if not np.isfinite(apart).all():
                return math.inf
    return largest
