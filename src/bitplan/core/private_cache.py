"""The user's own cache folder. What lies in some caches is run as code, so nobody else may be able to write there."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path


class UnsafeFolder(OSError):
    """A folder that somebody else can write to, or replace."""


def private_cache_folder(name: str, variable: str) -> Path:
    """Return the folder for one cache: the one that an environment variable names, or bitplan/NAME in the user's cache.

    Create it if needed. Raise UnsafeFolder if others can write to it, and OSError if it cannot be written.
    """
    named = os.environ.get(variable)
    folder = Path(named) if named else _user_cache() / "bitplan" / name
    if not folder.is_absolute():
        raise UnsafeFolder(f"{variable}={named} is a folder below the current one: give its whole path")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    check_private(folder)
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder} cannot be written")
    return folder


def check_private(folder: Path) -> None:
    """Raise UnsafeFolder if anybody but this user and root can write to a folder, or replace it or one above it."""
    if sys.platform == "win32":  # where profiles are private, and modes say nothing
        return
    folder, user = folder.resolve(), os.geteuid()
    for part in [*reversed(folder.parents), folder]:
        found = part.stat()
        if found.st_uid not in (0, user):
            raise UnsafeFolder(f"{part} belongs to another user")
        is_sticky = found.st_mode & stat.S_ISVTX and part != folder  # nobody can replace what is not theirs
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_sticky:
            raise UnsafeFolder(f"other users can write to {part}: chmod go-w {part}")
        if found.st_uid == user and not found.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            return  # nobody else gets in, whatever the modes of folders below


def _user_cache() -> Path:
    """Return the folder for caches of this user; XDG_CACHE_HOME counts if it is a whole path, as its standard says."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return named if named.is_absolute() else Path.home() / ".cache"
    except RuntimeError as error:
        raise FileNotFoundError(f"this user has no home folder ({error})") from None
