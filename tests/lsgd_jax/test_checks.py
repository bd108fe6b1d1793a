"""Argument checks of factories, also with traced values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from lsgd_jax._src import checks


@pytest.mark.parametrize("value", [0.0, 0.5, 1, np.float32(1), jnp.float32(0.3)])
def test_numbers_in_range_pass(value):
    checks.check_fraction("beta", value)
    checks.check_not_negative("gap", value)


@pytest.mark.parametrize("value", [-0.1, float("nan"), jnp.float32(jnp.nan), "a", None])
def test_numbers_out_of_range_are_refused(value):
    with pytest.raises(ValueError, match="`beta` must be in .0, 1. .or a schedule., got"):
        checks.check_fraction("beta", value)
    with pytest.raises(ValueError, match="`gap` must be at least 0 and finite"):
        checks.check_not_negative("gap", value)


def test_numbers_have_the_documented_bounds():
    checks.check_not_negative("gap", 7)
    for check, value in (
        (checks.check_not_negative, float("inf")),
        (checks.check_fraction, 7),
    ):
        with pytest.raises(ValueError, match="must be"):
            check("gap", value)


def test_traced_numbers_pass_and_traced_counts_are_refused_with_a_remedy():
    def factory(beta, period):
        checks.check_fraction("beta", beta)
        checks.check_not_negative("beta", beta)
        if period is not None:
            checks.check_positive_int("period", period)
        return beta

    jax.jit(factory)(2.0, None)  # a traced number has no value yet
    with pytest.raises(ValueError, match=r"known before tracing.*static_args\(lj.lsgd\)"):
        jax.jit(factory)(0.5, 2)


@pytest.mark.parametrize("manual", [{"node"}, {"node", "model"}])
def test_a_mesh_with_explicit_axes_is_refused_where_they_are_not_manual(manual):
    def trace(kind):
        mesh = jax.make_mesh((2, 2), ("node", "model"), axis_types=(kind,) * 2)
        f = lambda x: (checks.check_all_auto(), x)[1]
        mapped = jax.shard_map(
            f, mesh=mesh, axis_names=manual, in_specs=PartitionSpec("node"),
            out_specs=PartitionSpec("node"),
        )  # fmt: skip
        with jax.set_mesh(mesh):
            x = jax.device_put(jnp.ones((2, 4)), PartitionSpec("node"))
            jax.eval_shape(mapped, x)

    trace(AxisType.Auto)
    if "model" in manual:
        trace(AxisType.Explicit)
        return
    with pytest.raises(ValueError, match="must be AxisType.Auto, but 'model' is Explicit"):
        trace(AxisType.Explicit)
