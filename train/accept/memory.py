"""The peak of memory of a step, as the compiler plans it and as the device reports it."""

from collections.abc import Iterator

import jax

import lsgd_jax as lj
from train.accept.findings import Finding, failed, near, skipped
from train.accept.subject import subject
from train.accept.turns import TimedStep


PART = "memory"
NAME = "peak of a due step of diloco"
SHARE = 0.1  # of the planned peak
STEPS = 3


def check() -> Iterator[Finding]:
    """Yields one finding. It must be the first part that puts much on the devices.

    The peak is that of the process since it started.
    """
    device = jax.local_devices()[0]
    before = device.memory_stats()
    if not before or "peak_bytes_in_use" not in before:
        kind = f"{device.platform} devices do not report their memory"
        yield skipped(PART, NAME, f"not measured: {kind}")
        return
    one = subject("diloco")
    program = one.whole(one.phase(is_due=True))
    (planned,) = lj.aot.report_of(program).programs
    if planned.memory is None:
        yield failed(PART, NAME, "the compiler plans no memory")
        return
    TimedStep(program, one.state, one.given).seconds_per_step(STEPS)
    after = device.memory_stats() or {}
    expected = planned.memory.data / 1e6
    seen = (after.get("peak_bytes_in_use", 0) - before["bytes_in_use"]) / 1e6
    yield near(PART, NAME, seen, expected, SHARE * expected, "MB")
