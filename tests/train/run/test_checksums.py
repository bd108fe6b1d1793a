"""Checksums of a folder's files: every change is detected and named."""

import pytest

from train.run import checksums


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "state" / "d").mkdir(parents=True)
    (tmp_path / "state" / "d" / "1f").write_bytes(bytes(range(256)) * 300)
    (tmp_path / "notes").write_text('{"seconds": 1.5}')
    checksums.write(tmp_path)
    (tmp_path / "commit_success.txt").write_text("written later")
    return tmp_path


def test_unchanged_files_are_not_damaged(folder):
    assert checksums.are_there(folder) and checksums.damage(folder) == ""


@pytest.mark.parametrize("name", ["state/d/1f", "notes"])
@pytest.mark.parametrize("place", [0, 0.5, 1])
def test_a_changed_byte_is_detected(folder, name, place):
    content = bytearray((folder / name).read_bytes())
    content[int(place * (len(content) - 1))] ^= 1
    (folder / name).write_bytes(content)
    assert checksums.damage(folder) == f"{name} is not as it was written"
    assert bool(checksums.damage(folder, only="notes")) == (name == "notes")


def test_truncated_and_missing_files_are_detected(folder):
    (folder / "notes").write_text("{")
    assert checksums.damage(folder) == "notes is not as it was written"
    (folder / "notes").unlink()
    assert checksums.damage(folder) == "notes is missing"


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff", b"{}"])
def test_damaged_checksums_are_detected(folder, content):
    (folder / checksums.CHECKSUMS).write_bytes(content)
    assert checksums.CHECKSUMS in checksums.damage(folder)
