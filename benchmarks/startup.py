"""Starting up: `import bitplan` and `bitplan --help` against bare Python, and `bitplan plan` against `import torch`.

python -m benchmarks.startup
"""

from __future__ import annotations

import subprocess
import sys

from benchmarks.timing import in_turn

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import bitplan": ["-c", "import bitplan"],
    "bitplan --help": ["-m", "bitplan", "--help"],
    "import torch": ["-c", "import torch"],
    "import torchvision": ["-c", "from bitplan.adapters.torchvision import torchvision; torchvision()"],
    "bitplan plan resnet50": ["-m", "bitplan", "plan", "resnet50", "--gain", "uniform", "--budget", "70%"],
}


def main() -> None:
    """Print seconds and ratios to bare Python and to torch."""
    runs = {
        name: lambda words=words: subprocess.run([sys.executable, *words], capture_output=True, check=True)
        for name, words in COMMANDS.items()
    }
    seconds = in_turn(runs, rounds=3)
    print(f"{'command':24} {'seconds':>8} {'× python':>9} {'× torch':>8}")
    for name, taken in seconds.items():
        print(f"{name:24} {taken:8.2f} {taken / seconds['python -c pass']:9.1f} {taken / seconds['import torch']:8.2f}")


if __name__ == "__main__":
    main()
