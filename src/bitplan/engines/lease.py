"""Leases: who works on what, among processes that share nothing but a folder.

A lease is a file that is created exclusively. Its holder touches it every few seconds; who finds it untouched for
long, or its holder's process gone, takes it over. Clocks of different machines are never compared.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from bitplan.core.errors import WriteError
from bitplan.core.parsing import parse_json

PATIENCE = 60.0
"""Seconds without a sign of life after which a holder on another machine is given up."""


@dataclass(frozen=True)
class Holder:
    """Who holds a lease: a process on a machine, and a token that is never used twice."""

    machine: str
    pid: int
    born: str
    token: str

    @property
    def gone(self) -> bool:
        """Whether the process is known to have ended; on another machine nothing is known."""
        return self.machine == _machine() and _birth(self.pid) != self.born

    @property
    def here(self) -> bool:
        """Whether it is this process."""
        own = os.getpid()
        return (self.machine, self.pid, self.born) == (_machine(), own, _birth(own))


@dataclass(frozen=True)
class Sign:
    """What was seen of a lease: its holder, and when it was last touched (by the disk's clock)."""

    holder: Holder
    touched: int


def read_lease(path: Path) -> Sign | None:
    """Look at a lease; None where there is none, or none that is whole yet."""
    try:
        touched = path.stat().st_mtime_ns
        return Sign(_holder(parse_json(path.read_bytes())), touched)
    except (OSError, ValueError, TypeError):
        return None


def _holder(content: dict[str, Any]) -> Holder:
    """Who a lease names, believed only where it can be one: numbers and tokens become parts of paths."""
    holder = Holder(**content)
    texts = (holder.machine, holder.born, holder.token)
    if type(holder.pid) is not int or not all(isinstance(text, str) for text in texts) or not holder.token.isalnum():
        raise ValueError("no process is like this")
    return holder


@contextlib.contextmanager
def held(path: Path, *, stale: str | None = None) -> Iterator[bool]:
    """Hold a lease until the block ends; gives False at once where somebody else holds it.

    `stale` is the token of a holder that was seen to give no sign of life: that one is taken over.
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
    """Looks at leases again and again, to find those whose holders have gone silent."""

    def __init__(self, patience: float = PATIENCE) -> None:
        self._patience = patience
        self._seen: dict[Path, tuple[Sign, float]] = {}

    def stale(self, path: Path) -> str | None:
        """The token of a holder to take over: gone, or silent for as long as we have patience."""
        sign = read_lease(path)
        if sign is None:
            return None
        if sign.holder.gone:
            return sign.holder.token
        before, since = self._seen.get(path, (None, 0.0))
        if before != sign:
            self._seen[path] = (sign, time.monotonic())
            return None
        return sign.holder.token if time.monotonic() - since > self._patience else None


def _claim(path: Path, stale: str | None) -> str | None:
    """Create the lease, or replace a stale one; the token where that worked."""
    me = Holder(_machine(), os.getpid(), _birth(os.getpid()), secrets.token_hex(8))
    mine = path.with_name(f".{path.name}.{me.token}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        mine.write_text(json.dumps(asdict(me)), encoding="utf-8")
        try:
            os.link(mine, path)  # fails where the lease exists, and is never seen half written
            return me.token
        except FileExistsError:
            sign = read_lease(path)
            if sign is None or not (sign.holder.gone or sign.holder.token == stale):
                return None
            return me.token if _replace(path, mine, sign.holder.token) else None
    except OSError as error:
        raise WriteError(f"cannot write {path}: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            mine.unlink()


def _replace(path: Path, mine: Path, old: str) -> bool:
    """Put our lease in the place of an old one; of several who try, one succeeds.

    Who makes the marker of that token may replace. It looks at the lease once more first: a marker can only be made
    a second time after the first winner, whose lease is then there, has removed it.
    """
    marker = path.with_name(f".{path.name}.{old}.taken")
    try:
        os.close(os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        with contextlib.suppress(FileNotFoundError):  # its maker is done
            if mine.stat().st_mtime - marker.stat().st_mtime > PATIENCE:  # or was killed between two lines of ours
                marker.unlink()
        return False
    try:
        sign = read_lease(path)
        if sign is None or sign.holder.token != old:
            return False
        os.replace(mine, path)
        return True
    finally:
        marker.unlink(missing_ok=True)


def _touch(path: Path, ended: threading.Event) -> None:
    while not ended.wait(PATIENCE / 10):
        with contextlib.suppress(OSError):
            os.utime(path)


@cache
def _machine() -> str:
    """This machine, as far as process numbers mean anything: two containers are two."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    return f"{socket.gethostname()} {secrets.token_hex(8)}"  # nothing is known: every process is its own machine


def _birth(pid: int) -> str:
    """When a process was started, which tells it from a later one of the same number; empty where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
