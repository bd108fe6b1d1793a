"""What the processes of a run must agree on. With one process nothing is communicated."""

import os

import jax
import jax.numpy as jnp

import lsgd_jax as lj
from train.cluster import key_value_store as coordination


def is_main() -> bool:
    """Whether this process prints, and writes files and figures."""
    return jax.process_index() == 0


def agree(text: str) -> str:
    """The main process's text, in every process."""
    return coordination.gather(text)[0] if coordination.is_joined() else text


def same_everywhere(text: str) -> bool:
    """Whether every process has passed the same text."""
    return not coordination.is_joined() or len(set(coordination.gather(text))) == 1


def wait_for_all() -> None:
    """Returns when every process has come here."""
    if coordination.is_joined():
        coordination.gather("")


def connect(workers: lj.Workers) -> None:
    """Connects the devices of all processes with one another, while all are here.

    They would do so when they first communicate while training, and there gloo, which CPUs
    use, gives up if one comes more than 30 s after another, from compiling for example.
    """
    if not coordination.is_joined():
        return
    wait_for_all()
    groups = lj.collectives.WORKER_AXES, *lj.collectives.WORKER_AXES
    meet = lambda x: [lj.collectives.mean(x, axes) for axes in groups]
    jax.block_until_ready(workers.map(meet)(workers.replicate(jnp.zeros([]))))


def cores() -> int:
    """CPU cores that this process may use, as far as Python tells."""
    count = getattr(os, "process_cpu_count", os.cpu_count)()  # the former: Python 3.13
    return count or 1
