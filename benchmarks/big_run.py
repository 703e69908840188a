"""A run of 10,000 trials (10 methods × 10 budgets × 100 seeds): what a sweep adds per trial, and reading it.

    python -m benchmarks.big_run [--seeds 100] [--keep FOLDER]

The sweep is real but for its trainings, which give a drawn score and a log of a hundred lines at once. The commands run
as a user starts them, each in a process of its own. Files go to memory where /dev/shm is one, which leaves out what a
disk takes to be flushed. Sweeps of a hundredth are made in between, so that what else the machine does meanwhile hits
both alike; they are left out of the time of the large one.
"""

from __future__ import annotations

import argparse
import random
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import bitplan
from benchmarks.rows import Row, table
from bitplan.core.precision import parse_choices
from bitplan.core.rules import Rules
from bitplan.core.studies import Method, Start, Study, Trained, Training
from bitplan.core.trials import Recipe
from bitplan.study.context import Setting
from bitplan.study.sweep import sweep

METHODS, BUDGETS, SEEDS = 10, 10, 100
LINES = 100  # of a log, as many as any training of a hundred steps or more keeps
FEW_TURNS = 9  # a sweep of 100 trials takes half a second, which says little once
MEMORY = Path("/dev/shm")
COMMANDS = {"run status": 2.0, "compare": 5.0, "report": 15.0}
"""The most seconds that each may take."""


@dataclass(frozen=True)
class Instant:
    """A training that takes no time: a score of 10,000 test images, better with more bits, and a log."""

    setting: Setting

    def __call__(self, job: Training) -> Trained:
        """Drawn from the job itself, so that it repeats."""
        draw = random.Random(job.id)
        bits = [int(precision.weight_bits or 32) for precision in job.precisions.values()]
        score = round(88 + sum(bits) / len(bits) + draw.gauss(0, 0.15), 2)
        log = tuple(
            {"step": 79 * line, "epoch": line / 5, "loss": 2.3 * draw.random(), "score": 97.65625 * draw.random(),
             "lr": 0.01 * draw.random()}
            for line in range(1, LINES + 1)
        )  # fmt: skip
        return Trained(
            training=job.id, score=score, metric="top-1", higher_is_better=True, log=log, seconds=12.5, device="cpu",
            versions={"torch": "2.13.0", "bitplan": bitplan.__version__},
        )  # fmt: skip


def study_of(folder: Path, seeds: int) -> Study:
    """Methods that are tables of random numbers, on the digits network."""
    model, example = bitplan.load_model("digits_resnet")
    groups = bitplan.trace(model, example, rules=Rules(narrow=0)).selectable
    methods = []
    for number in range(METHODS):
        draw = random.Random(number)
        path = folder / f"gains{number}.csv"
        lines = [f"{group.name},0,{draw.random():.6f}" for group in groups]
        path.write_text("\n".join(["layer,w2a2,w4a4", *lines]) + "\n")
        methods.append(Method(name="table", label=f"method {number}", options={"path": str(path)}))
    return Study(
        name="big", task="digits", model="digits_resnet", choices=parse_choices("w2a2,w4a4"), rules=Rules(narrow=0),
        budgets=tuple(f"{55 + 4 * place}%" for place in range(BUDGETS)), methods=tuple(methods),
        seeds=tuple(range(seeds)), start=Start(float_recipe=Recipe(steps=1), recipe=Recipe(steps=1)),
        recipe=Recipe(epochs=20, lr=0.02), references=False,
    )  # fmt: skip


def swept(folder: Path, seeds: int, between: Callable[[], None] | None = None) -> float:
    """Make the run in `folder`; CPU milliseconds per trial from the first network that is trained to the last.

    `between` is called several times meanwhile, and its time is left out.
    """
    folder.mkdir(parents=True)
    study = study_of(folder, seeds)
    trials = METHODS * BUDGETS * seeds
    done: list[float] = []
    elsewhere = 0.0

    def count(number: int, _: int, __: str) -> None:
        nonlocal elsewhere
        if number <= 2:  # the two that all start from are real
            return
        done.append(time.process_time() - elsewhere)
        if between is not None and len(done) % (trials // FEW_TURNS) == trials // FEW_TURNS // 2:
            start = time.process_time()
            between()
            elsewhere += time.process_time() - start

    with mock.patch("bitplan.study.sweep.Train", Instant):
        sweep(study, folder / "run", progress=count)
    assert len(done) == trials, f"{len(done)} trials are done"
    return 1000 * (done[-1] - done[0]) / (len(done) - 1)


def seconds_of(command: str, run: Path) -> float:
    """CPU seconds of a command, from its start on: how long a user waits where nobody else needs the machine."""
    words = [*command.split(), str(run)] + (["-o", str(run / "page.html")] if command == "report" else [])
    before = _children()
    subprocess.run([sys.executable, "-m", "bitplan", *words], check=True, capture_output=True)
    return _children() - before


def _children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def rows(seeds: int = SEEDS, keep: Path | None = None) -> list[Row]:
    """The sweep of a hundredth against all of it, then each command."""
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as scratch:
        home = keep or Path(scratch)
        few, many = max(1, seeds // 100), seeds
        whole = home / "many"
        shutil.rmtree(whole, ignore_errors=True)
        little: list[float] = []
        much = swept(whole, many, lambda: little.append(swept(Path(scratch) / f"few{len(little)}", few)))
        trials = f"{METHODS * BUDGETS * many:,} trials"
        made = [
            Row(
                f"sweep of {trials}, its own time per trial", much, statistics.median(little),
                f"of {METHODS * BUDGETS * few:,}", "CPU ms", 1.1,
            )
        ]  # fmt: skip
        for command, most in COMMANDS.items():
            made.append(
                Row(f"`bitplan {command}` of {trials}", seconds_of(command, whole / "run"), unit="CPU s", target=most)
            )
        return made


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--keep", type=Path, help="leave the run in this folder")
    arguments = parser.parse_args()
    print(table(rows(arguments.seeds, arguments.keep)))


if __name__ == "__main__":
    main()
