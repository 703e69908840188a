"""Folders that are put in place of others: at every moment the old one or the new one has the name.

Where the file system can exchange two names, that is one step. Where it cannot (some network disks), the old folder is
set aside under a name of its own first, and whoever is killed then leaves it there: `restore` finds it again.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import os
import secrets
from functools import cache
from pathlib import Path
from typing import Any

from bitplan.core.temporary import remove_quietly

_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of renameat2(2)
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)
_CANNOT = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


def put_in_place(new: Path, target: Path) -> None:
    """Give a folder its name; what had the name before is removed afterwards, and stays where this fails."""
    try:
        new.rename(target)  # nothing is there, or an empty folder
        return
    except OSError as error:
        if error.errno not in _TAKEN:
            raise
    if not exchange(new, target):
        _in_two_steps(new, target)
        return
    remove_quietly([new])  # the old one by now


def restore(target: Path) -> None:
    """Give a folder its name back that somebody had set aside who was killed before the new one was in place."""
    aside = _set_aside(target)
    with contextlib.suppress(OSError):  # somebody else was faster, or the disk is read-only
        if aside and not os.path.lexists(target):
            max(aside, key=lambda path: path.stat().st_ctime_ns).rename(target)


def exchange(one: Path, other: Path) -> bool:
    """Let two paths exchange what they name, in one step; False where the system or this disk has no such step."""
    rename = _renameat2()
    if rename is None:
        return False
    if rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT:
        return False
    raise OSError(number, os.strerror(number), str(other))


@cache
def _renameat2() -> Any:
    try:
        return ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return None


def _in_two_steps(new: Path, target: Path) -> None:
    for left in _set_aside(target):  # by somebody who was killed when the new one was in place
        _forget(left)
    old = target.with_name(f".{target.name}.old.{secrets.token_hex(4)}")
    target.rename(old)
    try:
        new.rename(target)
    except OSError:
        old.rename(target)
        raise
    _forget(old)


def _set_aside(target: Path) -> list[Path]:
    return list(target.parent.glob(f".{glob.escape(target.name)}.old.*"))


def _forget(old: Path) -> None:
    """Remove what was set aside; first its name, so that nobody restores a half of it."""
    gone = old.with_name(old.name.replace(".old.", ".gone."))
    with contextlib.suppress(OSError):
        old.rename(gone)
        remove_quietly([gone])
