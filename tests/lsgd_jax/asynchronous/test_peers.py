"""Peers are chosen at random, and those that do not answer are asked less often."""

import collections

from lsgd_jax._src.asynchronous.peers import MOST, Peers


def test_all_are_chosen_about_as_often_and_the_same_from_the_same_seed():
    draw = lambda seed: [
        peers.choose() for peers in [Peers(range(4), seed)] for _ in range(400)
    ]
    assert draw((0, 1)) == draw((0, 1)) != draw((0, 2))
    assert min(collections.Counter(draw((0, 1))).values()) > 70
    assert Peers([]).choose() is None


def test_one_that_does_not_answer_is_asked_less_and_less_and_comes_back():
    peers, asked = Peers([7]), []
    for turn in range(300):
        if peers.choose() is not None:
            asked.append(turn)
            peers.failed(7)
    gaps = [b - a for a, b in zip(asked, asked[1:])]
    assert gaps[:4] == [2, 3, 5, 9] and max(gaps) == 2**MOST + 1
    while peers.choose() is None:
        pass
    peers.answered(7)
    assert [peers.choose() for _ in range(3)] == [7] * 3
