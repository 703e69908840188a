"""Files that are whole or not there: atomic writing, and reading with one clear line on failure."""

from __future__ import annotations

import contextlib
import difflib
import errno
import glob
import hashlib
import io
import itertools
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, overload

from bitplan.core.errors import Damaged, FileError, InputError, WriteError
from bitplan.core.parsing import check_available, check_room, memory_for
from bitplan.core.record import Record
from bitplan.core.records import ABOUT, Checkpoint

AnyRecord = TypeVar("AnyRecord", bound=Record)
_FOLDER = "folder"
_SPECIAL = {stat.S_IFDIR: _FOLDER, stat.S_IFIFO: "pipe", stat.S_IFSOCK: "socket"}
_HANDED_OVER = ("/dev/fd/", "/dev/stdin", "/proc/self/fd/")
_PARSED = 16  # times the bytes of a text is about the most that the values take that are parsed from it
ASIDE = ".damaged"
"""What is added to the name of a damaged file or folder; where that is taken, with a number."""


@contextmanager
def whole_file(path: str | Path) -> Iterator[Path]:
    """Give a temporary name to write under; when the block ends, the file is on the disk and gets its own name.

    When this returns, the name is on the disk too: no power cut takes it back. A kill, a full disk or an error in the
    block leaves no half file, and a file that was there before stays. What the system refuses, in the block too, is a
    WriteError. Folders above the file are made.
    """
    target = Path(path)
    refuse_no_file(target)
    temporary = temporary_name(target)
    with _refusals_named(target):
        try:
            make_folder(target.parent)
            yield temporary
            flush_file(temporary)
            temporary.replace(target)
            flush_folder(target.parent)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink()


