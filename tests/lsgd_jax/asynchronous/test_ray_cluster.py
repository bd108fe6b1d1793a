"""Ray's errors in one line, without Ray."""

import pytest

from lsgd_jax._src.asynchronous.ray import cluster as ray_cluster


@pytest.mark.parametrize(
    "address, error, line",
    [
        (None, Exception("timed out after 60 s"), "Ray did not start on this machine"),
        ("auto", ConnectionError("none"), "no Ray cluster answers at auto"),
        ("h:1", RuntimeError("InvalidAuthToken"), "set RAY_AUTH_MODE=token"),
    ],
)
def test_errors_of_ray_are_one_line_with_what_to_try(address, error, line):
    advice = ray_cluster.advice(address, error)
    assert line in advice and "\n" not in advice and str(error) in advice
