"""Fixtures for the tests of several packages."""

import pytest
from outside import times


@pytest.fixture(scope="session")
def on_ray():
    """Ray, started once for all tests of this process that need it."""
    from lsgd_jax.asynchronous import ray_engine

    with ray_engine.cluster(ray_engine.ClusterOptions(object_store=200 * 2**20), workers=5):
        yield


@pytest.fixture
def refusal(capsys, tmp_path, monkeypatch):
    """Checks wrong usage of a command: status 2, one line on stderr, no changed file."""
    monkeypatch.chdir(tmp_path)

    def refusal(main, arguments):
        before = times(tmp_path)
        try:
            status = main(arguments)
        except SystemExit as stop:
            status = stop.code
        captured = capsys.readouterr()
        assert (status, captured.out) == (2, "")
        assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
        assert times(tmp_path) == before
        return captured.err

    return refusal