@contextmanager
def whole_folder(path: str | Path) -> Iterator[Path]:
    """Give a temporary folder to fill; when the block ends, its files are on the disk and it gets its own name.

    A folder that was there before is replaced in one step, and stays where the block or the replacement fails. What
    killed processes left in its place is removed first.
    """
    target = Path(path)
    temporary = temporary_name(target)
    with _refusals_named(target):
        try:
            clear_left(target.parent, target.name)
            make_folder(temporary)
            restore(target)
            yield temporary
            for item in (*sorted(temporary.rglob("*")), temporary):
                flush_folder(item) if item.is_dir() else flush_file(item)
            put_in_place(temporary, target)
            flush_folder(target.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def write_text(path: str | Path, text: str) -> Path:
    """Write a text file (UTF-8), whole or not at all."""
    return write_bytes(path, text.encode())


def write_bytes(path: str | Path, content: bytes) -> Path:
    """Write a file, whole or not at all."""
    with whole_file(path) as temporary:
        temporary.write_bytes(content)
    return Path(path)


def read_text(path: str | Path) -> str:
    """Read a text file; what prevents it is said in one line."""
    try:
        return read_bytes(path, times=_PARSED).decode("utf-8")
    except UnicodeDecodeError:
        raise Damaged(f"{path} is not a text file (UTF-8)") from None


def read_bytes(path: str | Path, *, times: int = 1) -> bytes:
    """Read a file whole, after a look at its size: what is made of it takes so many times its bytes of memory."""
    try:
        with open_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            check_room(path, times * size, size)
            check_available(path, size)
            content = file.read(size + 1)
            if len(content) > size:  # it says no size, as a pipe does, or grows
                content += file.read(memory_for(0) // times)
                check_room(path, times * len(content), 0)
            return content
    except OSError as error:
        raise _unreadable(Path(path), error) from None


def refuse_large_text(path: Path) -> None:
    """Refuse a file that a library reads whole as text, if that would take more memory than it may."""
    size = path.stat().st_size
    check_room(path, _PARSED * size, size)


def open_file(path: str | Path) -> io.BufferedReader:
    """Open a file to read it; a pipe or a device, which may keep us waiting for ever, is an OSError.

    What a shell hands over as a file, `<(…)`, is a pipe that is open already, and is read.
    """
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    kind = stat.S_IFMT(os.fstat(number).st_mode)
    if kind != stat.S_IFREG and not (kind == stat.S_IFIFO and str(path).startswith(_HANDED_OVER)):
        os.close(number)
        if kind == stat.S_IFDIR:
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        raise OSError(errno.EINVAL, f"it is a {_SPECIAL.get(kind, 'device')}, not a file")
    os.set_blocking(number, True)
    return os.fdopen(number, "rb")


def through_links(path: Path) -> Path:
    """Where a name leads that a user wrote: its links stay, and what they point to is written.

    Files of a run are written without this, since links in it may be anybody's: there a link is replaced.
    """
    try:
        leads_on = path.is_symlink() and _kind_of_special(path) in (None, _FOLDER)
        return path.resolve() if leads_on else path
    except (OSError, RuntimeError):
        raise WriteError(f"cannot write {path}: its links go in a circle") from None


def checked_name(name: str) -> str:
    """An id as the name of a file; ids stand in files too, and must not lead elsewhere."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise FileError(f"{name!r} is no id: a file says it that bitplan did not write")
    return name


def refuse_no_file(target: Path) -> None:
    """Refuse to put a file in the place of something else: renaming would replace a device too."""
    kind = _kind_of_special(target)
    if kind is not None:
        raise WriteError(f"cannot write {target}: it is a {kind}, not a file")


def is_same(one: Path, other: Path) -> bool:
    """Whether two names are of one file or folder that is there."""
    try:
        return os.path.samefile(one, other)
    except (OSError, ValueError):  # one is not there, or is no name
        return False


def is_below(one: Path, other: Path) -> bool:
    """Whether a path leads to something that is there, in a folder or deeper in it."""
    try:
        return one.exists() and other.resolve() in one.resolve().parents
    except (OSError, ValueError, RuntimeError):  # it is no name, or its links go in a circle
        return False


def _kind_of_special(path: Path) -> str | None:
    """What stands at a path, or behind its links, if it is neither a file nor nothing."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return None
    return None if stat.S_ISREG(mode) else _SPECIAL.get(stat.S_IFMT(mode), "device")


def sha256_of(path: str | Path) -> str:
    """The SHA-256 of a file's content."""
    try:
        with open_file(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise _unreadable(Path(path), error) from None


def save(record: Record, path: str | Path) -> Path:
    """Write a record as its JSON file."""
    return write_text(path, record.to_json())


@overload
def load(path: str | Path) -> Any: ...


@overload
def load(path: str | Path, kind: type[AnyRecord], *, of: str | None = None, sealed: bool = False) -> AnyRecord: ...


def load(path: str | Path, kind: type[Any] | None = None, *, of: str | None = None, sealed: bool = False) -> Any:
    """Read a record of the given kind, or of any kind; options as for `from_json`.

    Without a kind, the folder of a run gives its `RunFolder`, and that of a checkpoint its `Checkpoint` (use
    `load_checkpoint` to read the network).
    """
    if kind is None:
        if Path(path).is_dir():
            return _load_folder(Path(path))
        kind = Record
    text = read_text(path)
    try:
        return kind.from_json(text, of=of, sealed=sealed)
    except Damaged as error:
        raise Damaged(f"{path}: {error}") from None
    except InputError as error:
        raise FileError(f"{path}: {error}") from None


def _load_folder(path: Path) -> Any:
    from bitplan.store.run_folder import RunFolder

    if RunFolder.is_one(path):
        return RunFolder(path)
    if (path / ABOUT).is_file():
        return load(path / ABOUT, Checkpoint)
    raise FileError(f"{path} is a folder, and neither a checkpoint (with a {ABOUT}) nor a run (with a study.json)")


def set_aside(path: Path) -> Path:
    """Give a damaged file or folder another name beside its own, and give that name; it is never deleted.

    Somebody else may have done so before: then it is not there any more, and that is all right.
    """
    endings = itertools.chain([ASIDE], (f"{ASIDE}.{number}" for number in itertools.count(2)))
    names = (path.with_name(f"{path.name}{ending}") for ending in endings)
    aside = next(name for name in names if not os.path.lexists(name))
    with _refusals_named(aside), contextlib.suppress(FileNotFoundError):
        path.rename(aside)
        flush_folder(path.parent)
    return aside


def _unreadable(path: Path, error: OSError) -> FileError:
    """What the system says of a file; a disk that fails to give it back has damaged it."""
    kind = Damaged if error.errno == errno.EIO else FileError
    where = _looked_in(path) if isinstance(error, FileNotFoundError) else ""
    return kind(f"cannot read {path}: {error.strerror or error}{where}")


def _looked_in(path: Path) -> str:
    """Files of nearly that name in its folder, or where that is."""
    if not path.parent.is_dir():
        return f"; there is no folder {path.parent}"
    stems = sorted(other.stem for other in path.parent.iterdir() if other.suffix == path.suffix)
    near = [f"{stem}{path.suffix}" for stem in difflib.get_close_matches(path.stem, stems, n=2, cutoff=0.75)]
    return f"; did you mean {' or '.join(near)}?" if near else f" in {path.parent.resolve()}"


def remove(paths: Iterable[Path]) -> None:
    """Remove files and folders; what prevents it is said in one line."""
    for path in paths:
        try:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        except OSError as error:
            raise WriteError(f"cannot remove {path}: {error.strerror or error}") from None


@contextmanager
def _refusals_named(target: Path) -> Iterator[None]:
    """Say in one line which file or folder the system refuses to write."""
    try:
        yield
    except FileExistsError as error:
        raise WriteError(f"cannot write {target}: {error.filename} is in the way, which is no folder") from None
    except OSError as error:
        raise WriteError(f"cannot write {target}: {error.strerror or error}") from None


def make_folder(path: Path) -> None:
    """Make a folder and those above it, each known to the disk."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        flush_folder(folder.parent)


def flush_file(path: Path) -> None:
    """See that the content of a file is on the disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def flush_folder(path: Path) -> None:
    """See that the names in a folder are on the disk, where the file system knows how."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(number)


# --- Folders that replace others, in two renames: the old one moves aside, the new one gets the name.

_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
_ATTEMPTS = 10


def put_in_place(new: Path, target: Path) -> None:
    """Give a folder its name, and remove the folder that had it; that one stays if this fails.

    A kill between the two renames leaves the old folder aside, and `restore` puts it back.
    """
    for attempt in range(_ATTEMPTS):  # another process may restore the old one between the two renames
        try:
            new.rename(target)  # nothing is there, or an empty folder
            break
        except OSError as error:
            if error.errno not in _TAKEN or attempt == _ATTEMPTS - 1:
                restore(target)
                raise
        with contextlib.suppress(FileNotFoundError):
            target.rename(target.with_name(f".{target.name}.old.{secrets.token_hex(4)}"))
    for old in _list_aside(target):
        gone = temporary_name(target)  # renamed first, so that `restore` never finds half of it
        with contextlib.suppress(OSError):
            old.rename(gone)
            remove_quietly([gone])


def restore(target: Path) -> None:
    """Put a folder back that a killed process had moved aside and not yet replaced."""
    aside = _list_aside(target)
    with contextlib.suppress(OSError):  # another process was faster, or the disk is read-only
        if aside and not os.path.lexists(target):
            max(aside, key=lambda path: path.stat().st_ctime_ns).rename(target)


def _list_aside(target: Path) -> list[Path]:
    return list(target.parent.glob(f".{glob.escape(target.name)}.old.*"))


# --- Temporary names: what is written gets its own name when it is whole, and who is killed before leaves this one.


_NAME = re.compile(r"\.(?P<of>.+)\.(?P<machine>[0-9a-f]{8})-(?P<pid>\d{1,9})-(?P<born>\d*)-[0-9a-f]{8}(\.[^.]*)?")
_DAY = 24 * 3600.0


def temporary_name(target: Path) -> Path:
    """A name beside the target that nobody else uses; the ending stays, since some writers look at it."""
    pid = os.getpid()
    return target.with_name(f".{target.name}.{_machine()}-{pid}-{birth(pid)}-{secrets.token_hex(4)}{target.suffix}")


def left_behind(folder: Path, of: str | None = None, *, by_others: bool = False) -> list[Path]:
    """What processes that are gone were writing in a folder, or there in the place of one name.

    Of another machine's processes (this one before it was started anew is another) nothing is known. `by_others` takes
    theirs too where they are a day old: only who knows that nobody works there should say so.
    """
    found = []
    with contextlib.suppress(OSError):  # there is no such folder
        for path in folder.iterdir():
            name = _NAME.fullmatch(path.name)
            if name and of in (None, name["of"]) and _is_left(path, name, by_others):
                found.append(path)
    return sorted(found)


def clear_left(folder: Path, of: str | None = None) -> None:
    """Remove what processes that are gone were writing; what cannot be removed stays, and does no harm."""
    remove_quietly(left_behind(folder, of))


def remove_quietly(paths: Iterable[Path]) -> None:
    """Remove files, folders and links (not what they lead to); what cannot be removed stays."""
    for path in paths:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                path.unlink()


def _is_left(path: Path, name: re.Match[str], by_others: bool) -> bool:
    if name["machine"] == _machine():
        return is_gone(int(name["pid"]), name["born"])
    return by_others and _age(path) > _DAY


def _age(path: Path) -> float:
    """Seconds since anything in it was written."""
    times = [0.0]
    with contextlib.suppress(OSError):  # somebody else is removing it
        times += [one.lstat().st_mtime for one in (path, *path.rglob("*"))]
    return time.time() - max(times)


@cache
def _machine() -> str:
    return hashlib.sha256(machine().encode()).hexdigest()[:8]


# --- Which process it is: on which machine, with which number, born when; and whether it can still come back.


@cache
def machine() -> str:
    """This machine, as far as process numbers mean anything: two containers are two."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    return f"{socket.gethostname()} {secrets.token_hex(8)}"  # nothing is known: every process is its own machine


def birth(pid: int) -> str:
    """When a process was started, which tells it from a later one of the same number; empty where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def is_gone(pid: int, born: str) -> bool:
    """Whether a process of this machine has ended; one that the system hides from us may be there."""
    now = birth(pid)
    return now != born and not (now == "" and _is_hidden(pid))


def _is_hidden(pid: int) -> bool:
    """Whether it is somebody else's, of which /proc says nothing where it is mounted so."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        pass
    return False
