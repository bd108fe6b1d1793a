"""Several processes of the trainer on this machine, with a time limit, for tests."""

import contextlib
import os
import random
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import psutil
import pytest
import tiny
from outside import ROOT

from train.metrics import log as records
from train.run import cli, loop
from train.run.open import open_run


LIMIT_S = 240

# Four workers on any number of processes; steps of a few milliseconds.
SMALL = (
    "digits --workers.nodes 2 --workers.locals 2 --batch-size 4 --method.local-period 2 "
    "--method.global-period 4 --log-every 2 --checkpoint-every 4 --test-every 1000000"
).split()

HEARTBEAT_S = 10
FOR_EVER = ["--steps", "1000000"]

END = 60  # the last step of runs by default

# Code that a process runs first. jax caches only the programs of process 0, so that the
# other processes, whose programs differ, would compile again and again.
EACH_KEEPS_ITS_OWN = (
    "from jax._src import compiler; from types import SimpleNamespace as Space; "
    "compiler.distributed = Space(global_state=Space(process_id=0)); "
)

# Code that a process runs first, to start fast.
TINY = "import tiny; tiny.install(); "

# Code that a process runs first, to take at most 10 steps per second.
SLOWLY = (
    "import time; from train.task.experiment import Experiment; "
    "whole = Experiment.batches; "
    "Experiment.batches = lambda *a: (time.sleep(0.1) or x for x in whole(*a)); "
)

# Proxies that do not exist: no trainer may use one to reach the others.
PROXIES = {"http_proxy": "http://127.0.0.1:9", "HTTPS_PROXY": "http://127.0.0.1:9"}


def train_here(*options):
    """Trains in this process with the network of `TINY`."""
    with pytest.MonkeyPatch.context() as patch:
        tiny.install(set=patch.setattr)
        loop.train(open_run(cli.parse([*SMALL, *options])))


def environment(cache=None, before="", **variables):
    """The environment variables of a process.

    cache: the folder for compiled programs. before: code that the process runs first.
    """
    left_out = ("XLA_FLAGS", "PJRT_NPROC", "JAX_NUM_CPU_DEVICES")
    kept = {k: v for k, v in os.environ.items() if k not in left_out}
    # Compiled as in this process; otherwise results would differ in the last bit.
    flags = os.environ.get("XLA_FLAGS", "").split()
    others = ("device_count", "collective")
    same_code = [flag for flag in flags if not any(word in flag for word in others)]
    kept["XLA_FLAGS"] = " ".join(same_code)
    if cache is not None:
        before = EACH_KEEPS_ITS_OWN + before
        variables["JAX_ENABLE_COMPILATION_CACHE"] = "true"
        variables["JAX_COMPILATION_CACHE_DIR"] = str(cache)
        variables["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        variables["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    paths = map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "first"))
    kept |= {"PYTHONPATH": os.pathsep.join(paths), "BEFORE": before}
    return kept | {"JAX_PLATFORMS": "cpu"} | variables


def free_port(candidates=(0,)):
    """The first free port among the candidates; 0 stands for any port."""
    for port in candidates:
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("127.0.0.1", port))
            return free.getsockname()[1]
    raise OSError("no free port")


def by_options(count):
    """For each process, the options and variables by which it finds the others."""
    coordinator = f"--distributed.coordinator=127.0.0.1:{free_port()}"
    number = f"--distributed.num-processes={count}"
    options = [[coordinator, number, f"--distributed.process-id={i}"] for i in range(count)]
    return [(option, {}) for option in options]


def by_slurm(count):
    """As `by_options`, but as srun does it on one host."""
    job = {"SLURM_JOB_ID": str(random.randrange(10**6)), "SLURM_NODEID": "0"}
    job |= {"SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": str(count)}
    job |= {"SLURM_NTASKS": str(count), "SLURM_STEP_NUM_TASKS": str(count)}
    ranks = map(str, range(count))
    return [([], job | {"SLURM_PROCID": i, "SLURM_LOCALID": i}) for i in ranks]


