"""What killed processes left half written is told from what others are writing, and only that is removed."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from bitplan.store.files import (
    atomic_folder,
    clear_left,
    is_gone,
    list_left_behind,
    process_birth,
    remove_paths,
    temporary_name,
)

WRITING = """
import sys, time
from bitplan.store import files
with getattr(files, sys.argv[1])(sys.argv[2]) as temporary:
    (temporary / "half" if temporary.is_dir() else temporary).write_text("half")
    print(temporary, flush=True)
    time.sleep(600)
"""


@contextmanager
def writing(kind, path):
    """A process that has written half of it; gives the process and the temporary name."""
    words = [sys.executable, "-c", WRITING, kind, str(path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        yield process, path.with_name(os.path.basename(process.stdout.readline().strip()))
        process.kill()


@pytest.mark.parametrize("kind", ["atomic_file", "atomic_folder"])
def test_what_a_process_writes_is_left_alone_until_it_is_gone(tmp_path, kind):
    (tmp_path / ".mine").write_text("no temporary name")
    with writing(kind, tmp_path / "it.bin") as (process, temporary):
        for stop in (signal.SIGSTOP, signal.SIGCONT):
            os.kill(process.pid, stop)
            assert list_left_behind(tmp_path) == [], "frozen or not, it may go on"
        clear_left(tmp_path)
        assert temporary.exists()
        process.kill()
        process.wait()
        assert list_left_behind(tmp_path, "another") == []
        assert list_left_behind(tmp_path, "it.bin") == list_left_behind(tmp_path) == [temporary]
        clear_left(tmp_path)
    assert os.listdir(tmp_path) == [".mine"]


def test_who_replaces_a_folder_removes_what_was_left_in_its_place(tmp_path):
    with writing("atomic_folder", tmp_path / "it") as (process, half):
        with atomic_folder(tmp_path / "it") as temporary:
            (temporary / "x").touch()
        assert half.exists()
        process.kill()
        process.wait()
        with atomic_folder(tmp_path / "it") as temporary:
            (temporary / "x").touch()
    assert os.listdir(tmp_path) == ["it"]


def test_of_other_machines_nothing_is_known_before_a_day(tmp_path):
    own = temporary_name(tmp_path / "it.bin").name
    machine = own.split(".")[3].split("-")[0]
    other = tmp_path / own.replace(machine, "00000000")
    other.mkdir()
    (other / "half").touch()
    os.utime(other, (0, 0))
    assert list_left_behind(tmp_path) == list_left_behind(tmp_path, by_others=True) == [], "something in it is new"
    os.utime(other / "half", (time.time() - 25 * 3600,) * 2)
    assert list_left_behind(tmp_path) == []
    assert list_left_behind(tmp_path, by_others=True) == [other]


def test_links_are_removed_and_not_what_they_lead_to(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    with writing("atomic_folder", tmp_path / "it") as (process, half):
        process.kill()
        process.wait()
    for way in (lambda: clear_left(tmp_path), lambda: remove_paths([half])):
        half.unlink() if half.is_symlink() else half.rename(tmp_path / "away") if half.exists() else None
        half.symlink_to("mine")
        way()
        assert not os.path.lexists(half)
        assert (tmp_path / "mine" / "file").exists()


def test_a_process_that_the_system_hides_is_not_taken_for_gone(monkeypatch):
    """Where /proc shows everybody only their own (hidepid), signals still tell that somebody is there."""
    monkeypatch.setattr("bitplan.store.files.process_birth", lambda _: "")
    assert is_gone(10**7, "123")

    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(os, "kill", refuse)
    assert not is_gone(1, "123")
    monkeypatch.setattr("bitplan.store.files.process_birth", process_birth)
    assert is_gone(os.getpid(), "123"), "that number is another process by now"
