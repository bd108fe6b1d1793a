"""Pairs of sentences: files, subwords, and what is left out."""

import itertools

import numpy as np
import pytest

from train.data import translation
from train.data.arrays import DataError
from train.data.translation import END, PAD, Subwords


PAIRS = [(f"the {x} house is {y}", f"das Haus ist {x} {y}") for x in "abcde" for y in "xyz"]


@pytest.fixture(scope="module")
def subwords():
    return Subwords.learned(itertools.chain(*PAIRS), 320)


@pytest.fixture
def files(tmp_path):
    """Writes pairs to two files and returns their names."""

    def files(pairs, name="pairs"):
        paths = [tmp_path / f"{name}.{side}" for side in ("source", "target")]
        for path, lines in zip(paths, zip(*pairs)):
            path.write_text("".join(line + "\n" for line in lines))
        return [[str(path)] for path in paths]

    return files


def test_sentences_return_from_their_ids(subwords):
    texts = ["the a house", "Ω is unknown", "", "das Haus"]
    ids = subwords.encode(texts, 40)
    assert subwords.decode(ids) == texts
    assert ids[2].tolist() == [END] + 39 * [PAD]
    ends = (ids == END).argmax(axis=1)
    assert (np.arange(40) > ends[:, None]).tolist() == (ids == PAD).tolist()
    cut = subwords.encode(texts, 2)
    np.testing.assert_array_equal(cut, ids[:, :2])
    assert Subwords.from_json(subwords.to_json(note="x")) == subwords
    assert Subwords.learned(itertools.chain(*PAIRS), 320) == subwords
    with pytest.raises(ValueError, match="it is no vocabulary"):
        Subwords.from_json('{"characters": "abc"}')


def test_files_are_joined_and_the_last_tenth_is_held_out(files):
    first = files([*PAIRS[:4], ("  ", "leer"), *PAIRS[4:8]], "first")
    second = files([("the house " * 40, "das Haus"), *PAIRS[8:]], "second")
    joined = [a + b for a, b in zip(first, second)]
    data = translation.load(*joined, 320, 32)
    assert data.held_out == ([PAIRS[-1][0]], [PAIRS[-1][1]])  # of 16, one is blank
    assert data.left_out == 1
    kept = [data.vocabulary.decode(side) for side in data.train]
    assert list(zip(*kept)) == PAIRS[:-1]
    assert data.vocabulary.decode(data.test.target) == data.held_out[1]
    other = translation.load(*files([*PAIRS[:-1], PAIRS[0]]), 320, 32)
    assert other.sha256 != data.sha256


def test_of_many_pairs_a_thousand_are_held_out(files):
    made = [(f"the house is {i}", f"das Haus ist {i}") for i in range(10_100)]
    data = translation.load(*files(made), 320, 32)
    assert (len(data.train.source), len(data.test.source)) == (9_100, 1_000)


@pytest.mark.parametrize(
    "source, target, message",
    [
        (b"a\nb\n", b"a\n", "must have the same number of lines, got 2 and 1"),
        (b"", b"a\n", "`data.source` must name text files, but .*a is empty"),
        (b"a\n", None, "`data.target` must name text files, but .*b cannot be read: No su"),
        (b"a\n", b"\xff\n", r"b is not UTF-8 text \(the byte at 0 is 0xff\)"),
        (b"a\n" * 9, b"b\n" * 9, "needs 10 pairs of sentences, got 9"),
        (b"a\n" * 20, b"\n" * 20, "needs 10 pairs of sentences, got 0"),
        (b"a b c d e\n" * 20, b"b\n" * 20, "no pair of sentences fits into data.context=3"),
    ],
)
def test_wrong_files_are_named_in_one_line(source, target, message, tmp_path):
    paths = tmp_path / "a", tmp_path / "b"
    for path, content in zip(paths, (source, target)):
        if content is not None:
            path.write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        translation.load(*([str(path)] for path in paths), 300, 3)
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match="must name as many files, got 2 and 1"):
        translation.load(["a", "b"], ["c"], 300, 3)


def test_no_files_too_few_subwords_and_no_sentencepiece(monkeypatch, files):
    with pytest.raises(DataError, match="needs files of sentences and of their translat"):
        translation.load((), (), 300, 32)
    with pytest.raises(DataError, match="`data.subwords` must be at least 275 for these"):
        translation.load(*files(PAIRS), 9, 32)
    translation.load(*files(PAIRS), 275, 32)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    message = r'sentencepiece, which is not installed: pip install -e ".\[translation\]"'
    with pytest.raises(DataError, match=message):
        translation.load((), (), 300, 32)
