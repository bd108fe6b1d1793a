"""What several processes, here threads, tell one another."""

import time

import pytest
from memory_store import Service, each, sessions

from train.cluster import private_jax
from train.cluster.lost import Late, Lost
from train.cluster.session import Session


COUNT = 3


def test_all_get_the_texts_of_all_in_order():
    def process(session):
        time.sleep(0.02 * (COUNT - session.process_id))
        first = session.gather(f"first of {session.process_id}")
        return first, session.gather(f"second of {session.process_id}")

    texts = [[f"{word} of {i}" for i in range(COUNT)] for word in ("first", "second")]
    assert each(COUNT, process) == [tuple(texts)] * COUNT


def test_the_main_process_decides():
    assert each(COUNT, lambda s: s.agree(str(s.process_id))) == ["0"] * COUNT
    assert [session.is_main for session in sessions(COUNT)] == [True, False, False]


def test_what_differs_is_noticed_by_all():
    assert each(COUNT, lambda s: s.same_everywhere("a")) == [True] * COUNT
    differ = lambda s: s.same_everywhere("b" if s.process_id == 1 else "a")
    assert each(COUNT, differ) == [False] * COUNT


def test_no_process_goes_on_before_all_have_come():
    arrived = []

    def process(session):
        time.sleep(0.05 * session.process_id)
        arrived.append(session.process_id)
        session.wait_for_all()
        return len(arrived)

    assert each(COUNT, process) == [COUNT] * COUNT


def test_a_process_by_itself_waits_for_none(capsys):
    session = Session.single()
    session.wait_for_all()
    session.connections.make(None)  # nothing to connect
    assert session.same_everywhere("a") and session.agree("a") == "a"
    assert session.lost_members() == set() and not session.has_lost_some
    session.check_no_member_is_lost()
    assert session.leave(2, "no such data") == 2
    assert session.leave(130, "interrupted") == 130
    assert capsys.readouterr().err == "error: no such data\ninterrupted\n"


def test_who_is_lost_is_not_waited_for():
    session = sessions(COUNT)[0]
    session.note_lost([2])
    with pytest.raises(Lost, match="lost: process 2") as caught:
        session.gather("")
    assert caught.value.processes == [2]


def test_who_asks_whom_it_has_lost_is_not_waited_for():
    """It never comes, and waits for the others to ask, too."""
    asks, waits = sessions(2)
    folder = waits.new_folder("x")
    assert asks.lost_members() == set()
    with pytest.raises(Lost):
        waits.wait_for_members(folder)
    for session in (asks, waits):
        session.write(folder, str(session.process_id))
    assert waits.wait_for_members(folder) == {0: "0", 1: "1"}


def test_waiting_comes_to_an_end():
    session = sessions(COUNT)[0]
    folder = session.new_folder("x")
    session.write(folder, "")
    names = r"process 1 \(host b\) and process 2 \(host c\)"
    with pytest.raises(Late, match=f"{names} did not come within 0.05 s"):
        session.wait_for_members(folder, timeout=0.05)


def test_those_who_stay_talk_among_themselves():
    """However far each was, and whatever the lost one has left behind."""
    service = Service()
    service.dead.add(1)
    stay = lambda session: session.process_id != 1

    def process(session):
        if not stay(session):
            return None
        for _ in range(session.process_id):
            session.new_folder("round")  # one was further than the other
        assert session.lost_members() == {1}
        session.go_on_without([1])
        session.check_no_member_is_lost()
        texts = session.gather(str(session.process_id))
        return texts, session.members, session.group, session.has_others

    left = (["0", "2"], [0, 2], "without-1", True)
    assert each(COUNT, process, service) == [left, None, left]


def test_the_last_one_is_all_that_jax_counts(monkeypatch):
    counted = []
    monkeypatch.setattr(private_jax, "count_one_process", lambda: counted.append(1))
    session = sessions(COUNT)[0]
    session.go_on_without([2])
    assert not counted and session.members == [0, 1]
    session.go_on_without([1])
    assert counted and session.gather("a") == ["a"] and session.group == "without-1-2"
