"""Public figures of accelerators, and the description of a GPU that XLA compiles for."""

from typing import NamedTuple


class Chip(NamedTuple):
    """Public figures of one device.

    Attributes:
      name: as in `tpu` and `gpu`.
      kind: jax's name, the `device_kind` of a device.
      memory: bytes of HBM; for GPUs, those that XLA may use.
      flops: peak bfloat16 operations per second, without sparsity.
      memory_bandwidth: bytes per second between HBM and the chip.
      link: bytes per second that a device can send to others in its slice or host, over all
        of its links.
      source: the page with these figures.
      network: bytes per second that a device can send to other slices or hosts: its share
        of the network of its host.
      links: the number of links of a chip in its torus; 0 where a switch connects devices.
      efficiency: the share of its figures that training reached in measured runs, with
        what is recomputed.
      overlaps: whether products and transfers to and from HBM run side by side; kernels of
        a GPU run one after another.
    """

    name: str
    kind: str
    memory: int
    flops: float
    memory_bandwidth: float
    link: float
    source: str
    network: float = 3.125e9
    links: int = 0
    efficiency: float = 0.5
    overlaps: bool = True


GIB = 2**30
GOOGLE = "https://cloud.google.com/tpu/docs/"
NVIDIA = "https://www.nvidia.com/en-us/"

# Links are half of the published numbers, which add both directions. The network of TPUs is
# that of https://jax-ml.github.io/scaling-book/tpus, of GPUs one adapter of 200 (A100) or
# 400 Gbit/s each. docs/results/pods.md has the runs behind the efficiency.
TPUS = {
    name: Chip(name, *figures[:5], f"{GOOGLE}{name}", *figures[5:])
    for name, figures in {
        "v5e": ("TPU v5 lite", 16 * GIB, 197e12, 819e9, 200e9, 3.125e9, 4, 0.75),
        "v5p": ("TPU v5", 95 * GIB, 459e12, 2765e9, 600e9, 6.25e9, 6, 0.7),
        "v6e": ("TPU v6 lite", 32 * GIB, 918e12, 1638e9, 400e9, 12.5e9, 4, 0.5),
        # jax has two devices per chip; each has half of the published figures.
        "tpu7x": ("TPU7x", 96 * GIB, 1153.5e12, 3690e9, 300e9, 6.25e9, 6, 0.5),
    }.items()
}


class GpuTarget(NamedTuple):
    """The numbers by which XLA distinguishes NVIDIA's GPUs.

    The source is xla/backends/gpu/target_config/specs in https://github.com/openxla/xla.
    """

    name: str
    capability: int
    cores: int
    fpus: int
    shared_memory: int
    shared_memory_optin: int
    bandwidth: int
    l2_cache: int
    clock: float
    memory: int

    def text(self) -> str:
        """The `target_config` of `jax.experimental.topologies`, a text protobuf."""
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: {self.shared_memory}
  shared_memory_per_block_optin: {self.shared_memory_optin}
  core_count: {self.cores} fpus_per_core: {self.fpus} clock_rate_ghz: {self.clock}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: {self.bandwidth} l2_cache_size: {self.l2_cache}
  device_memory_size: {self.memory}
  cuda_compute_capability {{ major: {self.capability} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{self.name}"
"""


_HOPPER = 9, 132, 128, 233472, 232448
TARGETS = {
    "a100": GpuTarget(
        "NVIDIA A100-SXM4-80GB",
        *(8, 108, 64, 167936, 166912),
        *(2039040000000, 41943040, 1.41, 85100068864),
    ),
    "h100": GpuTarget(
        "NVIDIA H100 80GB HBM3", *_HOPPER, 3352320000000, 52428800, 1.98, 84942979072
    ),
    "h200": GpuTarget("NVIDIA H200", *_HOPPER, 4800000000000, 52428800, 1.98, 151397597184),
    "b200": GpuTarget(
        "NVIDIA B200",
        *(10, 148, 128, 233472, 232448),
        *(7672320000000, 132644864, 1.965, 191514411008),
    ),
}
FIGURES = {
    "a100": (312e12, 2039e9, 300e9, f"{NVIDIA}data-center/a100/", 25e9),
    "h100": (989e12, 3350e9, 450e9, f"{NVIDIA}data-center/h100/", 50e9),
    "h200": (989e12, 4800e9, 450e9, f"{NVIDIA}data-center/h200/", 50e9),
    "b200": (2250e12, 7700e9, 900e9, f"{NVIDIA}data-center/dgx-b200/", 50e9),
}
GPUS = {
    name: Chip(name, x.name, x.memory, *FIGURES[name], efficiency=0.7, overlaps=False)
    for name, x in TARGETS.items()
}


def chip(name: str) -> Chip:
    """Returns the public figures of a chip.

    Raises:
      ValueError: an unknown name.

    >>> chip("v5e").flops
    197000000000000.0
    """
    known = TPUS | GPUS
    if name not in known:
        raise ValueError(f"`chip` must be one of {', '.join(known)}, got chip={name!r}")
    return known[name]
