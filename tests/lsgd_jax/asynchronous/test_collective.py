"""A sum over workers, with one that is lost or late at any point of it."""

import numpy as np
import pytest

from lsgd_jax._src.asynchronous.collective import all_reduce
from lsgd_jax._src.asynchronous.memory import Memory
from lsgd_jax.asynchronous import Behind, Unreachable


WORKERS = 4
EACH = [np.arange(6, dtype=np.float32) * 10**i for i in range(WORKERS)]


def sums(gives=lambda i: True, late=0.0, lose_after=None, slow_after=None):
    """What each worker has of a sum: (sum, count), an error, or None if it was lost.

    late: seconds that worker 1 begins after the others.
    lose_after: of its waits, how many worker 1 sees the end of before it is lost.
    slow_after: likewise, but it goes on after 25 seconds.
    """
    memory = Memory(1, WORKERS, steps=1, grace=10)
    found, ended = [None] * WORKERS, [None] * WORKERS

    async def add(i):
        if i == 1:
            await memory.ports[i].sleep(late)
        try:
            found[i] = await all_reduce(
                memory.ports[i], "sum", EACH[i], gives(i), range(WORKERS)
            )
        except (Behind, Unreachable) as error:
            found[i] = error
        ended[i] = memory.now

    tasks = [memory.start(add(i), i) for i in range(WORKERS)]
    turn, turns = tasks[1].turn, []

    def counted():
        turns.append(1)
        if len(turns) - 1 == lose_after:
            memory.lose(1)
        elif len(turns) - 1 == slow_after:
            tasks[1].waits_for = memory.ports[1].sleep(25)
        else:
            turn()

    tasks[1].turn = counted
    memory.run()
    assert all(task.error is None for task in tasks)
    return found, len(turns), ended


def test_all_get_the_sum_of_those_who_give():
    found, _, ended = sums(gives=lambda i: i != 2)
    assert ended == [0] * WORKERS
    for total, count, came in found:
        assert count == 3 and came == list(range(WORKERS))
        np.testing.assert_array_equal(total, EACH[0] + EACH[1] + EACH[3])


@pytest.mark.parametrize("how", ["lose_after", "slow_after"])
def test_with_one_that_fails_at_any_point_all_who_are_left_agree(how):
    _, waits, _ = sums()
    with_all, without = sum(EACH), EACH[0] + EACH[2] + EACH[3]
    outcomes = set()
    for point in range(waits):
        found, _, ended = sums(**{how: point})
        rest = [found[i] for i in (0, 2, 3)]
        for total, count, came in rest:
            assert count == rest[0][1] and came == rest[0][2]
            np.testing.assert_array_equal(total, with_all if count == 4 else without)
        outcomes.add(rest[0][1])
        assert max(ended[i] for i in (0, 2, 3)) <= 10  # none waits for it twice
        if how == "slow_after":  # it has the same, or knows that it must take over
            assert isinstance(found[1], Behind) or found[1][1] == rest[0][1]
    assert outcomes == {3, 4}


def test_one_that_comes_when_all_is_over_is_behind():
    found, _, _ = sums(late=15.0)
    assert isinstance(found[1], Behind) and found[0][1] == 3
