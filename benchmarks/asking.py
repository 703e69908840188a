"""A process that waits for what it is asked: a line each, answered by a line of JSON.

So what cannot be loaded into one process (libraries whose pins clash, two versions of bitplan) still takes turns.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import Timer
from typing import Any

LIMIT = 900.0  # seconds for an answer


class Absent(Exception):
    """What cannot be measured here, and why."""


@dataclass
class Asked:
    """A process with a name; it answers one question at a time."""

    name: str
    process: subprocess.Popen[str]
    limit: float = LIMIT

    @classmethod
    def start(
        cls, name: str, command: Sequence[str], environment: Mapping[str, str], *, limit: float = LIMIT
    ) -> Asked:  # fmt: skip
        """One thread each; what it prints to its errors is lost."""
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        whole = os.environ | {"OMP_NUM_THREADS": "1"} | environment
        process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere, text=True, env=whole)
        return cls(name, process, limit)

    def ask(self, task: str) -> Any:
        """What it answers; Absent where it failed, now or before, or took too long."""
        if self.process.poll() is not None:
            raise Absent("it has ended")
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{task}\n")
        self.process.stdin.flush()
        watch = Timer(self.limit, self.process.kill)
        watch.start()
        line = self.process.stdout.readline()
        watch.cancel()
        found = json.loads(line) if line else {"failed": f"it ended with {self.process.wait()}, or was ended"}
        if "failed" in found:
            raise Absent(found["failed"])
        return found

    def stop(self) -> None:
        """Let it end: it reads to the end of what it is asked."""
        self.process.communicate()
