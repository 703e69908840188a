"""Tables and bars on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.segment import Segment
from rich.text import Text

from bitplan.core.shown import shown

_WIDTH = 160  # where the output is no terminal


class ShownConsole(Console):
    """A console that shows what it is given: neither escape sequences nor markup in it have any effect."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Escape before anything is measured, so that columns are as wide as what is shown."""
        return super().render_str(shown(text), **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Escape whatever reaches the screen by another way."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else shown(text), style, control)


def console() -> Console:
    """The terminal, or a plain wide page where the output goes into a file."""
    return ShownConsole(width=None if sys.stdout.isatty() else _WIDTH, highlight=False, markup=False)


@contextmanager
def bar(what: str) -> Iterator[Callable[[int, int, str], None]]:
    """A bar beside the answers, gone when it ends; gives what moves it on."""
    words = TextColumn("{task.description}", markup=False)
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), words)
    beside = ShownConsole(stderr=True, highlight=False, markup=False)
    with Progress(*columns, console=beside, transient=True) as progress:
        task = progress.add_task(shown(what), total=None)
        yield lambda done, total, what: progress.update(task, completed=done, total=total, description=shown(what))
