"""What people write in one word: NAME, or NAME:KEY=VALUE,KEY=VALUE with options of what is named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bitplan.core.errors import InputError


def read_named(written: str, flag: str) -> tuple[str, dict[str, Any]]:
    """A name and its options, such as "local:workers=2"; `flag` is what an error calls them."""
    name, _, options = written.partition(":")
    return name, read_options(options.split(",") if options else (), flag)


def read_options(written: Sequence[str], flag: str = "--option") -> dict[str, Any]:
    """Read KEY=VALUE texts; numbers and true/false become what they say."""
    options: dict[str, Any] = {}
    for text in written:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise InputError(f"{flag} {text!r} is not KEY=VALUE")
        options[key] = _value(value)
    return options


def _value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
