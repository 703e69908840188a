"""Temporary names: what is written gets its own name when it is whole, and who is killed before leaves this one.

The name says which process writes, so that what it left can be told from what it is writing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from bitplan.core.processes import birth, is_gone, machine

_NAME = re.compile(r"\.(?P<of>.+)\.(?P<machine>[0-9a-f]{8})-(?P<pid>\d{1,9})-(?P<born>\d*)-[0-9a-f]{8}(\.[^.]*)?")
_GONE = re.compile(r"\.(?P<of>.+)\.gone\.[0-9a-f]{8}")  # a folder that was replaced, and is being removed
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
            name = _NAME.fullmatch(path.name) or _GONE.fullmatch(path.name)
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
    if name.re is _GONE:
        return True  # whoever removes it finds nothing to do
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
