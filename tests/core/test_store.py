import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bitplan.core.errors import FileError, WriteError
from bitplan.core.records import Graph
from bitplan.store import files
from bitplan.store.files import atomic_file, atomic_folder, load, save, write_text


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


def fill(place, kind, text):
    """Write a text under the temporary name: as the file itself, or as a file in a folder in the folder."""
    if kind is atomic_folder:
        (place / "inner").mkdir()
    (place / "inner" / "a.txt" if kind is atomic_folder else place).write_text(text)


def text_at(path):
    return (path / "inner" / "a.txt" if path.is_dir() else path).read_text()


@pytest.mark.parametrize("kind", [atomic_file, atomic_folder])
def test_what_is_written_has_its_name_once_it_is_whole(tmp_path, kind):
    path = tmp_path / "above" / "it.txt"
    for text in ("first", "second"):
        with kind(path) as temporary:
            fill(temporary, kind, text)
            assert temporary.parent == path.parent
            assert temporary.suffix == ".txt"
            assert path.exists() == (text == "second")
        assert text_at(path) == text
        assert os.listdir(path.parent) == ["it.txt"]


@pytest.mark.parametrize("kind", [atomic_file, atomic_folder])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), KeyError("a bug")])
def test_an_error_in_the_block_leaves_what_was_there_and_nothing_else(tmp_path, kind, error):
    path = tmp_path / "it"
    with kind(path) as temporary:
        fill(temporary, kind, "old")

    def replace_it():
        with kind(path) as temporary:
            fill(temporary, kind, "new")
            raise error

    refused = pytest.raises(WriteError, match="cannot write .*it: No space left on device")
    with refused if isinstance(error, OSError) else pytest.raises(type(error)):
        replace_it()
    assert text_at(path) == "old"
    assert os.listdir(tmp_path) == ["it"]


@pytest.mark.parametrize("kind", [atomic_file, atomic_folder])
def test_every_file_is_flushed_before_it_has_its_name(tmp_path, kind, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda number: flushed.append(os.readlink(f"/proc/self/fd/{number}")))
    with kind(tmp_path / "it") as temporary:
        fill(temporary, kind, "text")
    content = [temporary / "inner", temporary / "inner" / "a.txt"] if kind is atomic_folder else []
    above = [tmp_path] if kind is atomic_folder else []  # where its temporary name was made
    assert flushed == [str(path) for path in (*above, *content, temporary, tmp_path)]


def test_folders_that_are_made_are_known_to_the_disk(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda number: flushed.append(os.readlink(f"/proc/self/fd/{number}")))
    write_text(tmp_path / "a" / "b" / "it", "text")
    assert {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")} <= set(flushed)


@pytest.mark.parametrize("steps", [1, 2])
def test_a_folder_that_cannot_be_put_in_place_leaves_the_old_one(tmp_path, monkeypatch, steps):
    path = tmp_path / "it"
    with atomic_folder(path) as temporary:
        fill(temporary, atomic_folder, "old")
    rename = Path.rename

    def refuse_the_new(self, target):
        if target == path and ".old." not in self.name:
            raise OSError(errno.EACCES if path.exists() and steps == 1 else errno.ENOTEMPTY, "Permission denied")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refuse_the_new)
    with pytest.raises(WriteError, match="cannot write .*it: Permission denied"), atomic_folder(path) as temporary:
        fill(temporary, atomic_folder, "new")
    assert text_at(path) == "old"
    assert os.listdir(tmp_path) == ["it"]


def test_killed_at_any_line_a_folder_that_is_replaced_is_the_old_one_or_the_new_one(tmp_path):
    script = Path(__file__).with_name("killed_swap.py")
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["kills"] > 30, "at every line of ours, and between the steps of removing a folder"
    assert found["wrong"] == [], "old or new, whole, once somebody looks for it"
    assert {"old", "new"} == set(found["seen"])
    assert found["left"] == [], "and who replaces it next leaves nothing but that"
    assert found["gone"] > 0, "a kill between the two renames was among them"


def test_what_was_left_half_removed_is_never_restored(tmp_path):
    path = tmp_path / "it"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "remove_quietly", lambda _: None)  # as if killed before
        for text in ("first", "second", "third"):
            with atomic_folder(path) as temporary:
                fill(temporary, atomic_folder, text)
    path.rename(tmp_path / "elsewhere")
    files.restore_folder(path)
    assert not path.exists()
