"""Described clusters: devices to compile for, without any of them."""

import collections
import dataclasses
import importlib.util
import math
import os
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from lsgd_jax._src.aot import chips, links
from lsgd_jax._src.aot.chips import Chip
from lsgd_jax._src.checks import check_positive_int


CUDA_PACKAGES = "jax_cuda13_plugin", "jax_cuda12_plugin"


@dataclasses.dataclass(frozen=True, eq=False)
class Pod:
    """A described cluster; `tpu` and `gpu` return it.

    Attributes:
      name: such as ``2 slices of v5p:4x4x4``.
      devices: all devices, slice by slice or host by host. They can be compiled for and
        hold no data.
      chip: public figures of a device; None if they are not known.
      groups: the number of slices (TPU) or hosts (GPU).
      unit: 'slice' or 'host', between which the network is slow.
    """

    name: str
    devices: tuple[jax.Device, ...]
    chip: Chip | None
    groups: int
    unit: str

    def __repr__(self) -> str:
        return f"{self.name} ({len(self.devices)} devices)"

    def mesh(self, *, hybrid: bool = False, **axes: int) -> Mesh:
        """Returns a mesh of all devices, with automatic axes.

        Args:
          hybrid: whether to order the devices of a slice along its links, as
            `jax.experimental.mesh_utils.create_hybrid_device_mesh` does, which MaxText
            uses. Otherwise they lie host by host.
          **axes: names and sizes. The first axes lie across slices or hosts, the last ones
            inside of them.

        Raises:
          ValueError: sizes whose product is not the number of devices, or for which there
            is no hybrid mesh.
        """
        for name, size in axes.items():
            check_positive_int(name, size)
        if math.prod(axes.values()) != len(self.devices):
            raise ValueError(
                f"the sizes of the axes must multiply to {len(self.devices)} devices, got "
                f"{', '.join(f'{name}={size}' for name, size in axes.items())}"
            )
        sizes = tuple(axes.values())
        grid = np.array(self.devices, dtype=object).reshape(sizes)
        if hybrid:
            grid = self._hybrid(sizes)
        return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))

    def _hybrid(self, sizes: tuple[int, ...]) -> np.ndarray:
        from jax.experimental import mesh_utils

        across = []
        left = self.groups
        for size in sizes:
            across.append(math.gcd(size, left))
            left //= across[-1]
        inside = [size // n for size, n in zip(sizes, across)]
        try:
            if self.groups == 1:
                return mesh_utils.create_device_mesh(inside, self.devices)
            return mesh_utils.create_hybrid_device_mesh(
                inside, across, self.devices, process_is_granule=self.unit == "host"
            )
        except (NotImplementedError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise ValueError(f"these axes have no hybrid mesh: {reason}") from error

    def across(self, device: jax.Device) -> int:
        """Returns the index of the slice (TPU) or of the host (GPU) of a device."""
        return _across(device, self.unit)

    @property
    def memory(self) -> int | None:
        """The bytes of HBM of a device that jax may use; None if they are not known.

        On GPUs jax takes 75 % unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise.
        """
        if self.chip is None:
            return None
        taken = float(os.environ.get("XLA_PYTHON_CLIENT_MEM_FRACTION", 0.75))
        return int(self.chip.memory * (1 if self.unit == "slice" else taken))

    @property
    def bandwidth(self) -> float:
        """The bytes per second that a host can send to other slices or hosts.

        They are the public figures of the chip, or 100 Gbit/s.
        """
        return self.per_host * self.chip.network if self.chip else 12.5e9

    def links(self, kind: str, devices: Sequence[jax.Device]) -> float:
        """Returns the share of its links that each device of a group in a slice can use.

        Args:
          kind: that of the collective, such as 'all-gather'.
          devices: the group.
        """
        if self.chip is None or not self.chip.links:  # all are behind a switch
            return 1.0

        def place(device):
            return tuple(getattr(device, "coords", ()))

        sizes = tuple(max(column) + 1 for column in zip(*map(place, self.devices)))
        return links.share(kind, list(map(place, devices)), sizes, self.chip.links)

    @property
    def per_host(self) -> int:
        """The number of devices on each host, which share its network."""
        hosts = collections.Counter(device.process_index for device in self.devices)
        return max(hosts.values())


def tpu(topology: str, slices: int = 1) -> Pod:
    """Describes slices of TPUs. Needs the extra `tpu`, and no TPU.

    Args:
      topology: the generation and the shape of a slice, such as ``"v5e:4x4"``,
        ``"v5p:2x2x2"``, ``"v6e:16x16"`` or ``"tpu7x:2x2x1"``.
      slices: the number of slices.

    Raises:
      ValueError: an unknown topology. ImportError: libtpu is missing.
    """
    check_positive_int("slices", slices)
    family = topology.partition(":")[0]
    if family not in chips.TPUS or not re.fullmatch(r"\w+:\d+(x\d+){1,2}", topology):
        raise ValueError(
            "`topology` must be a generation and a shape such as 'v5e:4x4' or "
            f"'v5p:2x2x2', with one of {', '.join(chips.TPUS)}, got {topology!r}"
        )
    if importlib.util.find_spec("libtpu") is None:
        raise ImportError(
            '`aot.tpu` needs libtpu: pip install -e ".[tpu]" in a checkout of lsgd_jax'
        )
    more = {"num_slices": slices} if slices > 1 else {}
    devices = _described(topology, "topology", platform="tpu", **more)
    name = f"{slices} slice{'s' * (slices > 1)} of {topology}"
    return _pod(name, devices, chips.TPUS[family], slices, "slice")


def gpu(kind: str, hosts: int = 1, each: int = 8) -> Pod:
    """Describes hosts with GPUs. Needs the extra `gpu-compile`, and no GPU or driver.

    Args:
      kind: ``"a100"``, ``"h100"``, ``"h200"`` or ``"b200"``.
      hosts: the number of hosts.
      each: the number of GPUs in a host.

    Raises:
      ValueError: an unknown GPU. ImportError: jax's plugin for CUDA is missing.
    """
    check_positive_int("hosts", hosts)
    check_positive_int("each", each)
    if kind not in chips.TARGETS:
        raise ValueError(
            f"`kind` must be one of {', '.join(chips.TARGETS)}, got kind={kind!r}"
        )
    if not any(map(importlib.util.find_spec, CUDA_PACKAGES)):
        raise ImportError(
            "`aot.gpu` needs jax's plugin for CUDA: "
            'pip install -e ".[gpu-compile]" in a checkout of lsgd_jax'
        )
    shape = f"{hosts}x1x{each}"
    target = chips.TARGETS[kind].text()
    devices = _described("", "kind", platform="cuda", topology=shape, target_config=target)
    name = f"{hosts} host{'s' * (hosts > 1)} of {each} {kind}"
    return _pod(name, devices, chips.GPUS[kind], hosts, "host")


def pod_of(devices: Iterable[jax.Device]) -> Pod:
    """Describes a cluster by its devices, which may also be real ones."""
    devices = tuple(devices)
    kind = devices[0].device_kind
    unit = "slice" if devices[0].platform == "tpu" else "host"
    known = (*chips.TPUS.values(), *chips.GPUS.values())
    chip = next((chip for chip in known if chip.kind == kind), None)
    groups = len({_across(device, unit) for device in devices})
    name = f"{groups} {unit}{'s' * (groups > 1)} of {kind}"
    return _pod(name, devices, chip, groups, unit)


def _pod(
    name: str, devices: Sequence[jax.Device], chip: Chip | None, groups: int, unit: str
) -> Pod:
    def order(device: Any) -> Any:
        return _across(device, unit), device.process_index, device.id

    return Pod(name, tuple(sorted(devices, key=order)), chip, groups, unit)


def _across(device: Any, unit: str) -> int:
    # Without `num_slices` devices have no slice_index.
    of_slice = getattr(device, "slice_index", 0)
    return device.process_index if unit == "host" else of_slice


def _described(name: str, argument: str, **options: Any) -> Sequence[jax.Device]:
    """The devices of a topology, or a ValueError of one line."""
    from jax.experimental import topologies

    _prepare()
    try:
        return topologies.get_topology_desc(name, **options).devices
    except NotImplementedError as error:
        raise ValueError(
            "jax has started without its CUDA plugin: call `aot.gpu` before jax uses a "
            "device, or set JAX_PLATFORMS=cpu before jax is imported"
        ) from error
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(
            f"`{argument}` is not one that XLA can compile for here: {reason}"
        ) from error


def _prepare() -> None:
    """Sets what libtpu and the CUDA plugin read when they are loaded.

    Without a TPU libtpu asks the cloud's metadata server for minutes, and a second process
    that loads it fails. Without cuDNN the plugin does not load, but compiling needs none.
    """
    has_tpu = any(map(os.path.exists, ("/dev/accel0", "/dev/vfio/0")))
    has_gpu = os.path.exists("/dev/nvidiactl")
    if not has_tpu:
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        # Any type will do; without one it prints that it found none.
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    if not has_gpu:
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    if not (has_tpu or has_gpu or jax.config.values["jax_platforms"]):
        # Otherwise jax tries both when it first needs a device, and prints errors.
        jax.config.update("jax_platforms", "cpu")
