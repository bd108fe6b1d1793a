"""Texts: token ids, windows for tests and training, wrong files."""

import codecs
import os

import jax
import numpy as np
import pytest

import lsgd_jax as lj
from train.data import text
from train.data.arrays import DataError
from train.data.text import TEST_TOKENS, Windows


LETTERS = text.of("".join(chr(0x100 + i % 300) for i in range(1000)).encode(), "characters")


def test_files_are_joined_without_byte_order_marks(tmp_path):
    (tmp_path / "a").write_text("naïve", "utf-8-sig")  # without a line feed at its end
    (tmp_path / "b").write_text("théâtre €", "utf-8-sig")
    files = [str(tmp_path / name) for name in "ab"]
    loaded, whole = text.load(files, "characters"), "naïve\nthéâtre €"
    ids = np.concatenate([loaded.train, loaded.test])
    assert loaded.vocabulary.characters == "".join(sorted(set(whole)))
    assert ids.dtype == np.uint8 and loaded.vocabulary.decode(ids) == whole
    assert len(loaded.train) == len(whole) * 9 // 10
    assert loaded.sha256 == text.of(whole.encode(), "characters").sha256
    # Tokens that are bytes are those of the files, byte order marks included.
    loaded = text.load(files, "bytes")
    whole = "\ufeffnaïve\ufeffthéâtre €"
    assert bytes(np.concatenate([loaded.train, loaded.test])) == whole.encode()
    assert loaded.vocabulary.decode(np.frombuffer(whole.encode(), np.uint8)) == whole


def test_the_test_of_a_long_text_is_bounded():
    """enwik9 has 10⁹ bytes, a tenth of which takes 130 times as long as 200 steps."""
    found = text.of(bytes(10 * text.MOST_TEST + 90), "bytes")
    assert (len(found.train), len(found.test)) == (9 * text.MOST_TEST + 90, text.MOST_TEST)
    assert text.LIBRARY_BYTES < 10 * text.MOST_TEST  # its test is its last tenth


def test_the_standard_library_gives_the_same_text_each_time():
    first, second = (text.load((), "characters") for _ in range(2))
    assert first.sha256 == second.sha256
    np.testing.assert_array_equal(first.train, second.train)
    assert "import" in first.vocabulary.decode(first.train[:20_000])
    assert 100_000 < len(text.standard_library()) <= text.LIBRARY_BYTES


def test_many_characters_have_larger_ids():
    whole = "".join(map(chr, range(0x4E00, 0x4E00 + 300)))
    loaded = text.of(("一丁丫" + whole).encode(), "characters")
    assert loaded.vocabulary.characters == whole
    assert loaded.train.dtype == np.uint16 and loaded.train[:3].tolist() == [0, 1, 0x2B]
    assert set(loaded.vocabulary.nbytes) == {3}


@pytest.mark.parametrize(
    "whole, tokens, start",
    [("b\na", "characters", 0), ("b\n\ta", "characters", 1), ("ba", "characters", 0)]
    + [("b\na", "bytes", 10), ("ba", "bytes", 10)],
)
def test_a_sample_starts_after_a_line_feed(whole, tokens, start):
    assert text.of(whole.encode(), tokens).vocabulary.start.tolist() == [start]


UNUSABLE = "`data.files` must name text files, but .*file "


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda path: None, UNUSABLE + "cannot be read: No such file or directory"),
        (os.mkdir, UNUSABLE + "is no regular file"),
        (os.mkfifo, UNUSABLE + "is no regular file"),
        (lambda path: path.symlink_to("/dev/zero"), UNUSABLE + "is no regular file"),
        (lambda path: path.write_bytes(b""), UNUSABLE + "is empty"),
        (lambda path: path.write_bytes(codecs.BOM_UTF8), UNUSABLE + "is empty"),
        (
            lambda path: path.write_bytes(b"ab\xff\xfe"),
            r"not UTF-8 text \(the byte at 2 is 0xff\); --data.tokens bytes",
        ),
    ],
)
def test_unusable_files_are_refused(tmp_path, make, message):
    make(tmp_path / "file")
    with pytest.raises(DataError, match=message):
        text.load([str(tmp_path / "file")], "characters")
    if "UTF-8" in message:
        loaded = text.load([str(tmp_path / "file")], "bytes")
        assert len(loaded.vocabulary) == 256


# Windows


@pytest.mark.parametrize("workers, context", [(1, 7), (3, 7), (4, 64), (2, 99), (2, 500)])
def test_every_token_except_the_first_is_predicted_once(workers, context):
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
def test_random_windows_come_from_the_workers_text(shard):
    workers = lj.Workers(1, 4)
    windows = Windows(LETTERS, 30, 16, workers, shard=shard)
    keys = workers.put(jax.random.split(jax.random.key(0), 4))
    drawn = np.asarray(workers.map(windows.draw)(windows.data, keys))
    assert drawn.shape == (4, 16, 31)
    # The text counts from 0 to 299 repeatedly, so that windows reveal their positions.
    assert ((drawn[..., 1:] - drawn[..., :-1]) % 300 == 1).all()
    if not shard:
        assert len({tuple(window) for window in drawn.reshape(-1, 31)}) > 50
        return
    assert windows.size == 225
    for worker, starts in enumerate(drawn[..., 0]):
        assert (((starts - 225 * worker) % 300) <= 225 - 31).all()


def test_the_last_window_may_be_drawn():
    short = text.of(b"abcdefghij" * 2, "characters")
    windows = Windows(short, 16, 64, lj.Workers(1, 1), shard=False)
    drawn = windows.draw(lj.Shared(jax.numpy.asarray(short.train)), jax.random.key(0))
    assert set(np.asarray(drawn)[:, 0].tolist()) == {0, 1}  # 18 tokens, windows of 17


@pytest.mark.parametrize(
    "content, context, shard, message",
    [
        (b"abcdefghij" * 2, 18, False, "nine tenths of the text, must have at least 19 "),
        (b"abcdefghij" * 2, 9, True, "part of the training text.* 10 tokens .*, got 9"),
        (b"abcdefghi", 2, False, "the validation text, .* must have at least 2 tokens"),
        (b"a" * 100, 2, False, "at least 2 different characters, got 1"),
    ],
)
def test_short_texts_are_refused(content, context, shard, message):
    with pytest.raises(DataError, match=message):
        Windows(text.of(content, "characters"), context, 1, lj.Workers(1, 2), shard)
