"""Windows of a text: which are tested, which are drawn, which texts are too short."""

import jax
import numpy as np
import pytest

import lsgd_jax as lj
from train.data import text
from train.data.arrays import DataError
from train.data.windows import TEST_TOKENS, Windows


LETTERS = text.of("".join(chr(0x100 + i % 300) for i in range(1000)).encode(), "characters")


@pytest.mark.parametrize("workers, context", [(1, 7), (3, 7), (4, 64), (2, 99), (2, 500)])
def test_every_token_but_the_first_is_predicted_once(workers, context):
    windows = Windows(LETTERS, context, 2, lj.Workers(1, workers), shard=False)
    seen = []
    for ids, valid in windows.test_batches:
        assert ids.shape[0] == workers and ids.shape[2] == valid.shape[2] + 1 == context + 1
        assert ids.shape[1] * context <= max(TEST_TOKENS, context)
        ids, valid = np.asarray(ids).astype(int), np.asarray(valid)
        seen += zip(ids[..., :-1][valid].tolist(), ids[..., 1:][valid].tolist())
    test = LETTERS.test.tolist()
    assert sorted(seen) == sorted(zip(test, test[1:]))


@pytest.mark.parametrize("shard", [False, True])
def test_random_windows_are_pieces_of_a_workers_text(shard):
    workers = lj.Workers(1, 4)
    windows = Windows(LETTERS, 30, 16, workers, shard=shard)
    keys = workers.put(jax.random.split(jax.random.key(0), 4))
    drawn = np.asarray(workers.map(windows.draw)(windows.data, keys))
    assert drawn.shape == (4, 16, 31)
    # The text counts from 0 to 299 again and again, so that windows tell their places.
    assert ((drawn[..., 1:] - drawn[..., :-1]) % 300 == 1).all()
    if not shard:
        assert len({tuple(window) for window in drawn.reshape(-1, 31)}) > 50
        return
    assert windows.size == 225
    for worker, starts in enumerate(drawn[..., 0]):
        begin = 225 * worker
        assert (((starts - begin) % 300) <= 225 - 31).all()


def test_the_last_window_may_be_drawn():
    short = text.of(b"abcdefghij" * 2, "characters")
    windows = Windows(short, 16, 64, lj.Workers(1, 1), shard=False)
    drawn = windows.draw(lj.Shared(jax.numpy.asarray(short.train)), jax.random.key(0))
    assert set(np.asarray(drawn)[:, 0].tolist()) == {0, 1}  # 18 tokens, windows of 17


@pytest.mark.parametrize(
    "content, context, shard, message",
    [
        (b"abcdefghij" * 2, 18, False, "the first nine tenths, must have at least 19 "),
        (b"abcdefghij" * 2, 9, True, "part of the training text.* 10 tokens .*, got 9"),
        (b"abcdefghi", 2, False, "the validation text, .* must have at least 2 tokens"),
        (b"a" * 100, 2, False, "at least 2 different characters, got 1"),
    ],
)
def test_texts_that_are_too_short(content, context, shard, message):
    with pytest.raises(DataError, match=message):
        Windows(text.of(content, "characters"), context, 1, lj.Workers(1, 2), shard)
