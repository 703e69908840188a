"""Is a thing what it should be? Which members of a protocol it lacks, and the one line that says so."""

from __future__ import annotations

import inspect
from typing import Any

from bitplan.core.errors import InputError


def lacks(thing: object, protocol: Any) -> list[str]:
    """The members of a protocol that a thing does not have, or has as None; those of the protocol's bases first."""
    return [member for member in _members(protocol) if getattr(thing, member, None) is None]


def check_is(thing: object, protocol: Any, what: str) -> None:
    """Refuse a thing that lacks a member; deriving from the protocol brings those that have defaults."""
    missing = lacks(thing, protocol)
    if missing:
        name = thing.__name__ if inspect.isclass(thing) else type(thing).__name__
        home = f"{protocol.__module__}.{protocol.__name__}"
        raise InputError(
            f"{name} is no {what}, for it has no {' and no '.join(missing)}: derive it from {home} (docs/extend.md)"
        )


def _members(protocol: Any) -> list[str]:
    """The public names that a protocol and its bases declare."""
    declared: dict[str, None] = {}
    for base in reversed(protocol.__mro__):
        if base.__module__ != "typing":  # Protocol itself, and Generic
            declared |= dict.fromkeys((*vars(base).get("__annotations__", {}), *vars(base)))
    return [name for name in declared if not name.startswith("_")]
