"""The door behind which files are parsed: whatever a parser throws is the file's fault, said in one line with its name.

Files come from strangers, and parsers of json, pickles, protocol buffers, images … raise nearly every kind of error on
a damaged one. Inside `parsing` all of them count as the file's fault, running out of memory and of stack included,
except those that no content can cause: a name or a module that does not exist, and a failed `assert` of bitplan's own.
These, and everything after the block, remain bugs and show a traceback. So a block holds the parser, and what of ours
looks into what it gave; nothing that works with the result.
"""

from __future__ import annotations

import json
import math
import os
import re
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from bitplan.core.errors import FileError, InputError

_OWN = str(Path(__file__).parents[1])
_HALF_CHARACTER = re.compile(r"\\u[dD][89a-fA-F]")
_MOST_DIGITS = 20  # of a whole number: those of 64 bits


@contextmanager
def explain_failures(path: str | Path, what: str, advice: str) -> Iterator[None]:
    """Say in one line that a file is not `what` it should be, and what to do about it."""
    try:
        with name_file_in_errors(path, advice):
            yield
    except InputError:
        raise
    except OSError as error:
        if error.errno is None:  # of a library, about the content
            raise _refusal(path, what, advice, error) from error
        raise FileError(f"cannot read {path}: {error.strerror}") from None
    except Exception as error:
        if _is_bug(error):
            raise
        if isinstance(error, MemoryError) or "allocate" in str(error):  # as libraries say it
            raise FileError(
                f"{path} claims more memory than there is or a file may take: it is not {what}; {advice}, or if you "
                f"trust it, raise the limit with {VARIABLE}=64GB"
            ) from error
        raise _refusal(path, what, advice, error) from error


@contextmanager
def name_file_in_errors(path: str | Path, advice: str = "") -> Iterator[None]:
    """Put the name of a file before an error of ours that does not say it, where its content is used."""
    try:
        yield
    except InputError as error:
        if str(path) in str(error):
            raise
        raise FileError(f"{path}: {error}{advice and '; '}{advice}") from None


def parse_json(text: str | bytes) -> Any:
    """JSON as the standard has it, and strictly: no name twice in an object, no NaN, no number that cannot be kept."""
    try:
        decoded = text.decode("utf-8") if isinstance(text, bytes) else text
        content = json.loads(
            decoded,
            object_pairs_hook=_without_twins,
            parse_constant=_refuse_constant,
            parse_float=_finite,
            parse_int=_whole,
        )
        if _HALF_CHARACTER.search(decoded):
            json.dumps(content, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        cut = error.pos >= len(error.doc.rstrip()) or error.msg.startswith("Unterminated string")
        raise FileError(f"{'cut off' if cut else 'not JSON'} ({error})") from None
    except UnicodeError as error:
        raise FileError(f"not JSON ({first_line(error)})") from None
    except RecursionError:
        raise FileError("not JSON (nested too deeply)") from None
    return content


def parse_toml(text: str) -> dict[str, Any]:
    """TOML whose numbers can be kept: no NaN, none of thousands of digits."""
    try:
        content = tomllib.loads(text, parse_float=_finite)
        json.dumps(content, default=str)  # refuses what no record can hold
    except FileError:
        raise
    except RecursionError:
        raise FileError("not TOML (nested too deeply)") from None
    except ValueError as error:
        raise FileError(f"not TOML ({first_line(error)})") from None
    return content


def first_line(error: BaseException, most: int = 120) -> str:
    """The beginning of what an error says."""
    return str(error).strip().partition("\n")[0][:most]


def _refusal(path: str | Path, what: str, advice: str, error: Exception) -> FileError:
    said = "nested too deeply" if isinstance(error, RecursionError) else first_line(error) or type(error).__name__
    return FileError(f"{path} is cut off or not {what} ({said}): {advice}")


def _is_bug(error: Exception) -> bool:
    """Whether no content of a file can be the cause: see the top of this file."""
    if not isinstance(error, AssertionError):
        return isinstance(error, NameError | ImportError)
    place: TracebackType | None = error.__traceback__
    while place is not None and place.tb_next is not None:
        place = place.tb_next
    return place is not None and place.tb_frame.f_code.co_filename.startswith(_OWN)


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The pairs of an object as a dict; json itself would keep the last of two that have one name."""
    content = dict(pairs)
    if len(content) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise FileError(f"{twice[:60]!r} stands twice in one object")
    return content


def _refuse_constant(name: str) -> None:
    raise FileError(f"the number {name} is not finite")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise FileError(f"the number {text[:20]} is not finite")
    return value


def _whole(text: str) -> int:
    if len(text) > _MOST_DIGITS:
        raise FileError(f"the number {text[:10]}… of {len(text)} digits is too large")
    return int(text)


# --- How much memory a file may take that is read: looked up in sizes before it is taken, or else held by the
# system.

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
def limit_memory(path: str | Path, size: int | None = None) -> Iterator[None]:
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
