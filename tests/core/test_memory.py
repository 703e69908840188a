"""What a file may take of memory: a limit that users can raise, and that the system holds."""

import mmap
import subprocess
import threading

import pytest

from bitplan.core.errors import FileError, InputError
from bitplan.core.parsing import VARIABLE, check_room, limit_memory, memory_for
from bitplan.store.files import read_bytes, read_text

GB = 1 << 30


def room(size):
    """Ask the system for so much, and touch none of it."""
    mmap.mmap(-1, size).close()


@pytest.fixture
def file(tmp_path):
    (tmp_path / "small.bin").write_bytes(b"x" * 1000)
    return tmp_path / "small.bin"


@pytest.mark.parametrize(("written", "size"), [("500MB", 500 << 20), ("8GB", 8 * GB), ("8 gb", 8 * GB), ("123", 123)])
def test_the_limit_is_what_the_environment_says(monkeypatch, written, size):
    assert memory_for(1000) == GB + 4000
    monkeypatch.setenv(VARIABLE, written)
    assert memory_for(1000) == size


@pytest.mark.parametrize("written", ["", "much", "-1", "1.5GB", "9" * 30])
def test_a_limit_that_is_none_is_refused(monkeypatch, written):
    monkeypatch.setenv(VARIABLE, written)
    with pytest.raises(InputError, match=VARIABLE):
        memory_for(0)


def test_a_refusal_says_how_the_limit_is_raised_and_that_is_enough(monkeypatch):
    with pytest.raises(FileError, match=r"f\.x would take 2\.5 GB .* \(0\.0 MB\) may take 1\.0 GB.*BITPLAN_MEMORY=3GB"):
        check_room("f.x", 5 * GB // 2, 1000)
    monkeypatch.setenv(VARIABLE, "3GB")
    check_room("f.x", 5 * GB // 2, 1000)


def test_a_text_is_looked_at_before_it_is_read(tmp_path, monkeypatch):
    path = tmp_path / "long.json"
    with path.open("wb") as out:
        out.truncate(100 << 20)
    with pytest.raises(FileError, match=r"long.json would take 1\.6 GB"):
        read_text(path)
    monkeypatch.setenv(VARIABLE, "2GB")
    assert len(read_text(path)) == 100 << 20


def test_what_says_no_size_is_read_as_far_as_it_may(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1MB")
    with subprocess.Popen(["cat", "/dev/zero"], stdout=subprocess.PIPE) as endless:
        path = f"/dev/fd/{endless.stdout.fileno()}"  # as a shell hands over `<(cat /dev/zero)`
        with pytest.raises(FileError, match=f"{path} would take"):
            read_bytes(path)
    with pytest.raises(FileError, match="/dev/zero: it is a device"):
        read_bytes("/dev/zero")


def test_in_a_bounded_block_no_more_can_be_taken_and_afterwards_it_can(file):
    with pytest.raises(OSError, match="allocate"), limit_memory(file):
        room(4 * GB)
    with limit_memory(file), limit_memory(file):
        room(GB // 2)
    room(4 * GB)


def test_a_block_that_could_not_begin_leaves_no_limit_behind(file, monkeypatch):
    with pytest.raises(FileNotFoundError), limit_memory(file.with_name("missing.bin")):
        pass
    monkeypatch.setenv(VARIABLE, "much")
    with pytest.raises(InputError, match=VARIABLE), limit_memory(file):
        pass
    monkeypatch.delenv(VARIABLE)
    with limit_memory(file):
        pass
    room(8 * GB)


def test_blocks_of_two_threads_end_in_any_order(file):
    inside, leave = threading.Event(), threading.Event()

    def first():
        with limit_memory(file):
            inside.set()
            leave.wait()

    thread = threading.Thread(target=first)
    thread.start()
    inside.wait()
    with limit_memory(file):
        leave.set()
        thread.join()
        with pytest.raises(OSError, match="allocate"):
            room(8 * GB)
    room(8 * GB)
