"""Tests and doctests see 8 CPU devices, and a collective that hangs ends soon."""

import gc
import os
import signal

import jax
import pytest


FLAGS = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=20",
    "--xla_cpu_collective_call_terminate_timeout_seconds=60",
    "--xla_cpu_parallel_codegen_split_count=1",
)
# Tests compile much and run little, and unoptimized code compiles three times as fast.
# Later versions of jax abort on the second flag, and with the first they round differently.
if jax.__version_info__ < (0, 11):
    FLAGS += ("--xla_backend_optimization_level=0", "--xla_cpu_use_fusion_emitters=false")
# In front, so that flags of the caller win.
os.environ["XLA_FLAGS"] = " ".join((*FLAGS, os.environ.get("XLA_FLAGS", "")))
os.environ.setdefault("MPLBACKEND", "agg")
# A script's background jobs ignore SIGINT, and so would the programs that tests interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Neither tests nor the programs that they start write to the user's compilation cache.
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
jax.config.update("jax_enable_compilation_cache", False)

from lsgd_jax._src.workers.devices import emulate_devices, tune_cpu  # noqa: E402


emulate_devices(8)
tune_cpu()
jax.config.update("jax_numpy_rank_promotion", "raise")
# Noting where in the source each operation stands takes some of the time of compiling it.
jax.config.update("jax_traceback_in_locations_limit", 0)
jax.devices()  # makes the devices now, because a tested command must not change them


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config):
    """Two processes for the whole suite; tests that are named run in this one."""
    return 2 if config.args_source is pytest.Config.ArgsSource.TESTPATHS else 0


# Of a minute and more. They begin first, so that at the end no process waits for another.
LONGEST = "test_every_statement_in_full", "test_the_published_levels_at_high_ranks"


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.name not in LONGEST)


def pytest_collection_finish():
    """Tracing makes many objects; looking through all of them took a tenth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)
