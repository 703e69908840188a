"""A disk that can be full, or read-only: a tmpfs in a mount namespace of our own."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_INSIDE = "BITPLAN_TORTURE_MAY_MOUNT"
_ROOM = 400  # MiB


@dataclass(frozen=True)
class Disk:
    """A mounted tmpfs."""

    folder: Path

    @classmethod
    def mounted(cls, folder: Path) -> Disk | None:
        """One at that folder, where mounting is allowed and seen by nobody else."""
        if _INSIDE not in os.environ:
            return None
        folder.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_ROOM}m", "tmpfs", str(folder)], check=True)
        return cls(folder)

    def unmount(self) -> None:
        """It was enough."""
        subprocess.run(["umount", str(self.folder)], check=True)

    @contextlib.contextmanager
    def almost_full(self, spare: int) -> Iterator[None]:
        """Only so many bytes are left."""
        about = os.statvfs(self.folder)
        used = (about.f_blocks - about.f_bfree) * about.f_frsize
        self._remount(f"size={used + spare}")
        yield
        self._remount(f"size={_ROOM}m")

    @contextlib.contextmanager
    def read_only(self) -> Iterator[None]:
        """Nothing can be written."""
        self._remount("ro")
        yield
        self._remount("rw")

    def _remount(self, options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", str(self.folder)], check=True)


def start_where_mounting_is_allowed() -> None:
    """Begin again in a mount namespace of our own, where the system gives one; else go on without."""
    if _INSIDE in os.environ:
        return
    for prefix in (("unshare", "-m"), ("unshare", "-rm")):
        with contextlib.suppress(OSError):
            tried = subprocess.run([*prefix, "mount", "-t", "tmpfs", "t", "/mnt"], capture_output=True, check=False)
            if not tried.returncode:
                os.environ[_INSIDE] = "1"
                os.execvp(prefix[0], [*prefix, sys.executable, "-m", "benchmarks.torture", *sys.argv[1:]])
