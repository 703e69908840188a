"""Counting the trials of a sweep that are done, and telling so."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from bitplan.core.progress import Progress
from bitplan.core.studies import Study
from bitplan.core.trials import Trial

_PAUSE = 5.0  # seconds between two words on parts of a long estimate


@dataclass(frozen=True)
class Tally:
    """Which trials are done, and telling so. The folder is looked at once; from then on every event is counted."""

    study: Study
    trials: Sequence[str]
    progress: Progress
    done: set[str] = field(default_factory=set)

    def begin(self, there: set[str]) -> None:
        """Start from what is there already."""
        self.done.update(there & set(self.trials))

    def tell(self, text: str) -> None:
        """Say what happens."""
        self.progress(len(self.done), len(self.trials), text)

    def succeed(self, trial: Trial) -> None:
        """Count a trial that is done."""
        self.done.add(trial.id)
        self.tell(f"{self.study.words(trial)} done")

    def now_and_then(self) -> Progress:
        """Tells of parts of a long estimate, every few seconds."""
        last = [time.monotonic()]

        def tell(done: int, total: int, what: str) -> None:
            if time.monotonic() - last[0] > _PAUSE:
                last[0] = time.monotonic()
                self.tell(f"{what} ({done} of {total})")

        return tell
