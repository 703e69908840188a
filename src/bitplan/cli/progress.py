"""How far long work is: a bar on a terminal, elsewhere a plain line now and then; with one time that is left."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from bitplan.cli.loading import end_loading
from bitplan.cli.terminal import tell
from bitplan.core.progress import Progress, clock

_SOONEST, _LATEST = 5.0, 60.0  # seconds between two lines: few of them for short work, and for long
_SHARE = 0.1  # in between, of the time since the beginning
_ENOUGH = 2.0  # seconds of work that tell how long the rest takes …
_PART, _MOST = 0.1, 20  # … once so much of it is done, or so many: what comes first may be slower than the rest


class TimeLeft:
    """How long the rest takes, at the pace since work began; it begins anew where another kind of work does."""

    def __init__(self) -> None:
        self._begun = self._done = self._total = 0.0

    def of(self, done: int, total: int) -> str:
        """In words, or nothing where it cannot be said yet."""
        now = time.monotonic()
        if total != self._total or done < self._done:
            self._begun, self._done, self._total = now, done, total
        told = done - self._done >= min(_MOST, max(1, _PART * (total - self._done)))
        if now - self._begun < _ENOUGH or not told or done >= total:
            return ""
        return f" · about {clock((now - self._begun) / (done - self._done) * (total - done))} left"


@contextmanager
def showing_progress(what: str, *, every_event: bool = False, left: bool = True) -> Iterator[Progress]:
    """A bar beside the answers, or lines with the time since the beginning; `left` adds how long the rest takes.

    Where events are few and each counts, such as a trial that is done, `every_event` gets its line.
    """
    end_loading()
    rest = TimeLeft()

    def words(done: int, total: int, what: str) -> str:
        return f"{what}{rest.of(done, total)}" if left else what

    if sys.stderr.isatty():
        from bitplan.cli.console import bar

        with bar(what) as move:
            yield lambda done, total, what: move(done, total, words(done, total, what))
        return
    begun = last = time.monotonic()

    def line(done: int, total: int, what: str) -> None:
        nonlocal last
        said, now = words(done, total, what), time.monotonic()
        if every_event or now - last >= min(_LATEST, max(_SOONEST, _SHARE * (now - begun))):
            last = now
            tell(f"{clock(now - begun):>8}  {done:,}/{total:,}  {said}")

    yield line
