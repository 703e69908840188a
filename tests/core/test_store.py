import os

import pytest

from bitplan.core.errors import FileError
from bitplan.core.records import Graph
from bitplan.core.store import load, save, write_text


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    write_text(path, "old")

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(FileError, match="cannot write .*a.json: No space left on device"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_folders_are_made(graph, tmp_path):
    assert load(save(graph, tmp_path / "x" / "y" / "g.json"), Graph) == graph


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileError, match="nowhere.json: No such file"):
        load(tmp_path / "nowhere.json", Graph)


def test_a_binary_file_is_named(tmp_path):
    (tmp_path / "b.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(FileError, match="not a text file"):
        load(tmp_path / "b.json", Graph)


def test_a_path_that_cannot_be_written_is_named(graph, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FileError, match="cannot write"):
        save(graph, tmp_path / "file" / "g.json")
