"""How much memory a file may take that is read: looked up in sizes before it is taken, or else held by the system.

A file of a stranger may be small and claim to be large. It may take 1 GB and four times its size, unless the
environment says otherwise: BITPLAN_MEMORY=8GB.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bitplan.core.errors import FileError, InputError

VARIABLE = "BITPLAN_MEMORY"
_GB = 1 << 30
_BYTES = {"": 1, "MB": 1 << 20, "GB": _GB}
_PER_CORE = 80 << 20  # of addresses that a thread of a library's takes for its stack and its heap
_TIMES = 4  # the size of a file that what is read from it may take, beside 1 GB
_STATM = Path("/proc/self/statm")  # its first number is how many pages the process has mapped
_MEMINFO = Path("/proc/meminfo")
_lock = threading.Lock()
_held: list[tuple[int, int] | None] = []  # the limit that each block inside found; the first is the process's own


def memory_for(size: int) -> int:
    """How many bytes of memory a file of so many bytes may take."""
    written = os.environ.get(VARIABLE)
    if written is None:
        return _GB + _TIMES * size
    number = re.fullmatch(r"(\d{1,15}) ?(MB|GB|)", written.strip().upper())
    if number is None:
        raise InputError(f"{VARIABLE}={written} is no size: write a number of bytes, 500MB or 8GB")
    return int(number[1]) * _BYTES[number[2]]


def available_memory() -> int | None:
    """The bytes that this machine could still give out; None where the system does not tell (Linux does)."""
    return _told("MemAvailable:")


def _free_swap() -> int:
    return _told("SwapFree:") or 0


def _told(name: str) -> int | None:
    """The bytes of that name that the system tells."""
    try:
        return int(_MEMINFO.read_text(encoding="ascii").partition(name)[2].split()[0]) << 10
    except (OSError, ValueError, IndexError):
        return None


def check_room(path: str | Path, need: int, size: int) -> None:
    """Refuse what would take more memory than a file of so many bytes may."""
    if need > memory_for(size):
        raise FileError(
            f"{path} would take {_shown(need)} of memory, where a file of its size ({_shown(size)}) may take "
            f"{_shown(memory_for(size))}: if you trust it, raise the limit with {VARIABLE}={-(-need // _GB)}GB"
        )


def check_available(path: str | Path, need: int) -> None:
    """Refuse what takes more memory than this machine has left, however large the file says that it is."""
    left = available_memory()
    if left is not None and need > left + _free_swap():
        raise FileError(
            f"{path} would take {_shown(need)} of memory, and this machine has {_shown(left)} left: it is not read"
        )


@contextmanager
def bounded(path: str | Path, size: int | None = None) -> Iterator[None]:
    """Let the process grow by no more than a file may take, where its sizes cannot be known before it is read.

    `size` is that of what belongs to it, where it only describes other files.
    The system holds this limit, for all threads, where it has such limits (Linux). What goes beyond is a MemoryError,
    or what a library makes of one. Blocks of several threads share the largest of their limits.
    """
    allowed = memory_for(
        os.path.getsize(path) if size is None else size
    )  # outside: what fails here must leave no block behind
    with _lock:
        _held.append(_limit())
        try:
            _hold(allowed)
        except BaseException:
            _held.pop()
            raise
    try:
        yield
    finally:
        with _lock:
            before = _held.pop()
            if not _held and before is not None:
                _set_limit(*before)


def _hold(allowed: int) -> None:
    """Let the process map so much more; who is inside already keeps what it has, and so does whoever set a limit."""
    first, mapped = _held[0], _mapped()
    allowed += _PER_CORE * (os.cpu_count() or 1)
    if first is None or not mapped:
        return
    now = _limit()
    assert now is not None
    inside = len(_held) > 1
    wanted = max(now[0], mapped + allowed) if inside else mapped + allowed
    bounds = [bound for bound in first if bound >= 0]  # −1 is none
    _set_limit(min([wanted, *bounds]), first[1])


def _limit() -> tuple[int, int] | None:
    """What the process may map, and how far that can be raised; None where the system has no such limit."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrlimit(resource.RLIMIT_AS)


def _set_limit(soft: int, hard: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _mapped() -> int:
    """The bytes that this process has mapped; 0 where the system does not say."""
    try:
        return int(_STATM.read_text(encoding="ascii").split()[0]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0


def _shown(size: int) -> str:
    return f"{size / _GB:,.1f} GB" if size >= _GB // 10 else f"{size / (1 << 20):,.1f} MB"
