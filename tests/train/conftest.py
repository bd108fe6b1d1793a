"""Fixtures for the tests of the trainer."""

import pytest
import tiny


@pytest.fixture
def quick(monkeypatch):
    """Small networks; equal experiments are compiled once."""
    tiny.install(share=True, set=monkeypatch.setattr)
