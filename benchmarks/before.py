"""bitplan as it was at a commit and as it is, in turn: the same work, each version in a process of its own.

    python -m benchmarks.before [--commit 0d7028a] [--only TASK …] [--rounds 3] [--write PAGE]

The commit is by default the last one before the work on speed began. Its source is taken out of git into a folder that
is deleted at the end, and both run in this environment with one thread. In each round both are asked one after the
other, after a first time that does not count where the work is short; a figure is the median (`before_work.py` has the
work). The section `before` of the page is replaced. It needs the repository's history, so it is no part of `make
bench`.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from benchmarks.__main__ import BEFORE, PAGE, dated, put
from benchmarks.asking import Absent, Asked
from benchmarks.rows import Row, number, table

ROOT = Path(__file__).parents[1]
COMMIT = "0d7028a"
FAILED = "Did not run here:"


class Line(NamedTuple):
    """What is asked, what the page says of it, and what its second figure is, where it has one."""

    task: str
    what: str
    unit: str = "CPU s"
    of: str = ""
    rounds: int = 0  # at most so many, where once takes long


LINES = (
    Line("step", "ResNet-18 w4a4, 64 images of 32 × 32, a training step", of="FP32"),
    Line("calibrate", "calibrating ResNet-18 again with 4 × 64 images, by LSQ and by FAQ"),
    Line("eight", "ResNet-50 at eight budgets, selected"),
    Line("select 1", "1,000 layers × 4, one budget, selected"),
    Line("select 2", "1,000 layers × 4, two budgets, selected", rounds=1),
    Line("select large", "20,000 layers × 2, one budget, selected", rounds=1),
    Line("file", "EAGL of ResNet-50's quantized file", of="reading it"),
    Line("half", "EAGL of 180 million weights in bf16, mse steps", of="reading them"),
    Line("trace", "a trace of ResNet-50"),
    Line("trace recurrent", "a trace of timm/sequencer2d_s"),
    Line("cold", "`bitplan plan resnet50 …` in a new process", of="import torch"),
    Line("onnx", "ResNet-44 exported for ONNX Runtime"),
    Line("hawq", "HAWQ's Hessian traces, digits_resnet, 64 samples, 8 probes"),
    Line("drift", "drift, digits_resnet, 256 samples"),
)


def measure(commit: str, lines: Sequence[Line], rounds: int) -> str:
    """Both versions in turn, as a table; and below it what did not run, and why."""
    rows: list[Row] = []
    absent: list[str] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        versions = [started("before", taken_out(commit, folder), stack), started("now", ROOT / "src", stack)]
        for line in lines:
            try:
                rows.append(compared(line, versions, line.rounds or rounds))
            except Absent as why:
                absent.append(f"{line.what}: {why}")
    return "\n\n".join([table(rows), *(f"{FAILED} {one}" for one in absent)])


def compared(line: Line, versions: Sequence[Asked], rounds: int) -> Row:
    """The medians of both, the median of their ratios, and what each takes of what it is compared with."""
    if not line.rounds:
        for version in versions:
            version.ask(line.task)  # the first time also loads and compiles
    asked = [[version.ask(line.task) for version in versions] for _ in range(rounds)]
    before, now = ([one["figure"] for one in answers] for answers in zip(*asked, strict=True))
    said = ""
    if line.of:
        was, became = (
            statistics.median(one["figure"] / one["of"] for one in answers) for answers in zip(*asked, strict=True)
        )
        said = f"of {line.of}: {number(was)} before, {number(became)} now"
    ratio = statistics.median(mine / theirs for mine, theirs in zip(now, before, strict=True))
    short = line.unit == "CPU s" and statistics.median(now) < 1
    scale, unit = (1e3, "CPU ms") if short else (1, line.unit)
    ours, peer = (scale * statistics.median(figures) for figures in (now, before))
    return Row(line.what, ours, peer, "before", unit, times=ratio, note=said)


def taken_out(commit: str, folder: Path) -> Path:
    """The source of a commit, with what an installed package would say of its entry points."""
    packed = subprocess.run(["git", "archive", commit, "src", "pyproject.toml"], cwd=ROOT, capture_output=True)
    if packed.returncode:
        sys.exit(f"git has no source of {commit} here: {packed.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    about = folder / "src" / "bitplan-0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: bitplan\nVersion: 0\n")
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {place}" for name, place in entries.items())]
    (about / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder / "src"


def started(name: str, source: Path, stack: ExitStack) -> Asked:
    """A process with this source, before what is installed here; Absent if it runs another."""
    command = [sys.executable, "-P", str(Path(__file__).with_name("before_work.py"))]
    version = Asked.start(name, command, {"PYTHONPATH": f"{source}{os.pathsep}{ROOT}"})
    stack.callback(version.stop)
    ran = Path(version.ask("source")["source"])
    if source.resolve() not in ran.resolve().parents:
        raise Absent(f"{name} would be {ran}, not what lies in {source}")
    return version


def main(arguments: Sequence[str]) -> None:
    """Measure, print, and replace the section of the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", default=COMMIT)
    parser.add_argument("--only", nargs="+", metavar="TASK", choices=[line.task for line in LINES])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", type=Path, default=PAGE, metavar="PAGE")
    asked = parser.parse_args(arguments)
    busy, begun = os.getloadavg()[0], time.perf_counter()
    lines = [line for line in LINES if asked.only is None or line.task in asked.only]
    body = measure(asked.commit, lines, asked.rounds)
    title = f"The same work by the source of commit {asked.commit} (before) and by today's (ours), in turn."
    text = dated(BEFORE, title, body, busy=busy, begun=begun)
    print(text)
    put(asked.write, {BEFORE: text})


if __name__ == "__main__":
    main(sys.argv[1:])
