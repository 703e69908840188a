"""Sweeps in processes of their own, forked from one that has imported everything, and blows that hit them."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from bitplan.core.errors import BitplanError, WriteError
from bitplan.core.studies import Study
from bitplan.store.engines import Engine, Local
from bitplan.store.ray_cluster import Cluster
from bitplan.study.sweep import sweep

How = Literal["here", "workers", "ray"]
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


def start(study: Study, run: Path, log: Path, how: How = "here") -> Driver:
    """Sweep in a child; what it says goes to a log."""
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
        with _engine(how) as engine:
            summary = sweep(study, run, engine=engine, redo_damaged=True, trust=True)
        code = BROKEN if summary.failed or summary.missing else 0
        os.write(2, "".join(f"missing: {one.id}\n" for one in summary.missing).encode())
        os.write(2, "".join(f"failed: {one.error}\n{one.traceback}\n" for one in summary.failed).encode())
    except WriteError as error:
        os.write(2, f"disk: {error}\n".encode())
        code = FULL
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


@contextmanager
def _engine(how: How) -> Iterator[Engine]:
    """The engine to sweep with; Ray with a head that does no work and two nodes that do."""
    if how != "ray":
        yield Local(workers=2, retries=100) if how == "workers" else Local()  # one item may be hit again and again
        return
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path.cwd()), os.environ.get("PYTHONPATH", "")])
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray.cluster_utils import Cluster as Nodes

    nodes = Nodes(initialize_head=True, head_node_args={"num_cpus": 0})
    try:
        for _ in range(2):
            nodes.add_node(num_cpus=1)
        yield Cluster(address=nodes.address)
    finally:
        ray.shutdown()
        nodes.shutdown()
