"""What was done to sweeps, and what came of it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


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
