"""Texts as they may be shown: what stands in names and files is seen, and never obeyed.

Names of layers, labels, paths and messages may come from anybody's file, and a terminal obeys what stands in them:
escape sequences move the cursor, change colours, hide text or set the title; marks of direction turn it around. So
all that is not printable is written as in Python's strings (`\\x1b`).
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable

_SUSPECT = re.compile(r"[^\n\t\x20-\x7e]")


def escape_text(text: str) -> str:
    """A text without anything but what can be seen, line by line."""
    return _escaped(text, lambda character: character.encode("unicode_escape").decode("ascii"))


def escape_json(text: str) -> str:
    """The same for JSON, by JSON's own escapes, so that it still says the same."""
    return _escaped(text, lambda character: json.dumps(character)[1:-1])


def one_line(text: object) -> str:
    """A text in one line."""
    return escape_text(" ".join(str(text).split()))


def _escaped(text: str, escape: Callable[[str], str]) -> str:
    return _SUSPECT.sub(lambda found: found[0] if found[0].isprintable() else escape(found[0]), text)


class ShownLines(logging.Formatter):
    """Lines of the log."""

    def format(self, record: logging.LogRecord) -> str:
        """A record as lines that may be shown."""
        return escape_text(super().format(record))


def log_to_terminal() -> None:
    """Have warnings written, by this process, unless it has been set up otherwise."""
    handler = logging.StreamHandler()
    handler.setFormatter(ShownLines("%(levelname)s: %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
