"""Tables and bars on the terminal."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.text import Text

from bitplan.core.escaping import shown

_WIDTH = 160  # where the output is on no terminal
_PADDING = re.compile(r" +$", re.MULTILINE)


class ShownConsole(Console):
    """A console that shows what it is given: neither escape sequences nor markup in it have any effect."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Escape before anything is measured, so that columns are as wide as what is shown."""
        return super().render_str(shown(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Escape whatever reaches the screen by another way."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else shown(text), style, control)


class _Trimmed:
    """A pipe or a file, whose lines end where their text does: padded ones would be folded by whoever shows them."""

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def write(self, text: str) -> int:
        return self._out.write(_PADDING.sub("", text))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._out, name)


def console() -> Console:
    """The terminal, or a plain page where the output goes elsewhere."""
    if sys.stdout.isatty():
        return ShownConsole(highlight=False, markup=False)
    return ShownConsole(width=_page_width(), file=_Trimmed(sys.stdout), highlight=False, markup=False)  # type: ignore[arg-type]


def _page_width() -> int:
    """As wide as the terminal that a pipe is read on, or as COLUMNS says; wide where there is none."""
    told = os.environ.get("COLUMNS", "")
    if told.isdecimal() and int(told) > 0:
        return int(told)
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or _WIDTH
    except (OSError, ValueError):  # it is none, or has none
        return _WIDTH


@contextmanager
def bar(what: str) -> Iterator[Callable[[int, int, str], None]]:
    """A bar beside the answers, gone when it ends; gives what moves it on."""
    words = TextColumn("{task.description}", markup=False)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), words)
    beside = ShownConsole(stderr=True, highlight=False, markup=False)
    with Progress(*columns, console=beside, transient=True) as progress:
        task = progress.add_task(shown(what), total=None)
        yield lambda done, total, what: progress.update(task, completed=done, total=total, description=shown(what))
