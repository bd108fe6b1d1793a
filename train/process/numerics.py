"""Settings of jax and versions of packages that change the numbers of a run."""

import importlib.metadata
from typing import Any

import jax


JAX_SETTINGS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_explicit_x64_dtypes",
    "jax_high_dynamic_range_gumbel",
    "jax_numpy_dtype_promotion",
    "jax_random_seed_offset",
    "jax_softmax_custom_jvp",
    "jax_threefry_gpu_kernel_lowering",
    "jax_threefry_partitionable",
)
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def jax_settings() -> dict[str, Any]:
    """The current settings of jax, as JSON represents them; None if jax lacks one."""
    found = {name: getattr(jax.config, name, None) for name in JAX_SETTINGS}
    plain = bool | int | None
    return {name: x if isinstance(x, plain) else str(x) for name, x in found.items()}


def versions() -> dict[str, str]:
    """The versions of the packages that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # a build without metadata
    return found
