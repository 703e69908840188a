"""Sweeps in processes of their own, forked from one that has imported everything, and how they are killed."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bitplan.core.errors import BitplanError, WriteError
from bitplan.core.studies import Study
from bitplan.store.engines import Local
from bitplan.study.sweep import sweep

How = Literal["here", "workers"]
FULL, BROKEN = 3, 4
"""Exit codes: the disk refused; something happened that never should."""


@dataclass
class Driver:
    """A process that sweeps, the leader of a group of its own."""

    pid: int
    code: int | None = None

    def ended(self, *, wait: float = 0.0) -> bool:
        """Whether it has ended, waiting for a while."""
        until = time.monotonic() + wait
        while self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() >= until:
                return False
            else:
                time.sleep(0.002)
        return True

    def kill(self, *, group: bool = False) -> bool:
        """SIGKILL it, or its whole group; whether that met it alive."""
        if self.ended():
            return False
        (os.killpg if group else os.kill)(self.pid, signal.SIGKILL)
        self.ended(wait=30)
        return self.code == -signal.SIGKILL


def start(study: Study, run: Path, log: Path, how: How = "here", largest_file: int | None = None) -> Driver:
    """Sweep in a child whose output goes to a log; it can write no file above a size, if one is given."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return Driver(pid)
    code = BROKEN
    try:
        os.setsid()
        number = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(number, stream)
        if largest_file is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
        engine = Local(workers=2, retries=100) if how == "workers" else Local()  # one item may be hit again and again
        summary = sweep(study, run, engine=engine, redo_damaged=True, trust=True)
        code = BROKEN if summary.failed or summary.missing else 0
        os.write(2, "".join(f"missing: {one.id}\n" for one in summary.missing).encode())
        os.write(2, "".join(f"failed: {one.error}\n{one.traceback}\n" for one in summary.failed).encode())
    except WriteError as error:
        code = FULL
        os.write(2, f"disk: {error}\n".encode())
    except BitplanError as error:
        os.write(2, f"refused: {error}\n".encode())
    except BaseException:
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(code)


def holders(run: Path) -> list[int]:
    """The processes that hold leases, as far as leases can be read."""
    found = []
    for path in sorted((run / "leases").glob("[!.]*")):
        try:
            found.append(int(json.loads(path.read_text())["pid"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found
