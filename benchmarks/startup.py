"""Starting up: `import bitplan` and `bitplan --help` against bare Python, and `bitplan plan` against `import torch`.

python -m benchmarks.startup
"""

from __future__ import annotations

import subprocess
import sys

from benchmarks.rows import Row, table
from benchmarks.timing import cpu_seconds, in_turn

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import bitplan": ["-c", "import bitplan"],
    "bitplan --help": ["-m", "bitplan", "--help"],
    "import torch": ["-c", "import torch"],
    "import its compiler": ["-c", "import torch._dynamo"],
    "import torchvision": ["-c", "from bitplan.adapters.torchvision import torchvision; torchvision()"],
    "bitplan plan resnet50": ["-m", "bitplan", "plan", "resnet50", "--gain", "uniform", "--budget", "70%"],
}


def rows() -> list[Row]:
    """What needs no torch against bare Python, what does against importing it; CPU time of a new process each.

    torch's tensors without data, by which networks are traced, import its compiler.
    """
    runs = {
        name: lambda words=words: subprocess.run([sys.executable, *words], capture_output=True, check=True)
        for name, words in COMMANDS.items()
    }
    seconds = in_turn(runs, rounds=3, clock=cpu_seconds)
    bare, torch, vision = (seconds[name] for name in ("python -c pass", "import torch", "import torchvision"))
    planned = seconds["bitplan plan resnet50"]
    return [
        Row("`import bitplan`", seconds["import bitplan"], bare, "python -c pass"),
        Row("`bitplan --help`", seconds["bitplan --help"], bare, "python -c pass"),
        Row("`bitplan plan resnet50 …`, all of it", planned, torch, "import torch", target=2.0),
        Row("`bitplan plan resnet50 …`, all of it", planned, seconds["import its compiler"], "import torch._dynamo"),
        Row("`bitplan plan resnet50 …`, all of it", planned, vision, "import torchvision and torch"),
    ]


def main() -> None:
    """Print the table."""
    print(table(rows()))


if __name__ == "__main__":
    main()
