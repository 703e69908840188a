"""Libraries whose pins clash with ours, each in an environment of its own: choosing precisions, and training steps.

    python -m benchmarks.peers [NAME …] [--venvs FOLDER]

Makes what environments are missing (some 1 GB each), with the torch of `constraints.txt`, whose CPU build pip takes;
one that would get another torch, or CUDA's libraries, is left out and the page says so. Then all libraries and bitplan
wait in processes of their own and work in turn (`benchmarks/peer_work.py`). The section `peers` of the page is
replaced. It takes long, so it is no part of `make bench`.

Choosing: ResNet-50 with random weights, 8 images of 64 × 64, 4 or 8 bits for each layer, each library by its own
defaults, or by what is cheaper where the default takes minutes. Training: ResNet-18, 64 images of 32 × 32; time and
memory are relative to FP32 in the same process, so that what a library sets is on both sides. Memory is measured in
further processes, which give freed memory back at once: the growth of resident memory until the forward pass ends, and
at most during a step (`benchmarks/training.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Timer
from typing import Any

from benchmarks.__main__ import PAGE, PEERS, dated, put
from benchmarks.rows import Row, table
from benchmarks.training import GIVE_BACK

ROOT = Path(__file__).parents[1]
PINS = {  # what pip installs besides torch and torchvision; some leave out what they import
    "modelopt": ("nvidia-modelopt==0.47.0", "requests==2.34.2", "huggingface_hub==2.4.0"),
    "aimet": ("aimet-torch==2.42.0",),
    "mct": ("model-compression-toolkit==2.6.1",),
    "nncf": ("nncf==3.4.0",),
}
OURS = "bitplan"
ROUNDS = 5
TIME_LIMIT = 900.0  # seconds for an answer
FAILED = "Did not run here:"
NO_CHOICE = {"nncf": "chooses no precisions for networks of PyTorch's"}
WHAT = {
    "modelopt": "both w4a4; its ranges are fixed",
    "aimet": "both w4a4, learned",
    "nncf": "ours w4a4, its w8a8, learned",
    "mct": "ours w4a4; its weights per channel, batch norms folded",
}
HOW = {
    "modelopt": "it: gradients, a budget of weight bits", "aimet": "it: greedy, no budget",
    "mct": "it: mean square errors, weights only",
}  # fmt: skip


class Absent(Exception):
    """What cannot be measured here, and why."""


@dataclass
class Asked:
    """A process with a name; it answers one question at a time."""

    name: str
    process: subprocess.Popen[str]

    def ask(self, task: str) -> Any:
        """What it answers; Absent where it failed, now or before, or took too long."""
        if self.process.poll() is not None:
            raise Absent("it has ended")
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{task}\n")
        self.process.stdin.flush()
        watch = Timer(TIME_LIMIT, self.process.kill)
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


def waiting(name: str, python: Path, environment: Mapping[str, str] | None = None) -> Asked:
    """Start a library in its environment; its own tools come first, since NNCF compiles with ninja."""
    path = f"{python.parent}{os.pathsep}{os.environ.get('PATH', '')}"
    command = [str(python), "-P", str(Path(__file__).with_name("peer_work.py")), name]
    variables = {"PATH": path, "PYTHONPATH": str(ROOT), "NNCF_EXTENSION_LOAD_TIMEOUT": "1800", "OMP_NUM_THREADS": "1"}
    pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
    everything = os.environ | variables | (environment or {})
    return Asked(name, subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=nowhere, text=True, env=everything))


def environment(name: str, folder: Path) -> Path:
    """Return the Python of a library's environment; make it if there is none."""
    home = folder / name
    python, ready = home / "bin" / "python", home / ".ready"
    if ready.exists() and ready.read_text() == " ".join(PINS[name]):
        return python
    venv.create(home, with_pip=True, clear=True)
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    torch = [line for line in lines if line.startswith(("torch==", "torchvision=="))]
    install = [str(python), "-m", "pip", "install", "-q", *torch, *PINS[name]]
    for more in (["--dry-run", "--report", str(home / "report.json")], []):
        done = subprocess.run([*install, *more], capture_output=True, text=True)
        if done.returncode:
            raise Absent(f"pip does not install it: {done.stderr.strip().splitlines()[-1][:160]}")
        if more:
            _check(json.loads((home / "report.json").read_text()))
    ready.write_text(" ".join(PINS[name]))
    return python


