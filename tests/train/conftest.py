"""Fixtures for the tests of the trainer."""

import sys

import pytest
import tiny

from train.cluster import rendezvous, session


@pytest.fixture
def quick(monkeypatch):
    """Small networks; equal experiments are compiled once."""
    tiny.install(share=True, set=monkeypatch.setattr)


@pytest.fixture
def one_of_two(monkeypatch):
    """This process is one of two as soon as it joins. It ends by SystemExit."""
    monkeypatch.setattr(session, "LAST_LINES_S", 0.0)
    monkeypatch.setattr(session.os, "_exit", sys.exit)
    own = session.Session(0, ["a", "b"])
    monkeypatch.setattr(rendezvous, "join", lambda config: own)
