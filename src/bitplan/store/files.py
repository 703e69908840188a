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
def atomic_file(path: str | Path) -> Iterator[Path]:
    """Yield a temporary name to write under; when the block ends, flush the file and give it its own name.

    The name is flushed too, so that no power cut takes it back. A kill, a full disk or an error in the block leaves no
    half file, and the old file stays. Raise WriteError if the system refuses anything. Folders above the file are made.
    """
    target = Path(path)
    check_regular_file(target)
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
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Yield a temporary folder to fill; when the block ends, flush its files and give it its own name.

    The old folder stays until then, and also if the block or the replacement fails. Folders that killed processes left
    half written are removed first.
    """
    target = Path(path)
    temporary = temporary_name(target)
    with _refusals_named(target):
        try:
            clear_left(target.parent, target.name)
            make_folder(temporary)
            restore_folder(target)
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
    with atomic_file(path) as temporary:
        temporary.write_bytes(content)
    return Path(path)


def read_text(path: str | Path) -> str:
    """Return the text of a file (UTF-8). Raise FileError in one line if it cannot be read."""
    try:
        return read_bytes(path, times=_PARSED).decode("utf-8")
    except UnicodeDecodeError:
        raise Damaged(f"{path} is not a text file (UTF-8)") from None


def read_bytes(path: str | Path, *, times: int = 1) -> bytes:
    """Return the content of a file. Refuse one whose values would take too much memory: `times` its bytes."""
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


def check_text_size(path: Path) -> None:
    """Raise FileError if reading a file whole as text would take more memory than it may."""
    size = path.stat().st_size
    check_room(path, _PARSED * size, size)


def open_file(path: str | Path) -> io.BufferedReader:
    """Open a file to read it. Raise OSError for a pipe or a device, which may keep us waiting for ever.

    A pipe that a shell hands over as a file, `<(…)`, is open already, and is read.
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


def follow_links(path: Path) -> Path:
    """Return the target of a path that a user wrote, so that a link stays and its target is written.

    Files of a run are written without this: links in a run may be anybody's, so they are replaced.
    """
    try:
        leads_on = path.is_symlink() and _kind_of_special(path) in (None, _FOLDER)
        return path.resolve() if leads_on else path
    except (OSError, RuntimeError):
        raise WriteError(f"cannot write {path}: its links go in a circle") from None


def check_name(name: str) -> str:
    """Return an id that serves as a file's name. Refuse one that leads elsewhere: ids are read from files too."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise FileError(f"{name!r} is no id: a file says it that bitplan did not write")
    return name


def check_regular_file(target: Path) -> None:
    """Raise WriteError if a folder, pipe or device has the name of a file: renaming would replace it."""
    kind = _kind_of_special(target)
    if kind is not None:
        raise WriteError(f"cannot write {target}: it is a {kind}, not a file")


def is_same(one: Path, other: Path) -> bool:
    """Return True if two names are of one existing file or folder."""
    try:
        return os.path.samefile(one, other)
    except (OSError, ValueError):  # one is not there, or is no name
        return False


def is_below(one: Path, other: Path) -> bool:
    """Return True if a path leads to an existing file or folder inside another folder, at any depth."""
    try:
        return one.exists() and other.resolve() in one.resolve().parents
    except (OSError, ValueError, RuntimeError):  # it is no name, or its links go in a circle
        return False


def _kind_of_special(path: Path) -> str | None:
    """Return the kind of a path's target, such as "folder"; None for a regular file or if there is nothing."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return None
    return None if stat.S_ISREG(mode) else _SPECIAL.get(stat.S_IFMT(mode), "device")


def sha256_of(path: str | Path) -> str:
    """Return the SHA-256 of a file's content."""
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
    """Rename a damaged file or folder, and return the new name. It is never deleted.

    It is no error if another process did so before.
    """
    endings = itertools.chain([ASIDE], (f"{ASIDE}.{number}" for number in itertools.count(2)))
    names = (path.with_name(f"{path.name}{ending}") for ending in endings)
    aside = next(name for name in names if not os.path.lexists(name))
    with _refusals_named(aside), contextlib.suppress(FileNotFoundError):
        path.rename(aside)
        flush_folder(path.parent)
    return aside


def _unreadable(path: Path, error: OSError) -> FileError:
    """Return the error for a file that cannot be read. A failing disk counts as damage."""
    kind = Damaged if error.errno == errno.EIO else FileError
    where = _looked_in(path) if isinstance(error, FileNotFoundError) else ""
    return kind(f"cannot read {path}: {error.strerror or error}{where}")


def _looked_in(path: Path) -> str:
    """Return similar names in the folder of a missing file, or else the folder."""
    if not path.parent.is_dir():
        return f"; there is no folder {path.parent}"
    stems = sorted(other.stem for other in path.parent.iterdir() if other.suffix == path.suffix)
    near = [f"{stem}{path.suffix}" for stem in difflib.get_close_matches(path.stem, stems, n=2, cutoff=0.75)]
    return f"; did you mean {' or '.join(near)}?" if near else f" in {path.parent.resolve()}"


