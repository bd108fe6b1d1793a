"""The words of process 0, which the others hear whenever they start."""

import types

import jax
import pytest

from train.cluster import words
from train.cluster.session import Session
from train.cluster.words import Words


class Store(dict):
    """The key-value store of jax's service."""

    def key_value_set(self, key, text, allow_overwrite):
        self[key] = text

    def blocking_key_value_get(self, key, timeout_ms):
        if key not in self:
            raise jax.errors.JaxRuntimeError(f"DEADLINE_EXCEEDED: {timeout_ms} ms")
        return self[key]


@pytest.fixture(autouse=True)
def store(monkeypatch):
    service = types.SimpleNamespace(global_state=types.SimpleNamespace(client=Store()))
    monkeypatch.setattr(words, "distributed", service)


def of(process):
    return Session(process, [f"host {process}"], Words(process, patience=1))


def test_others_hear_the_words_in_their_order_also_later():
    main = of(0)
    assert [main.words.of_main(text) for text in "ab"] == ["a", "b"]
    for process in (1, 2, 1):  # process 1 starts again
        other = of(process)
        assert [other.words.of_main("") for _ in "ab"] == ["a", "b"]


def test_process_0_finds_no_difference_and_another_one_does():
    assert of(0).same_everywhere("text of 0")
    assert of(1).same_everywhere("text of 0")
    assert not of(2).same_everywhere("another one")
    assert of(2).compared("another one") == {0: "text of 0", 2: "another one"}


def test_silence_of_process_0_is_told():
    with pytest.raises(jax.errors.JaxRuntimeError, match="DEADLINE_EXCEEDED: 1000 ms"):
        of(1).words.of_main("")


def test_each_process_is_alone_and_writes_and_only_process_0_prints_and_tests():
    for process in range(2):
        session = of(process)
        assert session.is_main and not session.has_others and not session.is_alone
        assert session.prints == session.tests == (process == 0)
    assert Session().is_alone and Session().tests
    assert Session(1, ["a", "b"]).tests and not Session(1, ["a", "b"]).is_alone
