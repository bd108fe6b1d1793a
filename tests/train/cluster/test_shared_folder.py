"""Whether all processes see the run folder; here threads, with a folder each if need be."""

import pytest
from memory_store import each

from train.cluster import shared_folder


def check(folders):
    """What each process says whose run folder is the one of these."""

    def process(session):
        try:
            return shared_folder.check(session, folders[session.process_id])
        except ValueError as error:
            return str(error)

    return each(len(folders), process)


def test_a_folder_that_all_see_is_left_as_it_was(tmp_path):
    assert check([tmp_path] * 3) == [None] * 3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("exists", [True, False])
def test_a_process_that_has_a_folder_of_its_own_is_named(tmp_path, monkeypatch, exists):
    monkeypatch.setattr(shared_folder, "PATIENCE_S", 0.2)
    shared, own = tmp_path / "shared", tmp_path / "own"
    shared.mkdir()
    if exists:
        own.mkdir()
    lines = check([shared, own, shared])
    assert len(set(lines)) == 2  # each names its folder
    for line in lines:
        assert "of process 0 (host a), which is not so in process 1 (host b): name" in line
    assert list(shared.iterdir()) == []
