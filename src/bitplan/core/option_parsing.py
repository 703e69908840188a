"""What people write in one word: NAME, or NAME:KEY=VALUE,KEY=VALUE with options of what is named."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from bitplan.core.errors import InputError


def read_named(written: str, flag: str) -> tuple[str, dict[str, Any]]:
    """Return a name and its options, such as those of "local:workers=2"; errors call them `flag`."""
    options_begin = re.search(r":(?=\w+=)", written)  # package.module:factory has a colon too
    place = options_begin.start() if options_begin else written.find(":") % (len(written) + 1)
    name, options = written[:place], written[place + 1 :]
    return name, read_options(split_options(options), flag)


def split_options(written: str) -> list[str]:
    """Split "a=1,b=60%,70%,c=(drift:x=8,y=1)" into a=1, b=60%,70% and c=…: at commas outside brackets before a key."""
    return re.split(r",(?![^()]*\))(?=\w+=)", written) if written else []


def read_options(written: Sequence[str], flag: str) -> dict[str, Any]:
    """Read KEY=VALUE texts; numbers and true/false become what they say."""
    options: dict[str, Any] = {}
    for text in written:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise InputError(f"{flag} {text!r} is not KEY=VALUE")
        options[key] = _value(value[1:-1] if value.startswith("(") and value.endswith(")") else value)
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
