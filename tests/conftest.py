"""What tests of several packages share."""

import pytest


@pytest.fixture(scope="session")
def on_ray():
    """Ray, started once for all tests of this process that need it."""
    from lsgd_jax.asynchronous import ray_engine

    with ray_engine.cluster(ray_engine.Options(object_store=200 * 2**20), workers=5):
        yield
