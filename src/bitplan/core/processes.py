"""Which process it is: on which machine, with which number, born when; and whether it can still come back."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from functools import cache
from pathlib import Path


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
