"""Text: the same ids from the same text, and what is wrong with a file."""

import numpy as np
import pytest

from train.data import standard_library, text
from train.data.arrays import DataError
from train.data.vocabulary import Vocabulary


def test_files_are_read_one_after_the_other(tmp_path):
    (tmp_path / "a").write_text("naïve\n")
    (tmp_path / "b").write_text("théâtre €")
    files = [str(tmp_path / name) for name in "ab"]
    loaded = text.load(files, "characters")
    whole = "naïve\nthéâtre €"
    ids = np.concatenate([loaded.train, loaded.test])
    assert loaded.vocabulary.characters == "".join(sorted(set(whole)))
    assert ids.dtype == np.uint8 and loaded.vocabulary.decode(ids) == whole
    assert len(loaded.train) == len(whole) * 9 // 10
    # In bytes: those of the files themselves.
    loaded = text.load(files, "bytes")
    assert bytes(np.concatenate([loaded.train, loaded.test])) == whole.encode()
    assert loaded.vocabulary.decode(np.frombuffer(whole.encode(), np.uint8)) == whole


def test_the_standard_library_is_there_and_always_the_same():
    first, second = (text.load((), "characters") for _ in range(2))
    assert first.sha256 == second.sha256
    np.testing.assert_array_equal(first.train, second.train)
    assert "import" in first.vocabulary.decode(first.train[:20_000])
    assert len(standard_library.source()) <= standard_library.MOST_BYTES


def test_many_characters_need_larger_ids():
    vocabulary = Vocabulary("".join(map(chr, range(0x4E00, 0x4E00 + 300))))
    ids = vocabulary.encode("一丁丫".encode())
    assert ids.dtype == np.uint16 and ids.tolist() == [0, 1, 0x2B]
    assert set(vocabulary.nbytes) == {3}
    with pytest.raises(ValueError, match="the character 'x' is not in the vocabulary"):
        vocabulary.encode(b"x")


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "`data.files` must name files of text, but .* cannot be read"),
        (b"", "`data.files` must name files of text, but .* is empty"),
        (
            b"ab\xff\xfe",
            r"not UTF-8 text \(the byte at 2 is 0xff\); --data.tokens bytes",
        ),
    ],
)
def test_files_that_cannot_be_used(tmp_path, content, message):
    file = tmp_path / "file"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(DataError, match=message):
        text.load([str(file)], "characters")
    if content:
        assert len(text.load([str(file)], "bytes").vocabulary) == 256


def test_a_folder_is_no_text(tmp_path):
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        text.load([str(tmp_path)], "bytes")
