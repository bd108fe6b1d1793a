"""Emulated devices get enough threads, however they are requested; kernels on CPUs."""

import os

import jax
import pytest
from outside import python

import lsgd_jax as lj


NAMES = ("XLA_FLAGS", "PJRT_NPROC", "JAX_NUM_CPU_DEVICES")
CLEAN = {name: value for name, value in os.environ.items() if name not in NAMES}


@pytest.mark.parametrize(
    "code, settings, expected",
    [
        ("import jax, lsgd_jax as lj; lj.emulate_devices(6)", {}, 6),
        (
            "import jax; jax.config.update('jax_num_cpu_devices', 6); "
            "import lsgd_jax as lj; lj.tune_cpu()",
            {},
            6,
        ),
        ("import jax, lsgd_jax as lj; lj.tune_cpu()", {"JAX_NUM_CPU_DEVICES": "6"}, 6),
        (
            "import jax, lsgd_jax as lj; lj.tune_cpu()",
            {"XLA_FLAGS": "--xla_force_host_platform_device_count=6"},
            6,
        ),
        ("import jax, lsgd_jax as lj; lj.tune_cpu()", {}, 1),
    ],
)
@pytest.mark.slow
def test_every_way_to_request_devices_reserves_threads(code, settings, expected):
    show = "; import os; print(len(jax.devices()), os.environ.get('PJRT_NPROC', 0))"
    done = python("-c", code + show, env=CLEAN, timeout=60, JAX_PLATFORMS="cpu", **settings)
    assert done.returncode == 0, done.stderr
    devices, threads = map(int, done.stdout.split())
    assert devices == expected
    assert threads > 2 * devices if devices > 1 else threads == 0


@pytest.mark.slow
def test_the_import_changes_no_environment_variable():
    code = "import os; before = dict(os.environ); import lsgd_jax; "
    code += "assert dict(os.environ) == before"
    python("-c", code, env=CLEAN, timeout=60, JAX_NUM_CPU_DEVICES="4").check_returncode()


def test_emulating_devices_too_late_is_an_error():
    lj.Workers(1, 2)
    with pytest.raises(
        RuntimeError, match=r"call `lj.emulate_devices\(3\)` before"
    ) as told:
        lj.emulate_devices(3)
    assert "jax_num_cpu_devices" in str(told.value.__cause__)
    lj.emulate_devices(8)  # as many as there are


@pytest.mark.skipif(jax.__version_info__ >= (0, 13), reason="the flag may be unknown")
def test_the_kernel_flag_of_the_user_wins(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_mine=1")
    for _ in range(2):
        lj.tune_cpu()
    chosen = "--xla_cpu_experimental_ynn_fusion_type=LIBRARY_FUSION_TYPE_DOT"
    assert os.environ["XLA_FLAGS"].split() == [chosen, "--xla_mine=1"]
    monkeypatch.setenv("XLA_FLAGS", mine := "--xla_cpu_experimental_ynn_fusion_type=")
    lj.tune_cpu()
    assert os.environ["XLA_FLAGS"] == mine
