"""Devices for a run on a machine that has too few."""

import os

import lsgd_jax as lj
from train.cluster import key_value_store as coordination


def provide(workers: int) -> None:
    """Lets a CPU pass for one device per worker; call it before jax uses a device.

    Of several processes each provides for its share of the workers.

    GPUs and TPUs are used as they are (several workers per device if need be), and so is
    what JAX_NUM_CPU_DEVICES or XLA_FLAGS asks for.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    asked = "xla_force_host_platform_device_count" in flags
    if asked or "JAX_NUM_CPU_DEVICES" in os.environ:
        return
    try:
        lj.emulate_devices(max(1, workers // len(coordination.members())))
    except RuntimeError:
        pass  # jax has its devices already: they hold several workers each if need be
