"""Requests of peers to a mailbox, and the moves that they leave in it."""

import threading

import numpy as np
import pytest

from lsgd_jax._src.asynchronous.engine.mailbox import CONTRIBUTED, GONE, KEPT, Mailbox


def vector(*values):
    return np.asarray(values, np.float32)


def showing(value, measure=0.0):
    mailbox = Mailbox()
    mailbox.show(lambda: vector(value), measure)
    return mailbox


def test_an_exchange_moves_both_half_the_way_and_keeps_the_sum():
    mailbox = showing(4.0)
    assert mailbox.exchange(vector(0.0)).tolist() == [4.0]
    assert mailbox.latest().vector.tolist() == [2.0]
    assert mailbox.exchange(vector(8.0)).tolist() == [2.0]  # after the first one
    assert mailbox.moved().tolist() == [1.0] and mailbox.moved() is None
    # Until the worker shows its new parameters, peers see it with the moves added.
    assert mailbox.latest().vector.tolist() == [5.0]
    mailbox.show(lambda: vector(6.0))
    assert mailbox.latest().vector.tolist() == [6.0] and mailbox.bytes_sent == 5 * 4


def test_vectors_that_are_not_finite_move_no_worker():
    mailbox = showing(4.0)
    assert mailbox.exchange(vector(np.nan)).tolist() == [4.0] and mailbox.moved() is None
    broken = showing(np.inf)
    assert broken.exchange(vector(1.0)).tolist() == [np.inf] and broken.moved() is None


def test_a_worker_that_has_ended_returns_what_it_gets():
    mailbox = showing(4.0)
    mailbox.exchange(vector(0.0))
    assert mailbox.moved(last=True).tolist() == [-2.0]
    assert mailbox.exchange(vector(7.0)).tolist() == [7.0] and mailbox.moved() is None


def test_a_contribution_stays_what_it_was_when_it_was_first_asked_for():
    mailbox = showing(1.0, measure=1.0)
    assert mailbox.contribution(2).measure == 1.0
    mailbox.show(lambda: vector(2.0), measure=2.0)
    assert mailbox.contribution(2).vector.tolist() == [1.0]
    _, mine, error = mailbox.contributed(3)
    assert mine.vector.tolist() == [2.0] and error is None
    for number in range(4, 4 + CONTRIBUTED):
        mailbox.contribution(number)
    assert mailbox.contribution(2).vector.tolist() == [2.0]  # forgotten, and begun anew
    assert Mailbox().contribution(1) is None


@pytest.mark.parametrize("asked, kept", [(0, KEPT), (1, KEPT), (KEPT + 5, KEPT + 5)])
def test_the_oldest_posts_are_forgotten_and_fetches_say_so(asked, kept):
    mailbox = Mailbox()
    mailbox.keep(asked)
    assert mailbox.fetch(0) is None
    for key in range(kept):
        mailbox.post(key, vector(key, key + 1))
    assert mailbox.fetch(0).tolist() == [0, 1]
    mailbox.post(kept, vector(kept, kept + 1))
    assert mailbox.fetch(0) == GONE
    assert mailbox.fetch(kept, slice(1, 2)).tolist() == [kept + 1]
    mailbox.drop(1)
    assert mailbox.fetch(1) == GONE


def test_a_wait_for_a_message_ends_when_it_is_posted():
    mailbox, got = Mailbox(), []
    ask = lambda: mailbox.fetch("key")
    waiting = threading.Thread(target=lambda: got.append(mailbox.wait(ask, timeout=20)))
    waiting.start()
    mailbox.post("key", vector(1.0))
    waiting.join()
    assert got[0].tolist() == [1.0] and mailbox.wait(lambda: None, timeout=0.01) is None


def test_a_function_that_is_posted_is_called_at_the_first_fetch():
    mailbox, made = Mailbox(), iter([vector(1.0), vector(2.0)])
    mailbox.post(0, lambda: next(made))
    mailbox.post(1, lambda: next(made))
    found = [mailbox.fetch(key).tolist() for key in (1, 0, 1)]
    assert found == [[1.0], [2.0], [1.0]] and mailbox.bytes_sent == 3 * 4
