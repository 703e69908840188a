"""Plain lines on the terminal, the progress of long work, and when Python collects garbage.

Only this file and `show.py`, which draws tables and bars, write to the terminal.
"""

from __future__ import annotations

import gc
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from bitplan.core.escaping import escape_json, escape_text, one_line
from bitplan.core.progress import Progress, clock

_USUAL = gc.get_threshold()
_SELDOM = (1_000_000, 50, 100)  # new objects, and how many looks at the young come to one at the older
_SOONEST, _LATEST = 5.0, 60.0  # seconds between two lines of progress: few lines for short work, and for long
_SHARE = 0.1  # in between, this share of the time since the beginning
_ENOUGH = 2.0  # an estimate of the time left needs so many seconds of work …
_PART, _MOST = 0.1, 20  # … and this share of it, or so many items: the first ones may be slower than the rest


def say(text: str, *, end: str = "\n") -> None:
    """Write an answer to standard output."""
    print(escape_text(text), end=end)


def say_json(text: str) -> None:
    """Write an answer as JSON."""
    print(escape_json(text.rstrip("\n")))


def tell(text: str) -> None:
    """Write one line about the work to standard error."""
    print(escape_text(text).replace("\n", "\\n"), file=sys.stderr, flush=True)


def tell_error(error: object) -> None:
    """Write one line about an error and its remedy."""
    tell(f"error: {one_line(error)}")


def tell_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Write the traceback of a mistake in bitplan itself."""
    print(escape_text("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)


def begin_loading() -> None:
    """Collect garbage rarely while libraries load.

    None of the half million objects that importing torch makes is unreachable. Looking for some took a fifth of
    `bitplan plan resnet50`.
    """
    gc.set_threshold(*_SELDOM)


def end_loading() -> None:
    """Collect garbage as usual again, before networks run for long: copies of them may be unreachable.

    All objects made until now count as old, so the next collection does not look at them.
    """
    if gc.get_threshold()[0] == _SELDOM[0]:  # Python 3.14 has no third
        gc.freeze()
        gc.unfreeze()  # into the oldest generation
        gc.set_threshold(*_USUAL)


class TimeLeft:
    """Estimates how long the rest takes from the pace so far; starts again when another kind of work begins."""

    def __init__(self) -> None:
        self._begun = self._done = self._total = 0.0

    def describe(self, done: int, total: int) -> str:
        """Return the estimate in words, or an empty text while too little is done for one."""
        now = time.monotonic()
        if total != self._total or done < self._done:
            self._begun, self._done, self._total = now, done, total
        is_known = done - self._done >= min(_MOST, max(1, _PART * (total - self._done)))
        if now - self._begun < _ENOUGH or not is_known or done >= total:
            return ""
        return f" · about {clock((now - self._begun) / (done - self._done) * (total - done))} left"


@contextmanager
def showing_progress(what: str, *, every_event: bool = False, left: bool = True) -> Iterator[Progress]:
    """Show a bar on a terminal, else lines with the time since the beginning; `left` adds the time that is left.

    `every_event` writes a line for each event, for work of few events such as trials.
    """
    end_loading()
    rest = TimeLeft()

    def describe(done: int, total: int, what: str) -> str:
        return f"{what}{rest.describe(done, total)}" if left else what

    if sys.stderr.isatty():
        from bitplan.cli.show import bar

        with bar(what) as move:
            yield lambda done, total, what: move(done, total, describe(done, total, what))
        return
    begun = last = time.monotonic()

    def line(done: int, total: int, what: str) -> None:
        nonlocal last
        text, now = describe(done, total, what), time.monotonic()
        if every_event or now - last >= min(_LATEST, max(_SOONEST, _SHARE * (now - begun))):
            last = now
            tell(f"{clock(now - begun):>8}  {done:,}/{total:,}  {text}")

    yield line
