"""The peak of memory of a device that reports it, which CPUs do not."""

import types

import jax
import jax.numpy as jnp
import pytest

from train.accept import memory


@pytest.mark.parametrize("off, verdict", [(1.0, "passed"), (1.3, "failed"), (0, "failed")])
def test_the_peak_is_compared_with_the_plan(off, verdict, monkeypatch):
    x = jnp.ones((64, 64))
    program = jax.jit(lambda x, given: (x @ x,)).lower(x, x).compile()
    plan = program.memory_analysis()
    planned = plan.argument_size_in_bytes + plan.output_size_in_bytes
    planned += plan.temp_size_in_bytes

    in_use = 1e6  # of others, before
    stats = iter([in_use, in_use + off * planned])
    device = types.SimpleNamespace(
        platform="tpu",
        memory_stats=lambda: {"bytes_in_use": in_use, "peak_bytes_in_use": next(stats)},
    )
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    one = types.SimpleNamespace(
        phase=lambda is_due: None, whole=lambda phase: program, state=[x], given=x
    )
    monkeypatch.setattr(memory, "subject", lambda name: one)
    (found,) = memory.check()
    assert found.verdict == verdict
    assert found.expected == planned / 1e6


def test_a_cpu_is_left_out_with_a_reason():
    (found,) = memory.check()
    assert found.verdict == "skipped"
    assert found.reason == "not measured: cpu devices do not report their memory"
