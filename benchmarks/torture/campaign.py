"""A campaign: one run, one blow after the other, a look at every file after each, and the right table in the end."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.torture.blows import Blows
from benchmarks.torture.drivers import BROKEN, FULL, Driver, How, start
from benchmarks.torture.network import diary_of
from benchmarks.torture.reader import look, table
from bitplan.core.studies import Study
from bitplan.reports.tables import frontier
from bitplan.store.run_folder import RunFolder
from bitplan.study.status import check

_ROUNDS = 40  # at most, for one run
_END = 1200.0  # seconds in which a sweep that nobody disturbs must have ended, on cores that others want too


@dataclass
class Tally:
    """Blows by kind, and what must be zero, each with a line about the first few."""

    blows: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    lines: list[str] = field(default_factory=list)
    looks: int = 0
    files: int = 0
    runs: int = 0
    begun: int = 0
    needed: int = 0

    @property
    def kills(self) -> int:
        """How many processes, or groups of them, were killed."""
        return sum(count for blow, count in self.blows.items() if blow.startswith("kill"))

    def blame(self, kind: str, line: str) -> None:
        """Count something that must not be."""
        self.faults[kind] += 1
        self.lines.append(f"{kind}: {line}")

    def table(self) -> str:
        """As Markdown."""
        rows = [f"| {blow} | {count:,} |" for blow, count in sorted(self.blows.items())]
        rows += [f"| **kills in all** | **{self.kills:,}** |", f"| runs swept to their end | {self.runs:,} |"]
        rows.append(f"| looks of the independent reader (files read) | {self.looks:,} ({self.files:,}) |")
        rows.append(f"| trainings begun, for so many that were needed | {self.begun:,} for {self.needed:,} |")
        kinds = ("files lost", "files wrong", "temporary files left", "trainings done twice", "wrong tables")
        kinds += ("sweeps that broke",)
        rows += [f"| **{kind}** | **{self.faults[kind]}** |" for kind in kinds]
        return "\n".join(["| | |", "|---|---|", *rows])


@dataclass
class Campaign:
    """One run; `harmed` are the names of what we damaged, `excused` the ids of what may be done again for it."""

    study: Study
    run: Path
    sound: Path
    chance: random.Random
    tally: Tally
    finished: dict[str, str] = field(default_factory=dict)
    harmed: set[str] = field(default_factory=set)
    excused: set[str] = field(default_factory=set)
    may_fill: bool = False

    def fight(self, blows: Blows, kinds: dict[str, int], kills: int) -> None:
        """Strike until the run is finished, or it was enough; then it must come to its end."""
        self.run.parent.mkdir(parents=True, exist_ok=True)
        diary_of(self.run).touch()
        for _ in range(_ROUNDS):
            if self.tally.kills >= kills or (self.is_finished() and self.chance.random() < 0.5):
                break
            kind = self.chance.choices(list(kinds), list(kinds.values()))[0]
            seen = len(self._begun())
            getattr(blows, kind)(self)
            self.look_around(seen)
        self.end()

    def start(self, how: How = "here", largest_file: int | None = None) -> Driver:
        """Start a sweep of this run."""
        return start(self.study, self.run, self._log, how, largest_file)

    def harm(self, name: str) -> None:
        """Remember a damaged file, and the job that has to be done again for it."""
        self.harmed.add(name)
        part, _, rest = name.partition("/")
        job = rest.split("/")[0].removesuffix(".json")
        if job:
            self.excused.add(job)
        if part == "networks":  # its record and its tensors vouch for each other
            self.harmed.add(f"networks/{job}")
        if part in ("starts", "trials"):  # one without the other is made again
            self.harmed |= {f"starts/{job}", f"trials/{job}"}

    def is_harmed(self, name: str) -> bool:
        """Whether a file, or the folder it is in, is among what we damaged."""
        return any(name.startswith(one) for one in self.harmed)

    def settle(self, *drivers: Driver) -> None:
        """See that all drivers and workers are gone, and that none broke."""
        for driver in drivers:
            if not driver.ended(wait=_END):
                self.tally.blame("sweeps that broke", f"{self.run.name} did not end")
                driver.kill()
            with suppress(ProcessLookupError):
                os.killpg(driver.pid, signal.SIGKILL)  # workers that their driver left behind
            if driver.code not in (0, -signal.SIGKILL, FULL if self.may_fill else 0):
                tail = self._log.read_text(errors="replace")[-600:] if driver.code in (BROKEN, FULL) else ""
                self.tally.blame("sweeps that broke", f"{self.run.name} ended with {driver.code}: {tail}")

    def look_around(self, seen: int) -> None:
        """Read every file; what was finished is still there, and nothing that was is begun again."""
        found = look(self.run, self.sound)
        self.tally.looks += 1
        self.tally.files += len(found.finished)
        for name, told in self.finished.items():
            if self.is_harmed(name) or name in found.wrong:
                continue
            if name not in found.finished:
                self.tally.blame("files lost", f"{self.run.name}/{name}")
            elif found.finished[name] != told:
                self.tally.blame("files wrong", f"{self.run.name}/{name} says something else than before")
        for name, why in found.wrong.items():
            if not self.is_harmed(name):
                self.tally.blame("files wrong", f"{self.run.name}/{name}: {why}")
        before = {name.split("/")[1] for name in self.finished if name.split("/")[0] in ("trials", "trained")}
        for job in self._begun()[seen:]:
            if f"{job}.json" in before and job not in self.excused:
                self.tally.blame("trainings done twice", f"{self.run.name}: {job}")
        self.finished = found.finished

    def is_finished(self) -> bool:
        """Whether every trial has a result."""
        return {path.name for path in (self.run / "trials").glob("[!.]*.json")} >= {
            path.name for path in (self.sound / "trials").glob("*.json")
        }

    def end(self) -> None:
        """Nobody disturbs any more: the sweep ends with the right table, and a check names what is damaged still."""
        seen = len(self._begun())
        self.settle(self.start())
        self.look_around(seen)
        if len(set(self._begun()[seen:])) != len(self._begun()[seen:]):
            self.tally.blame("trainings done twice", f"{self.run.name}, in its last sweep")
        for path in self.run.rglob(".*"):
            self.tally.blame("temporary files left", str(path.relative_to(self.run)))
        shown = [frontier(RunFolder(run)).texts() for run in (self.run, self.sound)]
        if table(self.run) != table(self.sound) or shown[0] != shown[1]:
            self.tally.blame("wrong tables", self.run.name)
        named = {str(one.path.relative_to(self.run)) for one in check(self.run).wrong}
        for name in look(self.run, self.sound).wrong:
            if not any(name.startswith(one) for one in named):
                self.tally.blame("files wrong", f"{self.run.name}/{name}, and `store check` does not say so")
        self.tally.runs += 1
        self.tally.begun += len(self._begun())
        self.tally.needed += len(list((self.sound / "trained").glob("*.json"))) + 2

    def _begun(self) -> list[str]:
        return diary_of(self.run).read_text().split()

    @property
    def _log(self) -> Path:
        return diary_of(self.run).with_suffix(".log")
