"""Diagnostics are printed wherever their numbers are."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lsgd_jax as lj
from lsgd_jax._src.exchange import diagnostics


@pytest.fixture(scope="module")
def state():
    workers = lj.Workers(1, 2, devices=jax.devices()[:2])
    return workers.map(lj.lsgd(0.1, 0.0, 1, 1).init)(workers.put(jnp.ones((2, 3))))


def test_on_devices_and_on_the_host(state):
    (here,) = lj.diagnostics(state)
    assert "restored=[0, 0], dropped=[0, 0], dropped_in_a_row=[0, 0], " in repr(here)
    assert repr(jax.device_get(here)) == repr(here)


def test_numbers_that_are_not_there_are_shown_as_types(state):
    seen = []

    def look(state):
        seen.extend(lj.diagnostics(state))
        return seen[0].restored

    jax.eval_shape(look, state)
    (shapes,) = jax.eval_shape(lj.diagnostics, state)
    (donated,) = lj.diagnostics(state)
    donated.restored.delete()
    for each, steps in ((seen[0], "int32[]"), (shapes, "int32[]"), (donated, "0")):
        assert f"steps={steps}, " in repr(each) and "restored=int32[2]" in repr(each)


def test_rows_of_other_processes_are_not_fetched(monkeypatch):
    """An array as it is with two processes, of which this one has the second half."""

    class OfTwoProcesses:
        dtype = np.dtype(np.int32)
        shape = (4,)
        is_fully_addressable = is_fully_replicated = False
        addressable_shards = (
            types.SimpleNamespace(index=(slice(2, 3),), data=np.int32([7])),
            types.SimpleNamespace(index=(slice(3, 4),), data=np.int32([8])),
        )

        def is_deleted(self):
            return False

        def __array__(self, *args, **named):
            raise RuntimeError("spans devices of other processes")

    monkeypatch.setattr(jax, "Array", OfTwoProcesses)
    assert diagnostics._shown(OfTwoProcesses()) == [None, None, 7, 8]
