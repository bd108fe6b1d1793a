"""Tests and doctests see 8 CPU devices, and a collective that hangs is ended soon."""

import os


os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + (
    " --xla_cpu_collective_call_warn_stuck_timeout_seconds=20"
    " --xla_cpu_collective_call_terminate_timeout_seconds=60"
)
os.environ.setdefault("MPLBACKEND", "agg")

import jax  # noqa: E402

from lsgd_jax.devices import emulate_devices  # noqa: E402


emulate_devices(8)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.devices()  # made here and now: a command that is tested must not ask for others