def by_open_mpi_5(count):
    """As `by_options`, but as mpirun of Open MPI 5 does it on one host."""
    job = {"PMIX_NAMESPACE": f"prterun-host-{free_port()}@1"}
    sizes = {"OMPI_COMM_WORLD_SIZE": str(count), "OMPI_COMM_WORLD_LOCAL_SIZE": str(count)}
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
    return [([], job | sizes | dict.fromkeys(names, str(i))) for i in range(count)]


class Trainers:
    """Processes of the trainer, numbered from 0.

    Args:
      folder: the folder for their output.
      arguments: the arguments of all processes.
      each: (options, variables) of each process.
      cache: see `environment`.
      before: see `environment`.
      program: what each process runs in place of the trainer.
    """

    def __init__(self, folder, arguments, each, cache=None, before="", program=None):
        program = program or [[sys.executable, "-m", "train"]] * len(each)
        folder.mkdir(parents=True, exist_ok=True)
        self._files = [folder / f"{i}.txt" for i in range(len(each))]
        self._processes = []
        for run, file, (options, variables) in zip(program, self._files, each):
            with open(file, "w") as output:
                self._processes.append(
                    subprocess.Popen(
                        [*run, *arguments, *options],
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env=environment(cache, before, **(PROXIES | variables)),
                    )
                )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self._processes:
            process.kill()
            process.wait()

    def send(self, number, process):
        self._processes[process].send_signal(number)

    def started(self):
        """The processes that the trainers have started so far, such as those of Ray."""
        each = [psutil.Process(process.pid) for process in self._processes]
        return [child for parent in each for child in parent.children(recursive=True)]

    def printed(self, process):
        return self._files[process].read_text()

    def last_line(self, process):
        return self.printed(process).rstrip("\n").rpartition("\n")[2]

    def until(self, holds):
        """Waits for a condition. Fails at the time limit, or if a process ends before."""
        deadline = time.monotonic() + LIMIT_S
        while not holds():
            texts = "\n".join(map(self.printed, range(len(self._files))))
            assert time.monotonic() < deadline, texts
            assert all(process.poll() is None for process in self._processes), texts
            time.sleep(0.001)

    def end(self, limit=LIMIT_S):
        """The exit statuses of all processes, which must end within `limit` seconds."""
        deadline = time.monotonic() + limit
        for process in self._processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0, deadline - time.monotonic()))
        texts = "\n".join(map(self.printed, range(len(self._files))))
        assert all(process.returncode is not None for process in self._processes), texts
        return [process.returncode for process in self._processes]


def events(run_dir, kind):
    """The events of a kind in a run's metrics so far."""
    exists = (run_dir / "metrics.jsonl").exists()
    return records.read(run_dir).get(kind, []) if exists else []


def reported(run_dir):
    """The last step in a run's metrics, or 0."""
    return max([event["step"] for event in events(run_dir, "train")], default=0)


def checkpoints(run_dir):
    """The steps of a run's complete checkpoints."""
    found = (run_dir / "checkpoints").glob("*")
    return sorted(int(path.name) for path in found if path.name.isdecimal())


def numbers(run_dir, step):
    """The arrays of a checkpoint by name."""
    path = (run_dir / "checkpoints" / str(step) / "state").absolute()
    checkpointer = ocp.PyTreeCheckpointer()
    kinds = checkpointer.metadata(path).item_metadata.tree
    whole = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), kinds)
    tree = checkpointer.restore(path, restore_args=whole)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def assert_equal_to_the_bit(some, others):
    """Except scores: a program for fewer devices may sum a window in another order."""
    assert some.keys() == others.keys() and len(some) > 10
    for name in some:
        rtol = 1e-6 if name.endswith("['score']") else 0.0
        np.testing.assert_allclose(some[name], others[name], rtol=rtol, err_msg=name)
