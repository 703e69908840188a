"""Starting up: `import bitplan` and `bitplan --help` against bare Python, and `bitplan plan` against `import torch`."""

from __future__ import annotations

import subprocess
import sys

from benchmarks.rows import Row
from benchmarks.timing import cpu_seconds, in_turn

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import bitplan": ["-c", "import bitplan"],
    "bitplan --help": ["-m", "bitplan", "--help"],
    "import torch": ["-c", "import torch"],
    "bitplan plan resnet50 …": ["-m", "bitplan", "plan", "resnet50", "--gain", "uniform", "--budget", "70%"],
}


def rows() -> list[Row]:
    """Return the CPU time of each command in a new process."""
    runs = {
        name: lambda words=words: subprocess.run([sys.executable, *words], capture_output=True, check=True)
        for name, words in COMMANDS.items()
    }
    seconds = in_turn(runs, rounds=3, clock=cpu_seconds)
    peers = {"import bitplan": "python -c pass", "bitplan --help": "python -c pass"}
    made = [Row(f"`{name}`", seconds[name], seconds[peer], peer) for name, peer in peers.items()]
    plan = "bitplan plan resnet50 …"
    return [*made, Row(f"`{plan}`, all of it", seconds[plan], seconds["import torch"], "import torch", target=2.0)]