def remove_paths(paths: Iterable[Path]) -> None:
    """Remove files and folders. Raise WriteError in one line if that fails."""
    for path in paths:
        try:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        except OSError as error:
            raise WriteError(f"cannot remove {path}: {error.strerror or error}") from None


@contextmanager
def _refusals_named(target: Path) -> Iterator[None]:
    """Turn an OSError in this block into a WriteError that names the target."""
    try:
        yield
    except FileExistsError as error:
        raise WriteError(f"cannot write {target}: {error.filename} is in the way, which is no folder") from None
    except OSError as error:
        raise WriteError(f"cannot write {target}: {error.strerror or error}") from None


def make_folder(path: Path) -> None:
    """Make a folder and those above it, and flush their names."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        flush_folder(folder.parent)


def flush_file(path: Path) -> None:
    """Flush the content of a file to the disk."""
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def flush_folder(path: Path) -> None:
    """Flush the names in a folder to the disk, if the file system can."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(number)


# Folders are replaced in two renames: the old one moves aside, the new one gets the name.

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
                restore_folder(target)
                raise
        with contextlib.suppress(FileNotFoundError):
            target.rename(target.with_name(f".{target.name}.old.{secrets.token_hex(4)}"))
    for old in _list_aside(target):
        gone = temporary_name(target)  # renamed first, so that `restore` never finds half of it
        with contextlib.suppress(OSError):
            old.rename(gone)
            remove_quietly([gone])


def restore_folder(target: Path) -> None:
    """Put a folder back that a killed process had moved aside and not yet replaced."""
    aside = _list_aside(target)
    with contextlib.suppress(OSError):  # another process was faster, or the disk is read-only
        if aside and not os.path.lexists(target):
            max(aside, key=lambda path: path.stat().st_ctime_ns).rename(target)


def _list_aside(target: Path) -> list[Path]:
    return list(target.parent.glob(f".{glob.escape(target.name)}.old.*"))


# Temporary names: a file has one until it is whole. A killed process leaves it behind.

_NAME = re.compile(r"\.(?P<of>.+)\.(?P<machine>[0-9a-f]{8})-(?P<pid>\d{1,9})-(?P<born>\d*)-[0-9a-f]{8}(\.[^.]*)?")
_DAY = 24 * 3600.0


def temporary_name(target: Path) -> Path:
    """Return an unused name beside the target. The suffix stays, since some writers look at it."""
    pid = os.getpid()
    return target.with_name(
        f".{target.name}.{_machine()}-{pid}-{process_birth(pid)}-{secrets.token_hex(4)}{target.suffix}"
    )


def list_left_behind(folder: Path, of: str | None = None, *, by_others: bool = False) -> list[Path]:
    """Return the temporary files and folders that ended processes left in a folder, or for one name in it.

    Nothing is known about processes of another machine; this one before a reboot counts as another. `by_others` takes
    theirs too if they are a day old: use it only if nobody works there.
    """
    found = []
    with contextlib.suppress(OSError):  # there is no such folder
        for path in folder.iterdir():
            name = _NAME.fullmatch(path.name)
            if name and of in (None, name["of"]) and _is_left(path, name, by_others):
                found.append(path)
    return sorted(found)


def clear_left(folder: Path, of: str | None = None) -> None:
    """Remove the temporary files of ended processes. Those that cannot be removed stay; they do no harm."""
    remove_quietly(list_left_behind(folder, of))


def remove_quietly(paths: Iterable[Path]) -> None:
    """Remove files, folders and links (not their targets). Those that cannot be removed stay."""
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
    """Return the seconds since anything in a file or folder was written."""
    times = [0.0]
    with contextlib.suppress(OSError):  # somebody else is removing it
        times += [one.lstat().st_mtime for one in (path, *path.rglob("*"))]
    return time.time() - max(times)


@cache
def _machine() -> str:
    return hashlib.sha256(machine_name().encode()).hexdigest()[:8]


# Processes are told apart by machine, number and start time.


@cache
def machine_name() -> str:
    """Return a name for the space of process numbers: the machine since its boot, or the container."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    return f"{socket.gethostname()} {secrets.token_hex(8)}"  # nothing is known: every process is its own machine


def process_birth(pid: int) -> str:
    """Return the start time of a process, which tells it from a later one with its number; "" if there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]


def is_gone(pid: int, born: str) -> bool:
    """Return True if a process of this machine has ended. A hidden process may still run."""
    now = process_birth(pid)
    return now != born and not (now == "" and _is_hidden(pid))


def _is_hidden(pid: int) -> bool:
    """Return True if the process belongs to another user and /proc hides it (hidepid)."""
    try:
        os.kill(pid, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        pass
    return False
