"""Oracles that fail, are incomplete, or raise."""

import dataclasses

import jax
import numpy as np

import oracles
from train.accept import numbers


def wrong(case, at=0, by=1e-3):
    """The case with one expected number changed."""
    expected = {name: x.copy() for name, x in case.expected.items()}
    expected["b"].flat[at] += by
    return dataclasses.replace(case, expected=expected)


def test_every_method_is_among_the_numbers():
    """`tests/lsgd_jax/test_oracles.py` compares the oracles with the public names."""
    every = {oracles.load(name).method for name in oracles.NAMES}
    assert {oracles.load(name).method for name in numbers.names()} == every


def test_one_wrong_number_fails_the_part(monkeypatch):
    good = oracles.load("allreduce")
    monkeypatch.setattr(numbers, "names", lambda: ["good", "bad"])
    cases = {"good": good, "bad": wrong(good)}
    monkeypatch.setattr(oracles, "load", cases.get)
    found = list(numbers.check())
    assert [finding.verdict for finding in found] == ["passed", "failed"]
    assert found[0].seen < found[0].limit < found[1].seen
    assert abs(found[1].seen - 1e-3) < 1e-4


def test_numbers_that_are_missing_fail():
    case = oracles.load("allreduce")
    whole = case.expected
    assert numbers.worst(whole, case) == 0
    without_a_step = jax.tree.map(lambda x: x[1:], whole)
    without_a_leaf = {"w": whole["w"]}
    other_leaf = {"w": whole["w"], "c": whole["b"]}
    not_finite = {"w": whole["w"], "b": np.full_like(whole["b"], np.nan)}
    for seen in (without_a_step, without_a_leaf, other_leaf, not_finite):
        assert numbers.worst(seen, case) == np.inf


def test_a_method_that_raises_fails_and_the_others_go_on(monkeypatch):
    case = oracles.load("allreduce")

    def update(*_, **__):
        raise ValueError("no")

    raising = dataclasses.replace(case, tx=case.tx._replace(update=update))
    found = numbers.of_oracle(raising)
    assert (found.verdict, found.reason) == ("failed", "ValueError: no")