def _check(report: Any) -> None:
    """Raise where pip would bring CUDA's libraries, which are gigabytes."""
    names = [one["metadata"]["name"].lower() for one in report["install"]]
    heavy = [name for name in names if re.match(r"nvidia-.*-cu\d+$|triton$", name)]
    if heavy:
        raise Absent(f"pip would bring {heavy[0]} and {len(heavy) - 1} more: no CPU build of its torch is at hand")


def measure(names: Sequence[str], folder: Path) -> str:
    """Every library next to ours, as a table; and below it what did not run, and why."""
    found, pythons = Found(), {OURS: Path(sys.executable)}
    for name in names:
        with found.or_absent(name):
            pythons[name] = environment(name, folder)
    peers = [waiting(*one) for one in pythons.items()]
    try:
        choose(peers, found)
        train(peers, found)
    finally:
        for peer in peers:
            peer.stop()
    measure_memory(pythons, found)
    return "\n\n".join([table(found.rows), *(f"{FAILED} {line}" for line in found.absent)])


@dataclass
class Found:
    """What was measured, and what was not."""

    rows: list[Row] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)

    @contextmanager
    def or_absent(self, what: str) -> Iterator[None]:
        """A library's failure is a line below the table."""
        try:
            yield
        except Absent as why:
            self.absent.append(f"{what}: {why}")


def choose(peers: Sequence[Asked], found: Found) -> None:
    """CPU seconds of each; ours before and after the others, and the faster counts."""
    what, seconds = "choosing precisions for ResNet-50, 8 images", {}
    for peer in (*peers, peers[0]):
        with found.or_absent(f"{peer.name}, {what}"):
            if peer.name in NO_CHOICE:
                raise Absent(NO_CHOICE[peer.name])
            taken = peer.ask("choose")["seconds"]
            seconds[peer.name] = min(taken, seconds.get(peer.name, taken))
    for name, theirs in seconds.items():
        if name != OURS:
            found.rows.append(Row(what, seconds[OURS], theirs, name, "CPU s", 1.0, note=HOW[name]))


def train(peers: Sequence[Asked], found: Found) -> None:
    """Time of a step relative to FP32 in the same process; ours against theirs."""
    steps: dict[str, list[Any]] = {peer.name: [] for peer in peers}
    for _ in range(ROUNDS):
        for peer in peers:
            if len(steps[peer.name]) == max(map(len, steps.values())) or not steps[peer.name]:
                with found.or_absent(f"{peer.name}, a training step"):
                    steps[peer.name].append(peer.ask("step"))
    _compare("a training step of ResNet-18", {name: _ratio(all_) for name, all_ in steps.items() if all_}, found)


def measure_memory(pythons: Mapping[str, Path], found: Found) -> None:
    """Memory of a step relative to FP32 in the same process, one library after the other; ours against theirs."""
    figures: dict[str, Any] = {}
    for name, python in pythons.items():
        with found.or_absent(f"{name}, memory"):
            peer = waiting(name, python, GIVE_BACK)
            try:
                figures[name] = peer.ask("memory")
            finally:
                peer.stop()
    for field_, what in (("held", "its memory after the forward pass"), ("peak", "the most memory that it holds")):
        ratios = {name: one["quantized"][field_] / one["fp32"][field_] for name, one in figures.items()}
        _compare(what, ratios, found)


def _compare(what: str, ratios: Mapping[str, float], found: Found) -> None:
    """Add a row for each library; there are none where ours did not run."""
    for name, theirs in ratios.items():
        if name != OURS and OURS in ratios:
            found.rows.append(Row(what, ratios[OURS], theirs, name, "× FP32", 1.0, note=WHAT[name]))


def _ratio(steps: Sequence[Any]) -> float:
    """The median over rounds of quantized ÷ FP32."""
    return statistics.median(step["quantized"]["seconds"] / step["fp32"]["seconds"] for step in steps)


def main(arguments: Sequence[str]) -> None:
    """Measure, print, and replace the section of the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[], metavar="NAME", help=", ".join(PINS))
    parser.add_argument("--venvs", type=Path, default=Path.home() / ".cache" / "bitplan-peers", metavar="FOLDER")
    options = parser.parse_args(arguments)
    busy, begun = os.getloadavg()[0], time.perf_counter()
    body = measure(options.names or list(PINS), options.venvs)
    text = dated(PEERS, (__doc__ or "").splitlines()[0], body, busy=busy, begun=begun)
    print(text)
    put(PAGE, {PEERS: text})


if __name__ == "__main__":
    main(sys.argv[1:])
