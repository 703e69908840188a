"""Plain lines on the terminal; with `console.py`, which has tables and bars, the only files that write to it."""

from __future__ import annotations

import sys
import traceback
from types import TracebackType

from bitplan.core.escaping import one_line, shown, shown_json


def say(text: str, *, end: str = "\n") -> None:
    """Write an answer."""
    print(shown(text), end=end)


def say_json(text: str) -> None:
    """Write an answer as JSON."""
    print(shown_json(text.rstrip("\n")))


def tell(text: str) -> None:
    """Write what happens, beside the answers: one line."""
    print(shown(text).replace("\n", "\\n"), file=sys.stderr, flush=True)


def tell_error(error: object) -> None:
    """Write what went wrong, and what to do about it."""
    tell(f"error: {one_line(error)}")


def tell_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Write where a mistake of ours happened."""
    print(shown("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)
