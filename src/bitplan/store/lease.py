"""Leases: who works on what, among processes that share nothing but a folder.

A lease is a file that is created exclusively. Its holder touches it every few seconds. A process that finds it
untouched for long, or its holder's process gone, takes it over. A lease that cannot be read may still be held: it is
taken over after the same time. Clocks of different machines are never compared.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from bitplan.core.errors import WriteError
from bitplan.core.parsing import parse_json
from bitplan.store.files import flush_folder, is_gone, machine_name, make_folder, process_birth, temporary_name

_log = logging.getLogger(__name__)
_TAKEN = ".taken"
_LONGEST = 4096  # bytes of a lease; what is longer is none
PATIENCE = 60.0
"""Seconds without a sign of life after which a holder on another machine is given up."""


@dataclass(frozen=True)
class Holder:
    """Who holds a lease: a process on a machine, and a token that is never used twice."""

    machine: str
    pid: int
    born: str
    token: str

    @classmethod
    def unknown(cls, found: os.stat_result) -> Holder:
        """Return a holder for a lease that cannot be read. It is another holder once the file is touched."""
        return cls("", 0, "", f"{found.st_ino:x}at{found.st_mtime_ns:x}")

    @property
    def known(self) -> bool:
        """True if the lease says who it is."""
        return bool(self.machine)

    @property
    def gone(self) -> bool:
        """True if the process is known to have ended; nothing is known about another machine."""
        return self.machine == machine_name() and is_gone(self.pid, self.born)

    @property
    def here(self) -> bool:
        """True if it is this process."""
        own = os.getpid()
        return (self.machine, self.pid, self.born) == (machine_name(), own, process_birth(own))


@dataclass(frozen=True)
class Sign:
    """The state of a lease: its holder, and when it was last touched (by the disk's clock)."""

    holder: Holder
    touched: int


def read_lease(path: Path) -> Sign | None:
    """Return the state of a lease, or None if there is none. The holder is unknown if it cannot be read."""
    try:
        found = path.lstat()
        holder = _read(path) if stat.S_ISREG(found.st_mode) else None  # reading a pipe would wait for ever
    except OSError:
        return None
    return Sign(holder or Holder.unknown(found), found.st_mtime_ns)


def _read(path: Path) -> Holder | None:
    """Return the holder that a lease names; None if it is empty, cut off or not ours."""
    try:
        with path.open("rb") as file:
            holder = Holder(**parse_json(file.read(_LONGEST)))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    words = (holder.machine, holder.born, holder.token)
    sound = all(isinstance(word, str) and word for word in words) and type(holder.pid) is int
    return holder if sound and holder.token.isalnum() else None  # the token becomes part of a file's name


@contextlib.contextmanager
def hold_lease(path: Path, *, stale: str | None = None) -> Iterator[bool]:
    """Hold a lease until the block ends; yield False at once if another process holds it.

    `stale` is the token of a holder that gave no sign of life: its lease is taken over.
    """
    token = _claim(path, stale)
    if token is None:
        yield False
        return
    ended = threading.Event()
    beat = threading.Thread(target=_touch, args=(path, ended), daemon=True)
    beat.start()
    try:
        yield True
    finally:
        ended.set()
        beat.join()
        sign = read_lease(path)
        if sign is not None and sign.holder.token == token:
            with contextlib.suppress(OSError):  # on a disk that is read-only now it stays, as if we had been killed
                path.unlink()


class SilentHolders:
    """Watches leases over time, to find those whose holders have gone silent."""

    def __init__(self, patience: float | None = None) -> None:
        self._patience = PATIENCE if patience is None else patience
        self._seen: dict[Path, tuple[Sign, float]] = {}

    def stale(self, path: Path) -> str | None:
        """Return the token of a holder to take over, since it is gone or silent for too long; else None."""
        sign = read_lease(path)
        if sign is None:
            return None
        if sign.holder.gone:
            return sign.holder.token
        before, since = self._seen.get(path, (None, 0.0))
        if before != sign:
            self._seen[path] = (sign, time.monotonic())
            if not sign.holder.known:
                _log.warning("%s cannot be read: unless somebody touches it, it is taken over after %.0f s",
                             path, self._patience)  # fmt: skip
            return None
        if time.monotonic() - since <= self._patience:
            return None
        _log.warning("%s shows no sign of life of its holder for %.0f s: it is taken over", path, self._patience)
        return sign.holder.token


def _claim(path: Path, stale: str | None) -> str | None:
    """Create the lease, or replace a stale one. Return the token, or None if another process holds it."""
    me = Holder(machine_name(), os.getpid(), process_birth(os.getpid()), secrets.token_hex(8))
    mine = temporary_name(path)
    try:
        make_folder(path.parent)
        with mine.open("x", encoding="utf-8") as file:
            file.write(json.dumps(asdict(me)))
            file.flush()
            os.fsync(file.fileno())  # a power cut leaves a whole lease or none
        try:
            os.link(mine, path)  # fails where the lease exists, and is never seen half written
        except FileExistsError:
            sign = read_lease(path)
            if sign is None or not (sign.holder.gone or sign.holder.token == stale):
                return None
            if not _replace(path, mine, sign.holder.token):
                return None
        flush_folder(path.parent)
        return me.token
    except OSError as error:
        raise WriteError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            mine.unlink()


def _replace(path: Path, mine: Path, old: str) -> bool:
    """Replace an old lease by ours, and return True. If several processes try, one succeeds.

    The process that makes the marker of the old token may replace. It looks at the lease once more first: a marker can
    be made a second time only after the first winner removed it, and then the winner's lease is there.
    """
    marker = path.with_name(f".{path.name}.{old}{_TAKEN}")
    try:
        os.link(mine, marker)  # so that it says who made it
    except FileExistsError:
        _clear(marker, mine)
        return False
    try:
        sign = read_lease(path)
        if sign is None or sign.holder.token != old:
            return False
        if path.is_dir() and not path.is_symlink():  # no file can be renamed over a folder
            path.rename(path.with_name(f".{path.name}.{old}.unreadable"))
        os.replace(mine, path)
        return True
    finally:
        marker.unlink(missing_ok=True)


def _clear(marker: Path, mine: Path) -> None:
    """Remove the marker of a killed process; a living one removes its own."""
    made = read_lease(marker)
    if made is None:
        return
    with contextlib.suppress(FileNotFoundError):
        apart = abs(mine.stat().st_mtime - marker.stat().st_mtime)  # whichever way the disk's clock was set meanwhile
        if made.holder.gone or apart > PATIENCE:
            marker.unlink()


def list_left_markers(leases: Path) -> list[Path]:
    """Return the markers of processes that were killed while they took over a lease that is another by now."""
    found = []
    for marker in leases.glob(f".*{_TAKEN}"):
        name, _, old = marker.name[1:].removesuffix(_TAKEN).rpartition(".")
        sign = read_lease(leases / name)
        if sign is None or sign.holder.token != old:  # and never will be: whoever makes this marker now goes away
            found.append(marker)
    return found


def _touch(path: Path, ended: threading.Event) -> None:
    while not ended.wait(PATIENCE / 10):
        with contextlib.suppress(OSError):
            os.utime(path)
